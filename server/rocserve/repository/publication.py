"""Makes known what is served: the one place that replaces the serving table."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import replace

from rocserve.core.model_config import ModelConfig
from rocserve.core.model_names import ModelNames, Resolved
from rocserve.core.serving import ServedModel, ServingTableHolder
from rocserve.repository.background import BackgroundTasks
from rocserve.repository.events import RepositoryEvents
from rocserve.repository.loader import LoadedVersion
from rocserve.repository.managed_model import ManagedModel
from rocserve.repository.membership import members_of


class Publication:
    """Implements context.Publisher for the models that it holds."""

    def __init__(
        self, holder: ServingTableHolder, names: ModelNames, background: BackgroundTasks, log: logging.Logger
    ) -> None:
        self.models: dict[str, ManagedModel] = {}
        """By their keys."""
        self.events = RepositoryEvents()
        self._names = names
        self._served: dict[str, ServedModel] = {}
        """What the models offer, by their keys."""
        self._ensembles: dict[str, ManagedModel] = {}
        self._borrowed: Set[str] = frozenset()
        """With namespaces: what stands for models of other names or namespaces."""
        self._holder = holder
        self._background = background
        self._log = log
        self._loop: asyncio.AbstractEventLoop | None = None
        self._retired: list[tuple[LoadedVersion, Callable[[], None]]] = []
        self._subscribers: list[Callable[[Collection[str]], None]] = []

    def publish(self, *changed: str) -> None:
        """See context.Publisher. Ensembles are brought in line with their members first."""
        self._loop = asyncio.get_running_loop()
        for key in changed:
            self._note_ensemble(key)
            self._take(key)
        if len(self._served) > len(self.models):
            # Those that have been gone for long are known no more.
            self._served = {key: model for key, model in self._served.items() if key in self.models}
        changed_keys = {*changed, *self._review_ensembles(changed)}
        for key in changed_keys:
            if (model := self.models.get(key)) is not None:
                self.events.note(key, model.entries())
        served = dict(self._served)
        resolved = self._resolved(served)
        if self._names.namespaces:
            self._borrowed = {name for name, model in resolved.models.items() if served.get(name) is not model}
        self._holder.table = replace(
            self._holder.table,
            models=resolved.models,
            listed=tuple(served.values()),
            ambiguous=resolved.ambiguous,
        )
        retired, self._retired = self._retired, []
        for version, done in retired:
            self._background.start(self._unload(version, done), f"unload of {version.name} {version.version}")
        for callback in tuple(self._subscribers):
            try:
                callback(changed_keys)
            except Exception:
                self._log.exception("a subscriber to the serving table failed")

    def _take(self, key: str) -> None:
        """What a model offers now. All of them are not asked at each change: many may fail again and again."""
        model = self.models.get(key)
        offered = None if model is None else model.served_model()
        if offered is None:
            self._served.pop(key, None)
        else:
            self._served[key] = offered

    def _note_ensemble(self, key: str) -> None:
        model = self.models.get(key)
        if model is not None and model.is_ensemble:
            self._ensembles[key] = model
        else:
            self._ensembles.pop(key, None)

    def publish_soon(self, *changed: str) -> None:
        """See context.Publisher."""
        # A worker's last words may come after the loop has ended.
        if self._loop is None:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.publish, *changed)

    def retire(self, version: LoadedVersion, done: Callable[[], None]) -> None:
        """See context.Publisher."""
        self._retired.append((version, done))

    def subscribe(self, callback: Callable[[Collection[str]], None]) -> Callable[[], None]:
        """Call back on the loop's thread after each publication, with the keys of the models that it was for, until the
        returned function is called."""
        self._subscribers.append(callback)

        def unsubscribe() -> None:
            with contextlib.suppress(ValueError):
                self._subscribers.remove(callback)

        return unsubscribe

    def is_loading(self, name: str) -> bool:
        """Whether a model is being loaded, or is an ensemble that waits for one that is."""
        return self._is_loading(name, frozenset())

    def _is_loading(self, name: str, above: frozenset[str]) -> bool:
        model = self.models.get(name)
        if name in above:
            return False
        if model is None:
            others = self._names.keys(self._names.bare(name), self.models) if self._names.namespaces else ()
            return any(self._is_loading(key, above | {name}) for key in others)
        if model.has_running_loads or model.config is None or model.is_serving:
            return model.has_running_loads
        return any(self._is_loading(member, above | {name}) for member in members_of(model.config))

    def _review_ensembles(self, changed: Collection[str]) -> Collection[str]:
        """Bring those in line that have a member which has changed, until nothing changes, as ensembles may be members
        of ensembles; returns the keys of those."""
        configs = {key: model.config for key, model in self._ensembles.items() if model.config is not None}
        # With namespaces a member may be another model than it was.
        reviewed = set(configs if self._names.namespaces else _with_members(configs, changed))
        members = {member for key in reviewed for member in members_of(configs[key])}
        for _ in range(len(reviewed) + 1 if reviewed else 0):
            has_changed = False
            present = [self.models[key] for key in members if key in self.models]
            lacking = {model.key: model.lack_text() for model in present if model.lacks_files}
            for key in reviewed:
                served = self._resolved(self._served).models
                has_changed |= self._ensembles[key].review_members(served, configs, self.is_loading, lacking)
                self._take(key)
            if not has_changed:
                break
        return reviewed

    def _resolved(self, served: Mapping[str, ServedModel]) -> Resolved[ServedModel]:
        if not self._names.namespaces:
            return Resolved(served, {})
        served = {key: model for key, model in served.items() if key in self.models and not self.models[key].is_gone}
        # A model that another one stands for is there when it serves; until then nobody misses anything.
        late = {key for key in self._borrowed if (model := served.get(key)) is None or model.latest is None}
        known = [key for key, model in self.models.items() if model.content is not None and key not in late]
        return self._names.resolve({key: model for key, model in served.items() if key not in late}, known)

    async def _unload(self, version: LoadedVersion, done: Callable[[], None]) -> None:
        self._log.info("unloading: %s:%d", version.name, version.version)
        try:
            await version.unload()
        finally:
            done()
        self._log.info("successfully unloaded '%s' version %d", version.name, version.version)


def _with_members(ensembles: Mapping[str, ModelConfig], changed: Collection[str]) -> Set[str]:
    """The ensembles that have changed, have a member that has, or one that has such a member, and so on."""
    found: set[str] = set()
    news = set(changed)
    while news:
        found |= news & ensembles.keys()
        news = {
            key for key, config in ensembles.items() if key not in found and not news.isdisjoint(members_of(config))
        }
    return found
