"""The table of models: assigns models to folders, and publishes their served versions. A folder may define several
models, and a name belongs to one folder. Only the table changes the serving table. It also records the changes of the
repository index."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import cast

from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.model_names import ModelKey, ModelNames
from rocserve.core.printable import encodable
from rocserve.core.serving import IndexEntry, ServedModel, ServingTableHolder
from rocserve.observability.log_fields import about
from rocserve.protocol.page_pb2 import RepositoryEvent
from rocserve.repository.content import ModelContent
from rocserve.repository.context import RepositoryContext
from rocserve.repository.ensemble_members import innermost_first, members_of, reachable
from rocserve.repository.model import ManagedModel
from rocserve.repository.retries import Failure

_REMOVED_SHOWN = 256
"""Removed models that the repository index still shows."""


class RepositoryEvents:
    """Records changes of the repository index for clients that follow it. All calls are made on the loop."""

    def __init__(self) -> None:
        # Not more, because the reason in an event may have some kilobytes.
        self._events: deque[RepositoryEvent] = deque(maxlen=200)
        self._rows: dict[ModelKey, Sequence[IndexEntry]] = {}
        """The rows of each model as of its last change."""
        self._number = 0
        self._next = asyncio.Event()
        """Set by the next event, then replaced."""
        self.has_ended = False

    def record(self, key: ModelKey, rows: Sequence[IndexEntry]) -> None:
        """Record the rows of a model that differ from its previous ones."""
        known = set(self._rows.get(key, ()))
        self._rows[key] = [replace(row, served=None, namespace="") for row in rows]
        for row in self._rows[key]:
            if row not in known:
                self._append(row)

    def note_act(self, act: str, name: str, address: str) -> None:
        """Record an operator's act. `name`: the model's; "" = the act concerns the server."""
        self._append(IndexEntry(name), act, address)

    def _append(self, row: IndexEntry, act: str = "", address: str = "") -> None:
        self._number += 1
        self._events.append(
            RepositoryEvent(
                number=self._number,
                time_ms=time.time_ns() // 1_000_000,
                name=encodable(row.name),
                version=row.version,
                state=row.state,
                reason=encodable(row.reason),
                lacks_files=row.lacks_files,
                act=act,
                address=address,
            )
        )
        self._wake()

    def forget(self, key: ModelKey) -> None:
        """Forget a model that the repository index no longer shows."""
        self._rows.pop(key, None)

    def end(self) -> None:
        """End the waiting of `after`, because the server ends."""
        self.has_ended = True
        self._wake()

    async def after(self, number: int, seconds: float) -> Sequence[RepositoryEvent]:
        """Return the events after event `number`, waiting up to `seconds` for one. Returns all events if the number has
        not been reached, because it comes from another server."""
        number = 0 if number > self._number else number
        if number == self._number and not self.has_ended:
            try:
                async with asyncio.timeout(seconds):
                    await self._next.wait()
            except TimeoutError:
                return ()
        return [event for event in self._events if event.number > number]

    def _wake(self) -> None:
        waited, self._next = self._next, asyncio.Event()
        waited.set()


class ModelTable:
    """Gives the contents of folders to their models, and publishes the served versions. Calls are made on the loop's
    thread unless stated otherwise."""

    def __init__(self, context: RepositoryContext, holder: ServingTableHolder) -> None:
        settings = context.settings
        roots = settings.roots if settings.model_namespacing else ()
        self.names = ModelNames(dict.fromkeys(str(root.absolute()) for root in roots))
        self.models: dict[ModelKey, ManagedModel] = {}
        self.events = RepositoryEvents()
        self.is_started = False
        """Whether the server's first loads have ended."""
        self.context = context
        self._holder = holder
        self._is_closed = False
        self._keys_by_folder: dict[ModelKey, set[ModelKey]] = {}
        """The keys of the models that each folder defines."""
        self._waiting_for: dict[ModelKey, tuple[ModelKey, Callable[[], None]]] = {}
        """Refused folder -> the key that another folder's model has, and the call when that model is gone."""
        self._removed: dict[ModelKey, None] = {}
        """Removed models in the order of their removal; the values are unused."""
        self._served: dict[ModelKey, ServedModel] = {}
        """The models' entries in the serving table."""
        self._ensembles: dict[ModelKey, ManagedModel] = {}
        self._aliases: Set[ModelKey] = frozenset()
        """With namespaces: keys under which requests reach a model of another key."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed: deque[ModelKey] = deque()
        """Keys for `publish_soon`."""
        self._collected: set[ModelKey] | None = None
        """Keys that `one_publication` publishes at its end; None outside of it."""
        self._subscribers: list[Callable[[Collection[ModelKey]], None]] = []
        self._preparers: list[Callable[[Collection[ModelKey]], None]] = []

    # Folders and their models

    def folder_of(self, key: ModelKey) -> ModelKey | None:
        """Return the folder that defines the model now; None if no folder does."""
        model = self.models.get(key)
        return None if model is None else model.folder

    def member(self, key: ModelKey) -> ManagedModel | None:
        """Return the member of an ensemble by its key: the model in the ensemble's repository, else the only one of its
        name."""
        own = self.models.get(key)
        if not self.names.namespaces or (own is not None and own.content is not None):
            return own
        name = self.names.bare(key)
        others = [model for model in self.models.values() if model.name == name and model.content is not None]
        return others[0] if len(others) == 1 else None

    def members(self, model: ManagedModel) -> Set[ManagedModel]:
        """Return an ensemble's members that exist."""
        config = model.config
        found = map(self.member, members_of(config) if config is not None else ())
        return {member for member in found if member is not None}

    def with_members(self, name: str) -> Collection[ModelKey]:
        """Return the keys of the models of a name and of their members at any depth."""
        named = self.names.keys(name, self.models)
        return tuple(reachable(named, lambda key: [member.key for member in self.members(self.models[key])]))

    def models_of(self, folder: ModelKey) -> list[ManagedModel]:
        return [self.models[key] for key in sorted(self._keys_by_folder.get(folder, ()))]

    def defines_models(self, folder: ModelKey) -> bool:
        """Whether the folder has defined a model. Called from any thread."""
        return folder in self._keys_by_folder

    def close(self) -> None:
        """Refuse `apply` from now on, and cancel the running loads."""
        self._is_closed = True
        self._waiting_for.clear()
        self.events.end()
        for model in self.models.values():
            model.stop_loading()

    def apply(
        self,
        folder: ModelKey,
        contents: Sequence[ModelContent],
        *,
        retries_failed: bool = False,
        on_freed: Callable[[], None] | None = None,
    ) -> None:
        """Give a folder's contents to its models, and remove models that it no longer defines. Raises ServeError,
        before anything is changed: INVALID_ARGUMENT if another folder defines one of the names; `on_freed` is then
        called when it no longer does; UNAVAILABLE after `close`."""
        if self._is_closed:
            raise unavailable("Server exiting")
        self._waiting_for.pop(folder, None)
        names = [content.model for content in contents]
        for name in names:
            owner = self.folder_of(name)
            if owner not in (None, folder):
                if on_freed is not None:
                    self._waiting_for[folder] = name, on_freed
                raise invalid_argument(
                    f"model '{name}' is defined by both the folders '{owner}' and '{folder}' of the model repository;"
                    " rename one"
                )
        for model in self.models_of(folder):
            if model.key not in names:
                self._remove(model)
        for content in contents:
            for warning in content.definition.warnings:
                fields = about(model=content.definition.name)
                self.context.log.warning("%s: %s", content.definition.name, warning, extra=fields)
            self._own(content.model, folder).apply(content, retries_failed=retries_failed)

    def reject(self, folder: ModelKey, problem: Failure, name: ModelKey | None = None) -> None:
        """Note that a folder's content cannot be used; served models stay. `name`: the key of a generated model, whose
        folder key no real folder has."""
        doing = "read model folder" if name is None else "make model"
        name = name or folder
        self.context.log.error("failed to %s '%s': %s", doing, name, problem.text)
        models = self.models_of(folder)
        if not models and self.folder_of(name) in (None, folder):
            models = [self._own(name, folder)]
        for model in models:
            model.reject(problem)

    def unload(self, model: ManagedModel) -> None:
        """Unload a model that a client no longer wants. The model is removed if its folder is no longer in a
        repository, for example a folder that a client sent."""
        if model.folder is None or model.folder in self.context.scanner.latest.models:
            model.remove()
        else:
            self._remove(model)

    def drop(self, folder: ModelKey) -> None:
        """Remove the models of a folder that is gone or no longer holds a model."""
        self._waiting_for.pop(folder, None)
        for model in self.models_of(folder):
            self._remove(model)

    def _own(self, key: ModelKey, folder: ModelKey) -> ManagedModel:
        self._keys_by_folder.setdefault(folder, set()).add(key)
        self._removed.pop(key, None)
        if key not in self.models:
            self.models[key] = ManagedModel(
                key,
                self.names,
                self.context,
                is_added_later=self.is_started,
                publish=functools.partial(self.publish, key),
                publish_soon=functools.partial(self.publish_soon, key),
            )
        self.models[key].folder = folder
        return self.models[key]

    def _remove(self, model: ManagedModel) -> None:
        self.context.log.info("model '%s' is no longer in the repository", model.name, extra=about(model=model.name))
        folder, model.folder = model.folder, None
        assert folder is not None, "a folder defines the model"
        self._keys_by_folder[folder].discard(model.key)
        if not self._keys_by_folder[folder]:
            self._keys_by_folder.pop(folder)
        self._removed[model.key] = None
        model.remove()

    # Publication

    def publish(self, *changed: ModelKey) -> None:
        """Replace the serving table, then unload the retired versions. Ensembles are compared with their members first.
        `changed`: keys of the models whose entries may have changed."""
        self._loop = asyncio.get_running_loop()
        if self._collected is not None:
            self._collected.update(changed)
            return
        for key in changed:
            changed_model = self.models.get(key)
            if changed_model is not None and changed_model.is_ensemble:
                self._ensembles[key] = changed_model
            else:
                self._ensembles.pop(key, None)
            self._update_entry(key)
        for prepare in self._preparers:
            prepare(changed)
        changed_keys = {*changed, *self._review_ensembles(changed)}
        models = [self.models[key] for key in changed_keys if key in self.models]
        for model in models:
            self.events.record(model.key, model.entries())
        served = dict(self._served)
        resolved, ambiguous = self._resolved(served)
        if self.names.namespaces:
            resolved_keys = ((ModelKey(name), model) for name, model in resolved.items())
            self._aliases = {key for key, model in resolved_keys if served.get(key) is not model}
        self._holder.table = replace(
            self._holder.table,
            models=resolved,
            listed=tuple(served.values()),
            ambiguous=ambiguous,
        )
        for model in models:
            model.unload_retired()
        for key in list(self._removed)[:-_REMOVED_SHOWN]:
            for known in (self._removed, self.models, self._served):
                known.pop(key, None)
            self.events.forget(key)
        for folder, (name, on_freed) in tuple(self._waiting_for.items()):
            is_free = name in changed_keys and self.folder_of(name) is None
            # An earlier callback may have published, and so called this one.
            if is_free and self._waiting_for.pop(folder, None) is not None:
                on_freed()
        for callback in tuple(self._subscribers):
            try:
                callback(changed_keys)
            except Exception:
                self.context.log.exception("a subscriber to the serving table failed")

    @contextlib.contextmanager
    def one_publication(self) -> Iterator[None]:
        """Publish changes together at the end, because a publication's time grows with the number of models."""
        self._collected = set()
        try:
            yield
        finally:
            collected, self._collected = self._collected, None
            if collected:
                self.publish(*collected)

    def subscribe(self, callback: Callable[[Collection[ModelKey]], None]) -> Callable[[], None]:
        """Call back on the loop's thread after each publication, with the keys of the changed models. Calling the
        returned function ends the subscription."""
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._subscribers.remove(callback)

        return unsubscribe

    def prepare(self, callback: Callable[[Collection[ModelKey]], None]) -> None:
        """Call back on the loop's thread before each publication compares ensembles with their members, with the keys
        of the changed models."""
        self._preparers.append(callback)

    def publish_soon(self, changed: ModelKey) -> None:
        """Publish a model on the loop's thread, with others that have changed meanwhile. Called from any thread."""
        self._changed.append(changed)
        # A worker may report a change after the loop has ended.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._publish_changed)

    def _publish_changed(self) -> None:
        if changed := {self._changed.popleft() for _ in range(len(self._changed))}:
            self.publish(*changed)

    def _update_entry(self, key: ModelKey) -> None:
        """Update a model's entry. Only changed models are updated, because many may fail again and again."""
        model = self.models.get(key)
        offered = None if model is None else model.served_model()
        if offered is None:
            self._served.pop(key, None)
        else:
            self._served[key] = offered

    def is_any_loading(self, keys: Iterable[ModelKey]) -> bool:
        """Whether one of these models is being loaded, or is an ensemble that waits for such a member."""

        def awaited(key: ModelKey) -> Iterable[ModelKey]:
            model = self.models.get(key)
            if model is None:
                return self.names.keys(self.names.bare(key), self.models) if self.names.namespaces else ()
            return () if model.config is None or model.is_serving else members_of(model.config)

        found = map(self.models.get, reachable(keys, awaited))
        return any(model is not None and model.has_running_loads for model in found)

    def _review_ensembles(self, changed: Collection[ModelKey]) -> Collection[ModelKey]:
        """Compare changed ensembles, and ensembles of changed members, with their members, inner first. Returns their
        keys."""
        configs = {key: model.config for key, model in self._ensembles.items() if model.config is not None}
        members = {key: members_of(config) for key, config in configs.items()}
        # Names are compared, because with namespaces a member's key may now mean another model of its name.
        bare = self.names.bare
        changed_names = set(map(bare, changed))
        member_names = {bare(member) for one in members.values() for member in one}
        reviewed: dict[ModelKey, None] = {}
        resolved: Mapping[str, ServedModel] | None = None
        for key in innermost_first(members):
            if key in changed or not changed_names.isdisjoint(map(bare, members[key])):
                resolved = self._resolved(self._served)[0] if resolved is None else resolved
                self._ensembles[key].review_members(resolved, configs, self.member, self.is_any_loading)
                self._update_entry(key)
                reviewed[key] = None
                changed_names.add(bare(key))
                resolved = None if bare(key) in member_names else resolved
        return reviewed

    def _resolved(self, served: Mapping[ModelKey, ServedModel]) -> tuple[Mapping[str, ServedModel], Mapping[str, int]]:
        """Return the result of ModelNames.resolve."""
        if not self.names.namespaces:
            return cast("Mapping[str, ServedModel]", served), {}
        served = {key: model for key, model in served.items() if self.folder_of(key) is not None}
        # A model that replaces another one counts as present only when it serves.
        late = {key for key in self._aliases if (model := served.get(key)) is None or model.latest is None}
        known = [key for key, model in self.models.items() if model.content is not None and key not in late]
        return self.names.resolve({key: model for key, model in served.items() if key not in late}, known)
