"""A package like transformers and torchvision: importing it registers a class of results and an operator with PyTorch.
Not part of `support`, so that no test imports it by chance: it is found in this folder only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

LIBRARY = torch.library.Library("torch_outputs", "DEF")
LIBRARY.define("twice(Tensor x) -> Tensor")
LIBRARY.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")


class Answer(OrderedDict[str, Any]):
    """A result with keys that are also attributes; those that are None are left out."""

    def __init__(self, **values: Any) -> None:
        super().__init__((key, value) for key, value in values.items() if value is not None)


def register(name: str) -> None:
    """Register the class as transformers registers its own."""

    def flatten(answer: Answer) -> tuple[list[Any], Any]:
        return list(answer.values()), list(answer.keys())

    def unflatten(values: Iterable[Any], keys: Any) -> Answer:
        return Answer(**dict(zip(keys, values, strict=True)))

    with_keys: Any = pytree._dict_flatten_with_keys
    pytree.register_pytree_node(Answer, flatten, unflatten, serialized_type_name=name, flatten_with_keys_fn=with_keys)


register("torch_outputs.Answer")
