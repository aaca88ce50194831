"""Open dimensions that are padded: each request is filled up to a few sizes, its bucket, so that the engine sees only
these sizes, and requests of unlike lengths share a batch. Shapes are as the model sees them, with the batch dimension.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rocserve.core.printable import listed

Shape = tuple[int, ...]
Lengths = tuple[int, ...]
"""For each dimension of a Padding, the length that a request, a batch or a bucket has there; ABSENT without an input
that has the dimension."""

ABSENT = -1


@dataclass(frozen=True, slots=True)
class PaddedDimension:
    """An open dimension with a few sizes. All places with its label have one length in a request."""

    label: str
    """The dimension's name in the model's file; without a name "INPUT:1", the input and the index in its dims, which do
    not count the batch."""
    sizes: tuple[int, ...]
    """The sizes that the engine sees, ascending."""
    inputs: Mapping[str, tuple[int, ...]]
    """Input -> the places of the dimension in its shape."""
    outputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Output -> the places that have the inputs' length, and are cut back to the request's."""
    fault: str = ""
    """Why it must not be padded: a request must have one of the sizes; "" = it is padded."""

    def size_for(self, length: int) -> int:
        """Return the size to which a length is filled up. Raises ValueError with what is expected, and what to do."""
        place = bisect_left(self.sizes, length)
        if self.fault:
            if place == len(self.sizes) or self.sizes[place] != length:
                raise ValueError(f"one of {listed([*map(str, self.sizes)])}, because {self.fault}")
        elif not 0 < length <= self.sizes[-1]:
            raise ValueError(
                f"1 to {self.sizes[-1]}, the largest of its sizes {listed([*map(str, self.sizes)])}; send less, or write"
                " larger sizes into config.pbtxt (parameter 'sizes')"
            )
        return self.sizes[place]


@dataclass(frozen=True, slots=True)
class Padding:
    """What a model's engine has decided about its open dimensions."""

    dimensions: tuple[PaddedDimension, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    """Input -> the value of the elements that are added; 0 if it is not here."""


NO_PADDING = Padding()


class Buckets:
    """A model's buckets; false if none of its dimensions has a few sizes."""

    def __init__(self, padding: Padding) -> None:
        self.padding = padding
        self._dimensions = padding.dimensions
        self.inputs = _by_tensor(dimension.inputs for dimension in self._dimensions)
        """Input -> (place in its shape, index of the dimension)."""
        self.outputs = _by_tensor(dimension.outputs for dimension in self._dimensions)
        """Output -> (place in its shape, index of the dimension)."""

    def __bool__(self) -> bool:
        return bool(self._dimensions)

    def lengths(self, shapes: Iterable[tuple[str, Shape]]) -> Lengths:
        """Return a request's lengths. `shapes`: its inputs' names and shapes. Raises ValueError if places with one
        label have two lengths."""
        lengths, given_by = [ABSENT] * len(self._dimensions), [""] * len(self._dimensions)
        for name, shape in shapes:
            for place, index in self.inputs.get(name, ()):
                if lengths[index] not in (ABSENT, shape[place]):
                    raise ValueError(
                        f"dimension '{self._dimensions[index].label}' is {lengths[index]} in input '{given_by[index]}'"
                        f" and {shape[place]} in input '{name}'; both must be equal"
                    )
                lengths[index], given_by[index] = shape[place], name
        return tuple(lengths)

    def bucket(self, lengths: Lengths) -> Lengths:
        """Return the sizes to which a request or a batch of these lengths is filled up. Raises ValueError if there is
        none."""
        return tuple([
            length if length == ABSENT else self._size(dimension, length)
            for dimension, length in zip(self._dimensions, lengths, strict=True)
        ])  # fmt: skip

    def _size(self, dimension: PaddedDimension, length: int) -> int:
        try:
            return dimension.size_for(length)
        except ValueError as expected:
            inputs = ", ".join(f"'{name}'" for name in dimension.inputs)
            raise ValueError(
                f"dimension '{dimension.label}' of input {inputs} is {length}, expected {expected}"
            ) from None

    def padded_shape(self, name: str, shape: Shape, bucket: Lengths) -> Shape:
        """Return an input's shape in a bucket."""
        sizes = [*shape]
        for place, index in self.inputs.get(name, ()):
            sizes[place] = bucket[index]
        return tuple(sizes)

    def shared_shape(self, name: str, shape: Shape) -> Shape:
        """Return an input's shape with -1 where the requests of a batch may have unlike lengths."""
        sizes = [*shape]
        for place, index in self.inputs.get(name, ()):
            if not self._dimensions[index].fault:
                sizes[place] = -1
        return tuple(sizes)


def largest(requests: Sequence[Lengths]) -> Lengths:
    """Return the lengths of a batch: of each dimension the largest among its requests."""
    return requests[0] if len(requests) == 1 else tuple(map(max, *requests))


def _by_tensor(places: Iterable[Mapping[str, tuple[int, ...]]]) -> Mapping[str, Sequence[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}
    for index, of_dimension in enumerate(places):
        for name, own in of_dimension.items():
            found.setdefault(name, []).extend((place, index) for place in own)
    return found
