"""The model repository's interface for the rest of the server."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from rocserve.amd_inference_server.endpoints import WorkerEndpoints
from rocserve.backends.registry import BackendRegistry
from rocserve.config.ensemble_drawing import draw, member_of
from rocserve.core.errors import ServeError, invalid_argument, not_found, unavailable
from rocserve.core.model_names import ModelKey
from rocserve.core.serving import IndexEntry, ServingTableHolder
from rocserve.observability.log_fields import about
from rocserve.protocol.page_pb2 import EnsembleGraphResponse, LoadReportResponse
from rocserve.repository.context import RepositoryContext
from rocserve.repository.ensemble_members import members_of, outermost
from rocserve.repository.explicit_control import ALL_MODELS, ExplicitControl
from rocserve.repository.hot_reload import HotReload
from rocserve.repository.load_order import LoadVersion
from rocserve.repository.load_report import LastLoad, make_report
from rocserve.repository.model import wait_for_loads, wait_for_unloads
from rocserve.repository.remote.remote_repositories import RemoteRepositories
from rocserve.repository.residency.resident_models import ResidentModels
from rocserve.repository.retries import Failure
from rocserve.repository.served_presets import PresetModels
from rocserve.repository.table import ModelTable
from rocserve.repository.version import UNLOADED, VersionState
from rocserve.settings import ControlMode, ReadinessRule, RepositorySettings


class ModelRepository:
    """Starts, loads, unloads and lists all models of the repositories. Queries may come from any thread."""

    def __init__(
        self,
        settings: RepositorySettings,
        registry: BackendRegistry,
        load: LoadVersion,
        tables: ServingTableHolder,
        log: logging.Logger,
        residents: ResidentModels,
    ) -> None:
        self._settings = settings
        self._log = log
        self._labels = root_labels(settings)
        self._remotes = RemoteRepositories(settings, log.getChild("remote"))
        self._context = context = RepositoryContext(settings, registry, load, residents, log)
        self._table = ModelTable(context, tables)
        self.events = self._table.events
        self._unready: set[ModelKey] = set()
        """Models that made the server unready at their last change."""
        self._table.subscribe(self._review_readiness)
        self._hot_reload = HotReload(context, self._table)
        self._explicit = ExplicitControl(context, self._table, self._remotes)
        self._preset_models = PresetModels(context, self._table)
        self.endpoints = WorkerEndpoints(
            settings, context.scanner, context.reader, self._table, tables, context.background, log
        )
        self._scan_task: asyncio.Task[None] | None = None
        self._not_found: Mapping[str, str] = {}
        """Models of --load-model that were not found, with the reason. Replaced, never changed: other threads read."""
        self._is_stopping = False

    async def start(self) -> None:
        """Start following the repositories. Returns when each present model is ready or has failed."""
        self._table.publish()
        await asyncio.to_thread(self._context.reader.remove_left)
        await self._remotes.open()
        mode = self._settings.control_mode
        if mode is ControlMode.POLL:
            self._context.retries.enabled = not self._settings.ends_on_failure
            await self._context.watch.renew()
            if self._settings.remotes:
                # Models that have arrived are loaded while others are still being copied.
                self._start_scanning()
                await self._remotes.start(None)
            await self._hot_reload.scan()
            # A second scan settles the folders that were too young at the first scan.
            if self._context.debounce.unsettled:
                await asyncio.sleep(self._settings.settle_seconds)
                await self._hot_reload.scan()
            if not self._settings.remotes:
                self._start_scanning()
            await self._hot_reload.wait()
            models = tuple(self._table.models.values())
            await wait_for_loads(models)
            for model in models:
                model.is_optional |= model.lacks_files
            self._context.retries.enabled = True
        else:
            names = self._settings.load_models if mode is ControlMode.EXPLICIT else (ALL_MODELS,)
            await self._remotes.start(None if ALL_MODELS in names else names)
            self._not_found = await self._explicit.load_at_start(names)
        await self._preset_models.wait(tuple(self._table.models))
        if mode is ControlMode.EXPLICIT:
            self._start_scanning()
        self._table.is_started = True
        self._context.load_level = logging.INFO
        self._table.publish(*self._table.models)

    def begin_stop(self) -> None:
        """Accept no new work, and cancel the loads of new content, because a load may take an hour. Served models and
        loads for requests go on."""
        self._is_stopping = True
        if self._scan_task is not None:
            self._scan_task.cancel()
        self._hot_reload.stop()
        self._preset_models.stop()
        self._table.close()

    async def stop(self) -> None:
        """Drain and unload all models, ensembles first because their requests still need the members."""
        self.begin_stop()
        self._context.load_level = logging.DEBUG
        if self._scan_task is not None:
            await asyncio.wait([self._scan_task])
        await self._context.watch.close()
        await asyncio.to_thread(self._remotes.stop)
        models = self._table.models
        while configs := {key: one.config for key, one in models.items() if one.config and one.config.is_ensemble}:
            removed = [models[key] for key in outermost({key: members_of(one) for key, one in configs.items()})]
            for model in removed:
                model.remove()
            # Only for these: other models may still load, for an hour.
            await wait_for_unloads(removed)
        for model in models.values():
            model.remove()
        await self._context.background.wait()

    def index(self, ready_only: bool, names: Collection[str] = ()) -> list[IndexEntry]:
        """Return the rows of the repository index, by name and version. `names`: only of these models; empty = all."""
        known = self._table.models.copy()
        keys = {key for name in names for key in self._table.names.keys(name, known)} if names else known
        models = [known[key] for key in sorted(keys)]
        if self._labels or self._table.names.namespaces:
            rows = [
                replace(row, namespace=model.namespace, repository=label)
                for model in models
                for label in (self._labels.get(model.root or Path(), ""),)
                for row in model.entries()
            ]
        else:
            rows = [row for model in models for row in model.entries()]
        if ready_only:
            return [row for row in rows if row.state == VersionState.READY.value]
        # With namespaces a model of the same name may come from another folder.
        named = set() if self._table.names.namespaces else {row.name for row in rows}
        others = [row for row in self._rows_of_folders(names) if row.name not in named]
        found = [*self._remotes.rows(rows + others), *self._rows_of_unreadable()]
        return sorted((row for row in found if not names or row.name in names), key=lambda row: row.name)

    async def load_report(self, name: str, version: int | None) -> tuple[LoadReportResponse, Failure | None]:
        """Report the latest load of a version, or of a row of the repository index without a version, and return its
        failure, too. Raises ServeError (NOT_FOUND)."""
        load = self._last_load(name, version)
        return await asyncio.to_thread(make_report, load, self._settings), load.failure

    def _last_load(self, name: str, version: int | None) -> LastLoad:
        models = self._table.models
        key = next(iter(self._table.names.keys(name, models)), None)
        if key is not None:
            return models[key].last_load(version)
        scans = self._context.scanner.latest.models.values()
        scan = next((scan for scan in scans if scan.name == name), None)
        if scan is None:
            raise not_found(f"'{name}' is neither a model nor a folder of the model repository")
        return LastLoad(scan, None)

    async def ensemble_drawing(self, name: str, version: int | None, width: float) -> EnsembleGraphResponse:
        """Draw an ensemble, whether it is served or not; empty = it is not an ensemble, or its configuration cannot be
        read. Raises ServeError (NOT_FOUND)."""
        models = self._table.models
        key = next(iter(self._table.names.keys(name, models)), None)
        config = None if key is None else models[key].config_message(version)
        scan = self._last_load(name, version).scan
        if config is None and scan is not None:
            config = await asyncio.to_thread(self._context.reader.written_ensemble, scan)
        if config is None or not config.ensemble_scheduling.step:
            return EnsembleGraphResponse()
        members = {key: self._table.member(key) for key in map(member_of, config.ensemble_scheduling.step)}
        messages = {key: model.config_message() for key, model in members.items() if model is not None}
        known = {key: message for key, message in messages.items() if message is not None}
        return await asyncio.to_thread(draw, config, known, width)

    async def load(self, name: str, parameters: Mapping[str, bool | int | str | bytes]) -> None:
        """Load or reload a model; only under explicit control. Raises ServeError with Triton's codes and words."""
        self._check_explicit()
        try:
            await self._explicit.load(name, parameters)
            await self._preset_models.wait(self._table.with_members(name))
        except ServeError:
            self._check_explicit()
            raise

    async def reload(self, name: str) -> None:
        """Load a model again, even if its files have not changed or have just failed; the served version stays until
        the new one is ready. Under explicit control, waits for the load; in polling mode, only starts it. Raises
        ServeError: UNAVAILABLE if models are loaded at the start only, NOT_FOUND for a name without a folder."""
        if self._settings.control_mode is ControlMode.NONE:
            raise unavailable("this server loads models only at its start (--model-control-mode=none)")
        if self._is_stopping:
            raise unavailable("Server exiting")
        models = self._table.models
        keys = self._table.names.keys(name, models)
        for key in keys:
            models[key].ask_for_reload()
        if self._settings.control_mode is ControlMode.EXPLICIT:
            await self.load(name, {})
            return
        for folder in {self._table.folder_of(key) or key for key in keys or (ModelKey(name),)}:
            self._hot_reload.read_again(folder)

    async def unload(self, name: str, unload_dependents: bool, version: int | None = None) -> None:
        """Take a model out of service immediately and unload it in the background; only under explicit control, but
        endpoints in any mode. Unknown names and versions are accepted. `version`: None = all. Raises ServeError:
        UNAVAILABLE in another mode, INVALID_ARGUMENT for one version of an endpoint."""
        if version is not None:
            if self.endpoints.has(name):
                raise invalid_argument(f"'{name}' is an endpoint, which is unloaded as a whole; leave 'version' out")
            self._check_explicit()
            self._explicit.unload_version(name, version)
            return
        if self.endpoints.has(name):
            await self.endpoints.unload(name)
            return
        self._check_explicit()
        self._explicit.unload(name, unload_dependents)
        if name in self._not_found:
            self._not_found = {one: text for one, text in self._not_found.items() if one != name}
            self._table.publish()

    def is_ready(self) -> bool:
        """Whether the whole server is ready for requests."""
        if not self._table.is_started or self._is_stopping:
            return False
        if self._settings.readiness is ReadinessRule.STARTED:
            return True
        if self._missing() or self._remotes.lacking():
            return False
        # Only models that were unready at their last change are asked, because there may be thousands of ready ones.
        return all(map(self._is_ready, self._unready.copy()))

    def _missing(self) -> Mapping[str, str]:
        """Return the models that were missing at the start and have not appeared since."""
        models, names = self._table.models.copy() if self._not_found else {}, self._table.names
        return {name: text for name, text in self._not_found.items() if not names.keys(name, models)}

    def _review_readiness(self, changed: Collection[ModelKey]) -> None:
        for key in changed:
            (self._unready.discard if self._is_ready(key) else self._unready.add)(key)

    def _is_ready(self, key: ModelKey) -> bool:
        model = self._table.models.get(key)
        if model is None:
            return True
        return model.serves_all() if self._settings.readiness is ReadinessRule.ALWAYS else model.is_ready()

    def failed_models(self) -> dict[str, str]:
        models = sorted(self._table.models.copy().items())
        failed: dict[str, str] = {name: text for name, model in models if (text := model.failure_text())}
        return {**self._missing(), **self._remotes.lacking(), **failed}

    def log_failures(self) -> None:
        """Log the failures that were not logged when they happened."""
        for name, model in sorted(self._table.models.items()):
            if text := model.unlogged_failure():
                self._log.error("model '%s' failed to load: %s", name, text, extra=about(model=str(name)))

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call back on the loop's thread when readiness may have changed, until the returned function is called."""
        return self._table.subscribe(lambda _: callback())

    def scan_soon(self) -> None:
        self._context.watch.wake()

    def _start_scanning(self) -> None:
        if not self._is_stopping:
            self._scan_task = asyncio.get_running_loop().create_task(self._hot_reload.run(), name="repository scans")

    def _check_explicit(self) -> None:
        if self._settings.control_mode is not ControlMode.EXPLICIT:
            raise unavailable("explicit model load / unload is not allowed if polling is enabled")
        if self._is_stopping:
            raise unavailable("Server exiting")

    def _rows_of_folders(self, names: Collection[str]) -> list[IndexEntry]:
        """Return rows for folders that have not defined a model yet. `names`: as of `index`."""
        rows = []
        scans = self._context.scanner.latest.models
        if names and not self._table.names.namespaces:
            scans = {key: scans[key] for key in map(ModelKey, names) if key in scans}
        for name, scan in scans.items():
            if self._table.defines_models(name):
                continue
            state = reason = ""
            if not self._context.is_polling:
                # Triton lists folders only.
                if scan.is_stray:
                    continue
            elif not scan.looks_like_model and not scan.refusal:
                no_model = f"'{scan.folder}' has neither a configuration nor a version folder (1, 2, ...)"
                state, reason = VersionState.UNKNOWN.value, "; ".join(scan.advice) or no_model
            elif name in self._context.debounce.unsettled:
                state, reason = VersionState.LOADING.value, "waiting until its files settle"
            elif self._hot_reload.is_reading(name):
                state = VersionState.LOADING.value
            else:
                continue
            label = self._labels.get(scan.root, "")
            rows.append(IndexEntry(scan.name, "", state, reason, namespace=scan.namespace, repository=label))
        return rows

    def _rows_of_unreadable(self) -> list[IndexEntry]:
        """Return rows for folders of models that cannot be read; those of stores have rows for the stores."""
        copies = {place.root.absolute() for place in self._settings.remotes}
        text, state = "this repository cannot be read: {}; its models stay unchanged", VersionState.UNAVAILABLE.value
        unreadable = self._context.scanner.latest.unreadable.items()
        return [IndexEntry(str(root), "", state, text.format(why)) for root, why in unreadable if root not in copies]


