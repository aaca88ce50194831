"""The lengths at which a model is tried, and the sizes to which they are padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from operator import sub

from rocserve.core.padding import Lengths, PaddedDimension

_STARTS = (7, 3, 2, 5, 12, 32, 64, 96, 128, 160, 224, 320, 1)
"""Lengths that are tried if those of the search for inputs do not fit."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Dimensions with one common length, because the engine refuses different ones."""

    indices: Sequence[int]
    follows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Output -> the places of that length; empty if the engine does not take two lengths."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Lengths, and the sizes to which they are padded."""

    lengths: Lengths
    sizes: Lengths

    def __str__(self) -> str:
        pairs = [(own, size) for own, size in zip(self.lengths, self.sizes, strict=True) if own != size]
        (length, size), *others = dict.fromkeys(pairs)
        return " and ".join([f"length {length} is padded to {size}", *(f"{own} to {whole}" for own, whole in others)])


class TrialLengths:
    """Chooses lengths for trials of some dimensions, by their indices; the others have their usual length then."""

    def __init__(self, dimensions: Sequence[PaddedDimension], usual: Sequence[int]) -> None:
        """`usual`: of each dimension, a length that the model takes."""
        self._dimensions = dimensions
        self._base = tuple(
            next((length for length in (own, *_STARTS) if 1 < length < one.sizes[-1]), one.sizes[-1])
            for one, own in zip(dimensions, usual, strict=True)
        )

    def whole(self, indices: Sequence[int]) -> Iterator[Lengths]:
        """Yield lengths that are sizes."""
        yield from (self._at(indices, size) for size in self._dimensions[indices[0]].sizes)

    def short(self, indices: Sequence[int]) -> Iterator[Trial]:
        """Yield lengths that are padded as in the server, usual ones first."""
        sizes = self._dimensions[indices[0]].sizes
        lengths = [self._base[indices[0]], *_STARTS]
        for before, size in pairwise((0, *sizes)):
            # Heights and widths of images must often be multiples of 32.
            lengths += [before + 1, size - 1, (size - 1) // 32 * 32]
        yield from self._filled_up(indices, lengths)

    def shortest(self, indices: Sequence[int]) -> Iterator[Trial]:
        """Yield short lengths, ascending."""
        yield from self._filled_up(indices, sorted(_STARTS))

    def further(self, first: Trial, indices: Sequence[int]) -> Iterator[Trial]:
        """Yield trials that follow the first one: its lengths in each size, as a batch may have longer rows, then the
        length that nearly fills the smallest size, and that which does not fit the largest size but one."""
        sizes = self._dimensions[indices[0]].sizes
        for size in sorted(sizes, key=lambda size: size != sizes[-1]):
            trial = replace(first, sizes=self._sizes(indices, size))
            if trial != first and trial.sizes != trial.lengths and min(map(sub, trial.sizes, trial.lengths)) >= 0:
                yield trial
        yield from self._filled_up(indices, [sizes[0] - 1, *(size + 1 for size in sizes[-2:-1])])

    def _filled_up(self, indices: Sequence[int], lengths: Iterable[int]) -> Iterator[Trial]:
        sizes = self._dimensions[indices[0]].sizes
        for length in lengths:
            if 0 < length < sizes[-1] and length not in sizes:
                yield Trial(self._at(indices, length), self._sizes(indices, length))

    def joined(self, firsts: Iterable[tuple[Unit, Trial]]) -> Trial:
        """Return the trial in which the dimensions of several units are padded together."""
        lengths, sizes = [*self._base], [*self._base]
        for unit, trial in firsts:
            for index in unit.indices:
                lengths[index], sizes[index] = trial.lengths[index], trial.sizes[index]
        return Trial(tuple(lengths), tuple(sizes))

    def _at(self, indices: Sequence[int], length: int) -> Lengths:
        return tuple(length if index in indices else base for index, base in enumerate(self._base))

    def _sizes(self, indices: Sequence[int], length: int) -> Lengths:
        """Return the sizes to which these dimensions are padded; the others stay unchanged."""
        return tuple(
            next((size for size in dimension.sizes if size >= length), length) if index in indices else base
            for index, (base, dimension) in enumerate(zip(self._base, self._dimensions, strict=True))
        )
