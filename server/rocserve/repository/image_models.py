"""Image models: keeps the models of the parameter `preprocess` next to each served model; see config.image_models."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Collection, Set
from dataclasses import dataclass

from rocserve.config.image_models import GeneratedModel, image_models
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.model_names import ModelKey
from rocserve.presets import PREPROCESS
from rocserve.repository.content import ModelContent
from rocserve.repository.lifecycle import LifecycleContext
from rocserve.repository.model import wait_for_loads
from rocserve.repository.retries import Failure
from rocserve.repository.table import ModelTable


@dataclass(slots=True, eq=False)
class _ImageModelSet:
    config: ModelConfig | None = None
    """The served configuration that the image models are made for."""
    content: ModelContent | None = None
    models: tuple[GeneratedModel, ...] = ()
    task: asyncio.Task[None] | None = None


class ImageModels:
    """Makes and removes image models as the served models change. All calls are made on the loop's thread."""

    def __init__(self, context: LifecycleContext, table: ModelTable) -> None:
        self._context = context
        self._table = table
        self._sets: dict[ModelKey, _ImageModelSet] = {}
        self._unsubscribe = table.subscribe(self._review)

    async def wait(self, keys: Collection[ModelKey]) -> None:
        """Return when all image models of these models are loaded or have failed."""
        while tasks := [
            task for key in keys if key in self._sets and (task := self._sets[key].task) and not task.done()
        ]:
            await asyncio.wait(tasks)
        await wait_for_loads([model for key in keys for model in self._table.models_of(_folder(key))])

    def folders(self) -> Set[ModelKey]:
        """Return the table's folder keys of all image models."""
        return {_folder(key) for key in self._sets}

    def stop(self) -> None:
        self._unsubscribe()
        for image_set in self._sets.values():
            if image_set.task is not None:
                image_set.task.cancel()

    def _review(self, changed: Collection[ModelKey]) -> None:
        for key in {*changed} & self._table.models.keys():
            model = self._table.models[key]
            served = model.served_model()
            config = None if served is None or served.latest is None else served.latest.config
            if config is not None and PREPROCESS in config.parameters and model.content is not None:
                image_set = self._sets.setdefault(key, _ImageModelSet())
                # The model was loaded again, so its unloaded image models are wanted again.
                is_wanted_back = image_set.content is not model.content and self._lacks_some(key, image_set)
                is_due = image_set.config is not config or is_wanted_back
                image_set.config, image_set.content = config, model.content
                if is_due:
                    if image_set.task is not None:
                        image_set.task.cancel()
                    work = self._renew(key, model.content, config, image_set)
                    image_set.task = self._context.background.start(work, f"image models of {key}")
            elif key in self._sets and (config is not None or model.content is None):
                image_set = self._sets.pop(key)
                if image_set.task is not None:
                    image_set.task.cancel()
                self._table.drop(_folder(key))

    def _make_again(self, key: ModelKey) -> None:
        """Make image models that were refused because another folder had a model of their name."""
        if key in self._sets:
            self._sets[key].config = None
            self._review((key,))

    def _lacks_some(self, key: ModelKey, image_set: _ImageModelSet) -> bool:
        return len(self._table.models_of(_folder(key))) < len(image_set.models)

    async def _renew(
        self, key: ModelKey, content: ModelContent, config: ModelConfig, image_set: _ImageModelSet
    ) -> None:
        try:
            models = await asyncio.to_thread(image_models, config, content.definition.class_names)
            # A version that was replaced by an equal one needs no new image models.
            if models != image_set.models or self._lacks_some(key, image_set):
                contents = await asyncio.to_thread(self._context.reader.read_generated, models, content.scan.namespace)
                on_freed = functools.partial(self._make_again, key)
                self._table.apply(_folder(key), contents, retries_failed=True, on_freed=on_freed)
                image_set.models = models
        except ServeError as error:
            image_set.models = ()
            self._table.reject(_folder(key), Failure(error), ModelKey(f"{key}_image"))


def _folder(key: ModelKey) -> ModelKey:
    """Return a folder key for the table that no real folder has."""
    return ModelKey(f"/{key}_image")