def root_labels(settings: RepositorySettings) -> Mapping[Path, str]:
    """Return a short, distinct name of each repository, because the page does not show the server's paths: its URL, or
    the end of its path. Empty if there is only one."""
    roots = tuple(dict.fromkeys(settings.roots))
    if len(roots) < 2:
        return {}
    labels = {place.root: place.url for place in settings.remotes}
    local = {root: root.absolute().parts for root in roots if root not in labels}
    longest = max(map(len, local.values()), default=0)
    for length in range(1, longest + 1):
        ends = {root: str(Path(*parts[-length:])) for root, parts in local.items() if root not in labels}
        counts = Counter(ends.values())
        labels |= {root: end for root, end in ends.items() if counts[end] == 1 or length == longest}
    return labels


def outcomes(rows: Iterable[IndexEntry]) -> dict[tuple[str, str], bool]:
    """Return (name, namespace) -> whether the model is served, from index rows. Unwanted models are left out."""
    rows = list(rows)
    served = {(row.name, row.namespace) for row in rows if row.state == VersionState.READY.value}
    wanted = {(row.name, row.namespace) for row in rows if row.reason not in ("", UNLOADED)}
    return {model: model in served for model in sorted(served | wanted)}


def summary(rows: Iterable[IndexEntry], status_command: str) -> str:
    """Describe in one line which models are served. `status_command`: the command that shows the reasons."""
    found = outcomes(rows)
    count = sum(found.values())
    text = f"{count} model{'' if count == 1 else 's'} served"
    if all(found.values()):
        return text
    lacking = ", ".join(name for (name, _), is_served in found.items() if not is_served)
    return f"{text}, not served: {lacking}; {status_command} says why"
