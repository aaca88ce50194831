"""Open dimensions that are padded: each request is padded to one of a few sizes in each of them, its bucket. So the
engine sees only these sizes, and requests of different lengths share a batch. Shapes are as the model sees them, with
the batch dimension."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rocserve.core.printable import listed

Shape = tuple[int, ...]
Lengths = tuple[int, ...]
"""For each dimension of a Padding, the length that a request, a batch or a bucket has there; ABSENT without an input
that has the dimension."""

ABSENT = -1

SIZES_PROPERTY = "sizes"
"""Property of a version that pads: its dimensions and their sizes, as the parameter `sizes` has them."""


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
    takes_others: bool = False
    """Whether the engine also takes lengths without a size, unpadded; otherwise they are refused."""

    def size_for(self, length: int) -> int:
        """Return the size to which a length is padded. Raises ValueError with the expected sizes and the remedy."""
        if not 0 < length <= self.sizes[-1]:
            if self.takes_others:
                return length
            raise ValueError(
                f"1 to {self.sizes[-1]}, the largest of its sizes {listed([*map(str, self.sizes)])}; send less, or"
                " write larger sizes into config.pbtxt (parameter 'sizes')"
            )
        return self.sizes[bisect_left(self.sizes, length)]


def joined(dimensions: Sequence[PaddedDimension]) -> PaddedDimension:
    """Return dimensions whose lengths must be equal as one dimension, with the name of the first that has sizes."""
    first = next((one for one in dimensions if one.sizes), dimensions[0])
    inputs, outputs = _together(one.inputs for one in dimensions), _together(one.outputs for one in dimensions)
    return replace(first, inputs=inputs, outputs=outputs)


def _together(found: Iterable[Mapping[str, tuple[int, ...]]]) -> Mapping[str, tuple[int, ...]]:
    whole: dict[str, tuple[int, ...]] = {}
    for places in found:
        for name, own in places.items():
            whole[name] = tuple(sorted({*whole.get(name, ()), *own}))
    return whole


@dataclass(frozen=True, slots=True)
class Padding:
    """The decisions of a model's engine about its open dimensions."""

    dimensions: tuple[PaddedDimension, ...] = ()
    values: Mapping[str, float] = field(default_factory=dict)
    """Input -> the value of the added elements; 0 if the input is missing here."""

    @property
    def smallest(self) -> Lengths:
        """Return the smallest size of each dimension."""
        return tuple([dimension.sizes[0] for dimension in self.dimensions])

    @property
    def largest(self) -> Lengths:
        """Return the largest size of each dimension."""
        return tuple([dimension.sizes[-1] for dimension in self.dimensions])

    @property
    def properties(self) -> Mapping[str, str]:
        """Return the version's property; empty if nothing is padded."""
        text = "; ".join(f"{dimension.label}={','.join(map(str, dimension.sizes))}" for dimension in self.dimensions)
        return {SIZES_PROPERTY: text} if text else {}


NO_PADDING = Padding()


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """The common properties of requests that the engine sees in one shape. Equal buckets of one model are the same
    object, as long as the model remembers them."""

    sizes: Lengths
    row_elements: int
    """Elements of one row of the padded inputs, with the padding."""
    row_work: int
    """`row_elements` as a multiple of the elements of a row in the smallest bucket."""


@dataclass(frozen=True, slots=True)
class PaddedOutput:
    """How an output of a batch is cut back. Both map its places to sizes."""

    sizes: Mapping[int, int]
    lengths: Sequence[Mapping[int, int]]
    """By request."""

    def own(self, request: int, shape: Shape) -> list[slice]:
        """Return the part of an output of this shape that has a request's lengths, in all rows."""
        lengths = self.lengths[request]
        return [slice(lengths.get(place, size)) for place, size in enumerate(shape)]


class Buckets:
    """A model's buckets; false if none of its dimensions has a few sizes."""

    def __init__(self, padding: Padding) -> None:
        self._padding = padding
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

    def sizes_for(self, lengths: Lengths) -> Lengths:
        """Return the sizes to which a request or a batch of these lengths is padded. Raises ValueError for a length
        without a size."""
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

    def elements(self, shapes: Iterable[tuple[str, Shape]]) -> int:
        """Return the elements of those inputs that are padded."""
        return sum(math.prod(shape) for name, shape in shapes if name in self.inputs)

    def bucket(self, shapes: Sequence[tuple[str, Shape]], rows: int) -> Bucket:
        """Return the bucket of a request. Raises ValueError as `lengths` and `sizes_for`."""
        sizes = self.sizes_for(self.lengths(shapes))
        least = tuple(
            own if own == ABSENT else dimension.sizes[0] for own, dimension in zip(sizes, self._dimensions, strict=True)
        )
        elements, fewest = (
            self.elements((name, self.padded_shape(name, shape, one)) for name, shape in shapes) // rows
            for one in (sizes, least)
        )
        return Bucket(sizes, elements, -(-elements // max(fewest, 1)))

    def padded_shape(self, name: str, shape: Shape, sizes: Lengths) -> Shape:
        """Return an input's or output's shape in the bucket of these sizes."""
        padded = [*shape]
        for place, index in (*self.inputs.get(name, ()), *self.outputs.get(name, ())):
            padded[place] = sizes[index]
        return tuple(padded)

    def value(self, name: str) -> float:
        """Return the value with which an input is padded."""
        return self._padding.values.get(name, 0.0)

    def padded_outputs(self, requests: Sequence[Lengths], sizes: Lengths) -> Mapping[str, PaddedOutput]:
        """Return how the outputs of a batch are cut back, by name."""
        return {
            name: PaddedOutput(
                {place: sizes[index] for place, index in places if sizes[index] != ABSENT},
                [{place: own[index] for place, index in places if own[index] != ABSENT} for own in requests],
            )
            for name, places in self.outputs.items()
        }

    def shared_shape(self, name: str, shape: Shape) -> Shape:
        """Return an input's shape with -1 where the requests of a batch may have different lengths."""
        sizes = [*shape]
        for place, _ in self.inputs.get(name, ()):
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
