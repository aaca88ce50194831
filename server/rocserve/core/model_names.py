"""Resolves names of models of several repositories (--model-namespacing). A model's key in the server is then its
repository and its name; clients may know only the name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NewType, TypeVar

Model = TypeVar("Model")

ModelKey = NewType("ModelKey", str)
"""Key of a model or of its folder. A client's text becomes a key only through a look-up."""

_SEPARATOR = "::"


def qualified(namespace: str, name: str) -> ModelKey:
    """Return the model's key within the server; without a namespace, the name."""
    return ModelKey(f"{namespace}{_SEPARATOR}{name}" if namespace else name)


def namespace_of(key: ModelKey, name: str) -> str:
    """Return the namespace of a model's key; "" without namespaces."""
    return key.removesuffix(name).removesuffix(_SEPARATOR)


class ModelNames:
    """Maps between model names and the keys of models in several repositories."""

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        self.namespaces = tuple(namespaces)

    def bare(self, key: ModelKey) -> str:
        """Return the name that clients know."""
        for namespace in self.namespaces:
            if key.startswith(namespace + _SEPARATOR):
                return key[len(namespace) + len(_SEPARATOR) :]
        return key

    def keys(self, name: str, known: Iterable[ModelKey]) -> list[ModelKey]:
        if not self.namespaces:
            key = ModelKey(name)
            return [key] if key in known else []
        return [key for key in known if self.bare(key) == name]

    def resolve(
        self, models: Mapping[ModelKey, Model], known: Iterable[ModelKey]
    ) -> tuple[Mapping[str, Model], Mapping[str, int]]:
        """Return name -> model, and ambiguous name -> number of models. A bare name identifies a model if no other has
        it; then the name with any other namespace also finds that model."""
        named: defaultdict[str, list[ModelKey]] = defaultdict(list)
        for key in known:
            named[self.bare(key)].append(key)
        resolved: dict[str, Model] = dict(models.items())
        for name, keys in named.items():
            if len(keys) == 1 and keys[0] in models:
                for alias in (name, *(qualified(namespace, name) for namespace in self.namespaces)):
                    resolved.setdefault(alias, models[keys[0]])
        return resolved, {name: len(keys) for name, keys in named.items() if len(keys) > 1}
