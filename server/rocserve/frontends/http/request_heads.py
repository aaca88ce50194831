"""One object for equal request heads, for what is worked out from a head is remembered by its identity."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.core.requests import InputHead, Parameters, RequestedOutput, RequestHead

REMEMBERED_HEADS = 1024
MOST_ENTRIES = 64
"""Tensors, dimensions and parameters."""
LONGEST_TEXT = 1024
"""All three bound the memory that clients can make it take."""

_Key = tuple[object, ...]


class RequestHeads:
    """Called on the event loop."""

    def __init__(self) -> None:
        self._heads: dict[_Key, RequestHead] = {}

    def head(
        self,
        model_name: str,
        model_version: str,
        inputs: Sequence[InputHead],
        outputs: Sequence[RequestedOutput],
        parameters: Parameters,
    ) -> RequestHead:
        key: _Key = (
            model_name,
            model_version,
            tuple((entry.name, entry.datatype, entry.shape, _key(entry.parameters)) for entry in inputs),
            tuple((entry.name, _key(entry.parameters)) for entry in outputs),
            _key(parameters),
        )
        head = self._heads.get(key)
        if head is None:
            head = RequestHead(model_name, model_version, tuple(inputs), tuple(outputs), parameters)
            if _is_small(head):
                if len(self._heads) >= REMEMBERED_HEADS:
                    self._heads.clear()
                self._heads[key] = head
        return head


def _key(parameters: Parameters) -> _Key:
    # 1, 1.0 and True are equal to each other.
    return tuple((name, type(value), value) for name, value in parameters.items()) if parameters else ()


def _is_small(head: RequestHead) -> bool:
    told = [
        head.parameters,
        *(entry.parameters for entry in head.inputs),
        *(entry.parameters for entry in head.outputs),
    ]
    sizes = [len(head.inputs), len(head.outputs), *map(len, told), *(len(entry.shape) for entry in head.inputs)]
    if sum(sizes) > MOST_ENTRIES:
        return False
    names = [head.model_name, head.model_version]
    names += [entry.name for entry in head.inputs] + [entry.name for entry in head.outputs]
    names += [text for parameters in told for pair in parameters.items() for text in pair if isinstance(text, str)]
    return all(len(text) <= LONGEST_TEXT for text in names)
