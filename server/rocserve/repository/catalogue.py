"""Which folder defines which models: a folder may define several, and a name belongs to one folder."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from rocserve.core.errors import invalid_argument, unavailable
from rocserve.repository.content import ModelContent
from rocserve.repository.managed_model import ManagedModel
from rocserve.repository.retry import Failure

_GONE_SHOWN = 256
"""How many models that are no more in the repository the index goes on showing."""


class ModelCatalogue:
    """Hands the contents of folders to their models. All calls are made on the loop's thread."""

    def __init__(
        self, models: dict[str, ManagedModel], make_model: Callable[[str], ManagedModel], log: logging.Logger
    ) -> None:
        self._models = models
        self._make_model = make_model
        self._log = log
        self._folders: dict[str, str] = {}
        """By the model's key."""
        self._keys: dict[str, set[str]] = {}
        """Of the models of each folder that has some."""
        self._is_closed = False
        self._gone: dict[str, None] = {}
        """In the order in which they went."""

    def folder_of(self, model: str) -> str | None:
        return self._folders.get(model)

    def models_of(self, folder: str) -> list[ManagedModel]:
        return [self._models[key] for key in sorted(self._keys.get(folder, ()))]

    def defines_models(self, folder: str) -> bool:
        """Whether models have come of the folder; called from any thread."""
        return folder in self._keys

    def close(self) -> None:
        """From now on `take` is refused."""
        self._is_closed = True

    def take(self, folder: str, contents: Sequence[ModelContent], *, at_once: bool = False) -> None:
        """Let the models of a folder become what it says; models that it defines no more are removed.

        Raises:
            ServeError: INVALID_ARGUMENT when another folder defines one of the names, UNAVAILABLE after `close`;
                nothing is done then.
        """
        if self._is_closed:
            raise unavailable("Server exiting")
        names = [content.model for content in contents]
        for name in names:
            owner = self._folders.get(name, folder)
            if owner != folder:
                raise invalid_argument(
                    f"model '{name}' is defined by both the folders '{owner}' and '{folder}' of the model repository;"
                    " rename one"
                )
        for model in self.models_of(folder):
            if model.key not in names:
                self._remove(model)
        for content in contents:
            for warning in content.definition.warnings:
                self._log.warning("%s: %s", content.definition.name, warning)
            self._own(content.model, folder).apply(content, at_once=at_once)

    def reject(self, folder: str, problem: Failure, name: str = "") -> None:
        """What the folder says cannot be used; what its models serve stays. `name`: the model's, if another."""
        name = name or folder
        self._log.error("failed to read model folder '%s': %s", name, problem.text)
        models = self.models_of(folder)
        if not models and self._folders.get(name, folder) == folder:
            models = [self._own(name, folder)]
        for model in models:
            model.reject(problem)

    def drop(self, folder: str) -> None:
        """The folder is gone, or holds no model any more."""
        for model in self.models_of(folder):
            self._remove(model)

    def _own(self, name: str, folder: str) -> ManagedModel:
        self._folders[name] = folder
        self._keys.setdefault(folder, set()).add(name)
        self._gone.pop(name, None)
        if name not in self._models:
            self._models[name] = self._make_model(name)
        return self._models[name]

    def _remove(self, model: ManagedModel) -> None:
        self._log.info("model '%s' is no more in the repository", model.name)
        folder = self._folders.pop(model.key)
        self._keys[folder].discard(model.key)
        if not self._keys[folder]:
            self._keys.pop(folder)
        model.remove(is_gone=True)
        self._gone[model.key] = None
        if len(self._gone) > _GONE_SHOWN:
            oldest = next(iter(self._gone))
            self._gone.pop(oldest)
            self._models.pop(oldest, None)
