"""Finds the open dimensions that must have equal lengths, whatever their names: the model refuses different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, islice

from rocserve.core.padding import Lengths, Padding

_LENGTHS = (7, 12, 3, 16, 32, 64, 224)
"""Lengths that are tried: of texts, and of images, whose heights and widths must often be multiples of 32. Not 1, which
fits beside any length."""


def equal_lengths(
    takes: Callable[[Lengths], bool], padding: Padding, known: Lengths = (), tried: Sequence[int] = _LENGTHS
) -> Sequence[Sequence[int]] | None:
    """Return the padding's dimensions by their indices, in groups: those of a group must be equal. None = the model
    takes no lengths that are tried, so nothing is known. Each dimension's first two sizes are tried, too.

    `takes`: whether the model runs at these lengths. `known`: lengths that do run. `tried`: lengths to try."""
    count = len(padding.dimensions)
    lengths = tuple(dict.fromkeys((*tried, *(size for one in padding.dimensions for size in one.sizes[:2]))))
    start = next(filter(takes, ((length,) * count for length in lengths)), known)
    if not start:
        return None

    def may_change(group: Sequence[int]) -> bool:
        """Return whether these dimensions may change together, while the others stay."""
        owns = {start[index] for index in group}
        return len(owns) == 1 and any(
            takes(tuple(length if index in group else own for index, own in enumerate(start)))
            for length in lengths
            if length not in owns
        )

    groups: list[tuple[int, ...]] = [(index,) for index in range(count) if may_change((index,))]
    linked = [index for index in range(count) if (index,) not in groups]
    while linked:
        first, *others = linked
        # The smallest set comes first: a dimension that can stay unchanged is not equal to the changed one.
        sets = ((first, *more) for number in range(1, len(linked)) for more in combinations(others, number))
        # All sets of eight dimensions are so many.
        group = next(filter(may_change, islice(sets, 128)), (first,))
        groups.append(group)
        linked = [index for index in linked if index not in group]
    return sorted(groups)
