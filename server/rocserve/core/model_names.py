"""Names of models where those of different repositories may be equal (--model-namespacing).

Within the server a model's key then is its repository and its name; clients know its name only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NewType, TypeVar

Model = TypeVar("Model")

ModelKey = NewType("ModelKey", str)
"""Of a model or of its folder: what a client says is none until it has been looked up."""

_SEPARATOR = "::"


def qualified(namespace: str, name: str) -> ModelKey:
    """The model's key within the server: its name where there are no namespaces."""
    return ModelKey(f"{namespace}{_SEPARATOR}{name}" if namespace else name)


def namespace_of(key: ModelKey, name: str) -> str:
    """The namespace of a model's key; empty where there are none."""
    return key.removesuffix(name).removesuffix(_SEPARATOR)


class ModelNames:
    """What the models of several repositories are called."""

    def __init__(self, namespaces: Iterable[str] = ()) -> None:
        """Without namespaces a model's key is its name."""
        self.namespaces = tuple(namespaces)

    def bare(self, key: ModelKey) -> str:
        """The name that clients know."""
        for namespace in self.namespaces:
            if key.startswith(namespace + _SEPARATOR):
                return key[len(namespace) + len(_SEPARATOR) :]
        return key

    def keys(self, name: str, known: Iterable[ModelKey]) -> list[ModelKey]:
        """The known models of a name."""
        if not self.namespaces:
            key = ModelKey(name)
            return [key] if key in known else []
        return [key for key in known if self.bare(key) == name]

    def resolve(
        self, models: Mapping[ModelKey, Model], known: Iterable[ModelKey]
    ) -> tuple[Mapping[str, Model], Mapping[str, int]]:
        """The models, given by their keys, by all that may be said for them; and how many there are of each name that
        says too little. A name means the only known model that bears it; so does a name in a namespace without such a
        model."""
        named: defaultdict[str, list[ModelKey]] = defaultdict(list)
        for key in known:
            named[self.bare(key)].append(key)
        resolved: dict[str, Model] = dict(models.items())
        for name, keys in named.items():
            if len(keys) == 1 and keys[0] in models:
                for alias in (name, *(qualified(namespace, name) for namespace in self.namespaces)):
                    resolved.setdefault(alias, models[keys[0]])
        return resolved, {name: len(keys) for name, keys in named.items() if len(keys) > 1}
