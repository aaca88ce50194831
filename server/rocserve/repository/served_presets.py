"""Keeps the models of the parameter `preprocess` next to each served model; see config.preprocess."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection
from dataclasses import dataclass

from rocserve.config.preprocess.generated import GeneratedModel
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.model_names import ModelKey
from rocserve.core.serving import ServedVersion
from rocserve.presets import PREPROCESS, ensemble_name
from rocserve.repository.content import ModelContent
from rocserve.repository.context import RepositoryContext
from rocserve.repository.model import wait_for_loads
from rocserve.repository.retries import Failure
from rocserve.repository.table import ModelTable


@dataclass(slots=True, eq=False)
class _PresetSet:
    """The models that a preset has generated for a served model."""

    config: ModelConfig | None = None
    """The served configuration that the preset models are made for."""
    content: ModelContent | None = None
    models: tuple[GeneratedModel, ...] = ()
    task: asyncio.Task[None] | None = None


class PresetModels:
    """Makes and removes these models when the served models change. All calls are made on the loop's thread."""

    def __init__(self, context: RepositoryContext, table: ModelTable) -> None:
        self._context = context
        self._table = table
        self._sets: dict[ModelKey, _PresetSet] = {}
        self._unsubscribe = table.subscribe(self._review)
        table.prepare(self._announce)

    async def wait(self, keys: Collection[ModelKey]) -> None:
        """Return when all preset models of these models are loaded or have failed."""
        while tasks := [
            task for key in keys if key in self._sets and (task := self._sets[key].task) and not task.done()
        ]:
            await asyncio.wait(tasks)
        await wait_for_loads([model for key in keys for model in self._table.models_of(_folder(key))])

    def stop(self) -> None:
        self._unsubscribe()
        for made in self._sets.values():
            if made.task is not None:
                made.task.cancel()

    def _announce(self, changed: Collection[ModelKey]) -> None:
        """Let the served preset models go on with what they are made for until `_renew` has made new ones."""
        for key in {*changed} & self._sets.keys():
            model = self._table.models.get(key)
            served = None if model is None else model.served_model()
            version = None if served is None else served.latest
            if version is not None and version.config is not self._sets[key].config:
                for made in self._table.models_of(_folder(key)):
                    made.expects_content = True

    def _review(self, changed: Collection[ModelKey]) -> None:
        for key in {*changed} & self._table.models.keys():
            model = self._table.models[key]
            served = model.served_model()
            version = None if served is None else served.latest
            if version is not None and PREPROCESS in version.config.parameters and model.content is not None:
                made = self._sets.setdefault(key, _PresetSet())
                # The model was loaded again, so its unloaded preset models are wanted again.
                is_wanted_back = made.content is not model.content and self._lacks_some(key, made)
                is_due = made.config is not version.config or is_wanted_back
                made.config, made.content = version.config, model.content
                if is_due:
                    if made.task is not None:
                        made.task.cancel()
                    work = self._renew(key, model.content, version, made)
                    made.task = self._context.background.start(work, f"preset models of {key}")
            elif key in self._sets and (version is not None or model.content is None):
                made = self._sets.pop(key)
                if made.task is not None:
                    made.task.cancel()
                self._table.drop(_folder(key))

    def _make_again(self, key: ModelKey) -> None:
        """Make preset models that were refused because another folder had a model of their name."""
        if key in self._sets:
            self._sets[key].config = None
            self._review((key,))

    def _lacks_some(self, key: ModelKey, made: _PresetSet) -> bool:
        return len(self._table.models_of(_folder(key))) < len(made.models)

    async def _renew(self, key: ModelKey, content: ModelContent, version: ServedVersion, made: _PresetSet) -> None:
        try:
            await self._make(key, content, version, made)
        finally:
            # If another task has replaced this one, the models still expect new content.
            if made.task is asyncio.current_task():
                for model in self._table.models_of(_folder(key)):
                    if model.expects_content:
                        model.expects_content = False
                        model.publish()

    async def _make(self, key: ModelKey, content: ModelContent, version: ServedVersion, made: _PresetSet) -> None:
        from rocserve.config.preprocess.models import preset_models  # Here: 6 ms of each start.

        definition, config = content.definition, version.config
        try:
            models = await asyncio.to_thread(
                preset_models, config, definition, content.scan.version_folder(version.version)
            )
            # A version replaced by an equal one needs no new preset models.
            if models != made.models or self._lacks_some(key, made):
                contents = await asyncio.to_thread(self._context.reader.read_generated, models, content.scan.namespace)
                on_freed = functools.partial(self._make_again, key)
                with self._table.one_publication():
                    self._table.apply(_folder(key), contents, retries_failed=True, on_freed=on_freed)
                made.models = models
        except ServeError as error:
            made.models = ()
            name = ModelKey(ensemble_name(key, config.parameters[PREPROCESS]))
            if not definition.is_preset_guessed:
                self._table.reject(_folder(key), Failure(error), name)
                return
            self._table.drop(_folder(key))
            self._context.log.warning("%s is not served: %s", name, error.text)


def _folder(key: ModelKey) -> ModelKey:
    """Return a folder key for the table that no real folder has."""
    return ModelKey(f"/{key}/{PREPROCESS}")
