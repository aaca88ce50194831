"""The life of one model: decides which of its versions are loaded, kept and retired, and reports them to the index."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rocserve.config.model_folder import no_version_text
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.model_names import ModelKey, ModelNames, namespace_of
from rocserve.core.serving import IndexEntry, ServedModel
from rocserve.observability.log_fields import about
from rocserve.protocol.model_config_pb2 import ModelConfig as ModelConfigMessage
from rocserve.repository.content import ModelContent
from rocserve.repository.context import RepositoryContext
from rocserve.repository.ensemble_members import FITS, MemberReview, Served, members_of, review
from rocserve.repository.load_order import FilesChanged
from rocserve.repository.load_report import LastLoad
from rocserve.repository.retries import Failure
from rocserve.repository.version import ManagedVersion, VersionState, status_name
from rocserve.scheduling.ensemble.graph import find_member


class ManagedModel:
    """Loads, serves and retires the versions of one model. All calls are made on the loop's thread. Properties and
    queries may come from any thread, so they read each changing attribute only once."""

    def __init__(
        self,
        key: ModelKey,
        names: ModelNames,
        context: RepositoryContext,
        *,
        is_added_later: bool,
        publish: Callable[[], None],
        publish_soon: Callable[[], None],
    ) -> None:
        """`key` is unique within the server; with namespaces the name is not. `is_added_later`: after the server's
        first loads. `publish`: updates the model in the serving table; `publish_soon`: the same, from any thread."""
        self.key = key
        self.name = names.bare(key)
        self.folder: ModelKey | None = None
        """Key of the folder that defines the model; None = the repository no longer has it."""
        self.content: ModelContent | None = None
        self._context = context
        self._names = names
        self._publish = publish
        self._publish_soon = publish_soon
        self._is_added_later = is_added_later
        """Its first load does not make the server unready."""
        self.is_optional = is_added_later and context.is_polling
        """No client relies on the model before it has served, so its failure does not make the server unready."""
        self._has_warned = False
        self._versions: Mapping[int, ManagedVersion] = {}
        """In ascending order. Replaced, never changed, because other threads read it."""
        self._rejection: Failure | None = None
        """Why the folder's present content cannot be used; `content` is then an earlier one."""
        self._members = FITS
        """Whether the members allow this ensemble's content to be loaded."""
        self._is_load_due = False
        """This ensemble's content must be loaded as soon as its members allow it."""
        self._logged = ""
        """The log's last reason why newer content does not fit the members; empty after it has fitted."""
        self.expects_content = False
        """New content is being made for this generated model."""

    @property
    def is_ensemble(self) -> bool:
        config = self.config
        return config is not None and config.is_ensemble

    @property
    def config(self) -> ModelConfig | None:
        content = self.content
        return None if content is None else content.definition.config

    @property
    def is_loading(self) -> bool:
        """Whether a version is being loaded, or an ensemble waits for a member that is being loaded."""
        return self._members.are_loading or self.has_running_loads

    @property
    def has_running_loads(self) -> bool:
        return any(version.is_loading for version in self.versions)

    @property
    def waits_for_files(self) -> bool:
        return any(version.waits_for_files for version in self.versions)

    @property
    def is_serving(self) -> bool:
        return any(version.is_serving for version in self.versions)

    @property
    def lacks_files(self) -> bool:
        """Whether the model waits for its files: it has never had a version, or it is an ensemble whose missing members
        all wait for their files. Waiting is not a failure."""
        content = self.content
        if content is None or self._rejection is not None or self._versions:
            return False
        return self._members.lacks_files or not content.scan.versions

    def apply(self, content: ModelContent, *, retries_failed: bool = False) -> None:
        """Replace the model's content. A served version stays until its successor is ready. `retries_failed`: ignore
        recent failures."""
        self.content = content
        self.expects_content = False
        self._rejection = None
        for version in self.versions:
            if retries_failed:
                version.forget_failure()
        self.reconcile()

    def ask_for_reload(self) -> None:
        """Let the next content load again, although the same is served or has just failed."""
        for version in self.versions:
            version.ask_for_reload()

    def reject(self, problem: Failure) -> None:
        """Note that the current content cannot be used. Served versions stay."""
        self._rejection = problem
        self._is_load_due = self.expects_content = False
        for version in self.versions:
            version.reject(problem.error)
        self._forget_versions()
        self.publish()

    def remove(self) -> None:
        """Unload all versions. The repository may no longer have the model."""
        self.content = self._rejection = None
        self._members = FITS
        self._is_load_due = self.expects_content = False
        self.is_optional |= self.folder is None and self._context.is_polling
        self._has_warned = False
        for version in self.versions:
            version.retire()
        self._forget_versions()
        self._publish()

    def unwant(self, number: int) -> None:
        """Unload a version regardless of the version policy; the others stay."""
        if self.content is not None:
            self.content = replace(self.content, wanted=self.content.wanted - {number})
        if number in self._versions:
            self._versions[number].retire()
            self._forget_versions()
            self._publish()

    def stop_loading(self) -> None:
        for version in self.versions:
            version.stop_loading()

    def unload_retired(self) -> None:
        for version in self.versions:
            version.unload_retired()

    def review_members(
        self,
        served: Served,
        ensembles: Mapping[ModelKey, ModelConfig],
        member: Callable[[ModelKey], ManagedModel | None],
        is_any_loading: Callable[[Iterable[ModelKey]], bool],
    ) -> None:
        """Compare this ensemble with the models served now, and load it if they allow it. `ensembles`: the
        configurations of all ensembles. `member`, `is_any_loading`: as in ModelTable."""
        content = self.content
        assert content is not None, "an ensemble has content"
        config = content.definition.config
        error = review(self.key, config, served, ensembles).problem
        missing = {step.member for step in config.ensemble_steps if find_member(step, served) is None}
        members = {key: member(key) for key in members_of(config)}
        lacking = [model for key, model in members.items() if key in missing and model and model.lacks_files]
        reasons = [f"{model.name}: {model.problem_text()}" for model in lacking]
        if error is not None and reasons:
            error = invalid_argument("; ".join((error.text, *reasons)))
        self._members = MemberReview(
            error,
            are_loading=error is not None and is_any_loading(members_of(config)),
            lacks_files=0 < len(missing) == len(reasons),
        )
        if self._is_load_due and self.is_serving and not self._members.are_loading:
            if (text := self._members.text) not in ("", self._logged):
                self._context.log.error(
                    "newer content of '%s' failed to load: %s", self.name, text, extra=about(model=self.name)
                )
            self._logged = text
        if error is not None and self.is_optional and not self._has_warned:
            # Later, because the members' folders may have come with this one's and not be read yet.
            asyncio.get_running_loop().call_later(self._context.settings.settle_seconds, self._warn_unserved)
        # What was generated together is served together.
        generated = [model for model in members.values() if model and model.folder == self.folder]
        awaits_generated = any(model.has_running_loads for model in generated)
        if self._is_load_due and error is None and not awaits_generated:
            self._is_load_due = False
            self._want_versions(content)
        awaits_members = self._is_load_due and (awaits_generated or self._members.are_loading)
        awaits_members |= self.expects_content
        for version in self.versions:
            if version.served is not None:
                found = review(self.key, version.served.config, served, ensembles)
                version.note_members(found, served, awaits_members or version.is_loading)

    def served_model(self) -> ServedModel | None:
        """Return the model's entry in the serving table; None if the model is gone and never served."""
        if self.content is None and self._rejection is None and not self._versions:
            return None
        versions = {
            version.number: version.served for version in self.versions if version.served and version.is_serving
        }
        unready = {version.number: version.reason for version in self.versions if version.number not in versions}
        latest = versions[max(versions)] if versions else None
        return ServedModel(self.name, versions, latest, unready, self.namespace)

    @property
    def root(self) -> Path | None:
        """The repository that has the model; None = it is gone."""
        content, folder = self.content, self.folder
        scan = None if folder is None else self._context.scanner.latest.models.get(folder)
        if scan is None and content is not None:
            scan = content.scan
        return None if scan is None else scan.root

    @property
    def namespace(self) -> str:
        return namespace_of(self.key, self.name)

    def entries(self) -> list[IndexEntry]:
        rows = [version.entry() for version in self.versions if not version.is_forgettable]
        problem = self.problem_text()
        if not problem or self.is_serving:
            # The rows of the served versions show the problem.
            return rows
        if self.lacks_files and not self.is_ensemble:
            # Triton shows a model that was never loaded without a version and a state.
            return [IndexEntry(self.name, "", "", problem, lacks_files=True)]
        members, content = self._members, self.content
        state = VersionState.LOADING if members.are_loading else VersionState.UNAVAILABLE
        if self._own_problem is not None or content is None:
            return [*rows, IndexEntry(self.name, "", state.value, problem)]
        known = {version.number for version in self.versions if not version.is_unloaded}
        lacking, waits = sorted(content.wanted - known), self.lacks_files
        return [
            *rows,
            *(IndexEntry(self.name, str(number), state.value, problem, lacks_files=waits) for number in lacking),
        ]

    def is_ready(self) -> bool:
        """Whether everything that clients rely on is served. Failures of newer content and of new models do not
        count."""
        if self.lacks_files or self.is_optional:
            return True
        versions = [version for version in self.versions if not version.is_unloaded]
        if any(
            served is not None and not served.is_cold and state is not VersionState.READY
            for served, state in ((version.served, version.state) for version in versions)
        ):
            return False
        if self.is_serving:
            unserved = [version for version in versions if version.served is None]
            return not any(version.has_failed and not version.is_added_later for version in unserved)
        if self._own_problem is not None or any(version.has_failed for version in versions):
            return False
        if self.is_loading:
            return self._is_added_later
        return self._members.problem is None

    def serves_all(self) -> bool:
        """Whether each version serves, except versions unloaded on purpose: Triton's strict readiness."""
        versions = [version for version in self.versions if not version.is_unloaded]
        return not self.problem_text() and all(version.state is VersionState.READY for version in versions)

    def failure_text(self) -> str:
        """Return why nothing of the model is served; "" if a version serves or nothing has failed."""
        if self.is_serving or self.lacks_files:
            return ""
        texts = [f"version {version.number}: {version.reason}" for version in self.versions if version.has_failed]
        return self.problem_text() or "; ".join(texts)

    def unlogged_failure(self) -> str:
        """Return `failure_text` if it is not logged yet: failed loads and unreadable folders are logged immediately."""
        is_logged = self._rejection is not None or any(version.has_failed for version in self.versions)
        return "" if is_logged else self.failure_text()

    def check_loaded(self, number: int | None = None) -> None:
        """Raise ServeError in Triton's words for the client that asked for the load, unless all is served. `number`:
        the one version that was asked for. The error is in no variable here: its traceback would keep this frame and
        the files of the client alive."""
        content = self.content
        if content is None or number not in (None, *content.wanted):
            raise unavailable(f"load failed for model '{self.name}': it was unloaded before it was loaded")
        if (problem := self._problem) is not None:
            raise invalid_argument(f"load failed for model '{self.name}': {problem.error.text}")
        reasons = ""
        for version in self.versions:
            if number not in (None, version.number):
                continue
            if version.number in content.wanted and (version.has_failed or not version.serves(content)):
                error = FilesChanged(is_followed=False) if version.failure is None else version.failure.error
                reasons += f"version {version.number} is at UNAVAILABLE state: {status_name(error)}: {error.text};\n"
        if reasons:
            raise invalid_argument(f"load failed for model '{self.name}': {reasons}")

    @property
    def versions(self) -> Iterable[ManagedVersion]:
        return self._versions.values()

    def reconcile(self) -> None:
        """Load and retire versions as the content asks, and publish the result."""
        content = self.content
        if content is not None and self._rejection is None:
            for version in self.versions:
                if version.number not in content.wanted:
                    version.reject(None)
            if content.definition.config.is_ensemble:
                # Publishing compares the ensemble with its members, and starts the load when they fit.
                self._is_load_due = True
            else:
                self._members = FITS
                self._want_versions(content)
            self._retire_unwanted(content)
            self._forget_versions()
        self.is_optional &= not self.is_serving
        self.publish()

    def publish(self) -> None:
        """Publish the model, and warn if it is not served."""
        self._publish()
        self._warn_unserved()

    def _warn_unserved(self) -> None:
        """Warn once if a new model is not served though the server stays ready."""
        if not self.is_optional or self._has_warned or self.is_loading or not self.failure_text():
            return
        self._has_warned = True
        text = self.unlogged_failure()
        self._context.log.warning(
            "the new model '%s' is not served%s; the server stays ready for the others. %s, or move its folder out of"
            " the repository (--strict-readiness=always makes the server unready)",
            self.name,
            f": {text}" if text else "",
            self._remedy(),
            extra=about(model=self.name),
        )

    def _remedy(self) -> str:
        """Return what an operator should do about a model that is not served."""
        failures = [self._own_problem, *(version.failure for version in self.versions if version.has_failed)]
        known = [failure for failure in failures if failure is not None]
        if known and all(failure.retry_at is not None for failure in known):
            return "The server tries again; if its files are the reason, correct them"
        what = "its files" if known else "the ensemble or its members"
        return f"Correct {what} (the server then loads it without a restart)"

    def _want_versions(self, content: ModelContent) -> None:
        is_late = self._is_added_later or self.is_serving
        missing = content.wanted - self._versions.keys()
        new = {number: self._version(number, is_late) for number in missing}
        self._versions = dict(sorted({**self._versions, **new}.items()))
        for number in sorted(content.wanted):
            self._versions[number].want(content)

    def _version(self, number: int, is_added_later: bool) -> ManagedVersion:
        return ManagedVersion(
            self.name,
            number,
            self._context,
            is_added_later=is_added_later,
            problem_of_model=self.problem_text,
            on_end=self.reconcile,
            on_change=self._publish_soon,
            publish=self.publish,
        )

    def _retire_unwanted(self, content: ModelContent) -> None:
        """Retire unwanted versions when all wanted ones serve `content`; versions without a folder when any wanted one
        serves or none is wanted. A wanted version's first load delays both."""
        wanted = [self._versions[number] for number in content.wanted if number in self._versions]
        serving = [version for version in wanted if version.served is not None]
        replaced = [version for version in serving if version.serves(content)]
        if any(version.is_loading for version in wanted if version.served is None):
            return
        for version in self.versions:
            if version.number in content.wanted or version.served is None:
                continue
            is_gone = version.number not in content.scan.versions
            if len(replaced) == len(content.wanted) > 0 or (is_gone and (serving or not content.wanted)):
                version.retire()

    def _forget_versions(self) -> None:
        unloaded = [version for version in self.versions if version.is_unloaded]
        # The repository index shows the last 32.
        too_many = unloaded[:-32]
        self._versions = {
            version.number: version
            for version in self.versions
            if version not in too_many and not version.is_forgettable
        }

    @property
    def _own_problem(self) -> Failure | None:
        """Why the present content cannot be used; an earlier one may be served."""
        rejection, content = self._rejection, self.content
        if rejection is not None or content is None or content.wanted:
            return rejection
        return Failure(invalid_argument("; ".join((no_version_text(content.definition.config), *content.scan.advice))))

    @property
    def _problem(self) -> Failure | None:
        """Why the model cannot be loaded."""
        own, of_members = self._own_problem, self._members.problem
        return own if own is not None or of_members is None else Failure(of_members)

    def last_load(self, number: int | None) -> LastLoad:
        """Return the known facts of a version's load. `number`: None = the model's row without a version."""
        version, content, failure = self._versions.get(-1 if number is None else number), self.content, self._problem
        if version is not None and version.has_failed:
            failure = version.failure
        scan = None if self.folder is None else self._context.scanner.latest.models.get(self.folder)
        if content is not None and (scan is None or content.private_folder is not None):
            scan = content.scan
        backend = None if content is None else content.definition.backend
        served = [version.served_change_ns for version in self.versions if number in (None, version.number)]
        config = self.config
        return LastLoad(
            scan,
            number,
            failure,
            backend="" if backend is None else backend.name,
            members=() if config is None else tuple(map(self._names.bare, members_of(config))),
            served_change_ns=max(served, default=0),
        )

    def config_message(self, number: int | None = None) -> ModelConfigMessage | None:
        """Return the configuration of a version that is served, else the present content's; None = it cannot be used.
        `number`: None = of the latest version."""
        served = [version.served for version in self.versions if number in (None, version.number) and version.served]
        if served:
            return ModelConfigMessage.FromString(served[-1].config_message)
        content = self.content
        return None if content is None or self._rejection is not None else content.definition.message

    def problem_text(self) -> str:
        """Return why the model cannot be loaded, or the remedy if it `lacks_files`."""
        problem = self._problem
        return "" if problem is None else problem.text


async def wait_for_loads(models: Iterable[ManagedModel]) -> None:
    """Return when no load of these models runs, including loads that begin meanwhile."""
    watched = tuple(models)
    while tasks := [version.task for model in watched for version in model.versions if version.task is not None]:
        await asyncio.wait(tasks)


async def wait_for_unloads(models: Iterable[ManagedModel]) -> None:
    """Return when the retired versions of these models are unloaded."""
    if tasks := [task for model in models for version in model.versions for task in version.unloads]:
        await asyncio.wait(tasks)
