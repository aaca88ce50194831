"""Laws of lengths: what sizes an open dimension has in the requests that engines are measured with.

--lengths sequence=lognormal:median=40,max=512 --lengths IMAGE:1=uniform:min=224,max=640 --lengths requests.txt
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median
from typing import Self

import numpy as np

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.printable import listed, names_hint
from rocserve.settings.flag import LARGEST_INT32, Kind, repeated

STRATA = 64
"""Of each 64 lengths in turn, one is drawn from each 64th of the law. So already few have the law's median and tail."""
_SPREAD = 0.8
"""Lengths of texts are log-normal with about this standard deviation of their logarithms."""
_MOST_SPREAD = 10.0
"""The longest of two thousand lengths is then 10^14 times the median; more would exceed floats."""


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Many short lengths, and a long tail, as those of texts."""

    median: float
    largest: int
    spread: float = _SPREAD
    """Standard deviation of the logarithm."""
    least: int = 1

    def at(self, share: float) -> int:
        length = math.exp(math.log(self.median) + self.spread * NormalDist().inv_cdf(share))
        return round(min(max(length, self.least), self.largest))


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each length is as frequent as the others."""

    least: int
    largest: int

    def at(self, share: float) -> int:
        return self.least + int(share * (self.largest - self.least + 1))


@dataclass(frozen=True, slots=True)
class Recorded:
    """Lengths of a log."""

    ordered: Sequence[int]

    @property
    def largest(self) -> int:
        return self.ordered[-1]

    def at(self, share: float) -> int:
        return self.ordered[int(share * len(self.ordered))]


Law = Lognormal | Uniform | Recorded
"""Its `at` returns the length that a share of all lengths does not exceed; 0 < share < 1."""


@dataclass(frozen=True, slots=True)
class WrittenLengths:
    """One --lengths of a command line."""

    label: str
    """"" = the model's only open dimension."""
    law: Law


@dataclass(frozen=True, slots=True)
class DrawnLengths:
    """Lengths of a dimension, as tools print them."""

    requests: int
    median: float
    largest: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Self:
        return cls(len(lengths), median(lengths), max(lengths))


def draw_lengths(law: Law, count: int, label: str) -> Sequence[int]:
    """Return the first `count` lengths of a law, the same each time. Dimensions with different labels are independent
    of each other."""
    rng = np.random.default_rng((0, zlib.crc32(label.encode())))
    shares: list[float] = []
    for turn in range(-(-count // STRATA)):
        # Multiples of the golden ratio fill 0 to 1 evenly.
        place = (0.5 + turn * (math.sqrt(5) - 1) / 2) % 1
        shares += ((rng.permutation(STRATA) + place) / STRATA).tolist()
    return [law.at(share) for share in shares[:count]]


def by_dimension(written: Sequence[WrittenLengths], labels: Sequence[str], title: str) -> Mapping[str, Law]:
    """Return the law of each dimension that has one, by its label. `labels`: the engine's open dimensions. `title`:
    prefix of error texts. Raises ServeError (INVALID_ARGUMENT)."""

    def unfit(text: str) -> ServeError:
        return invalid_argument(f"{title}: --lengths: {text}")

    if written and not labels:
        raise unfit(
            "expected a model with an open dimension, but this engine runs it with fixed sizes; leave --lengths out,"
            " write parameter 'sizes' (MIGraphX), or export the model with a dynamic dimension"
        )
    found: dict[str, Law] = {}
    for one in written:
        if not one.label and len(labels) > 1:
            example = f"such as --lengths '{labels[0]}=40'"
            raise unfit(f"expected the name of a dimension, {example}; the open dimensions are: {listed(labels)}")
        label = one.label or labels[0]
        if label not in labels:
            hint = names_hint("the open dimensions are", label, labels)
            raise unfit(f"expected the name of an open dimension, got '{label}'{hint}")
        if label in found:
            raise unfit(f"expected one law for dimension '{label}', got several; leave the others out")
        found[label] = one.law
    return found


def _read(text: str) -> WrittenLengths:
    """Read [DIM=]LAW. Raises ValueError."""
    name, is_pair, law = text.partition("=")
    if not is_pair or _LAW.match(text) or Path(text).is_file():
        return WrittenLengths("", _law(text))
    if not name:
        raise ValueError(f"expected [DIM=]LAW, got '{text}'")
    return WrittenLengths(name, _law(law))


def _law(text: str) -> Law:
    if found := _LAW.match(text):
        return _LAWS[found[1]](text, text[found.end() :])
    if text.isascii() and text.isdecimal():
        length = _whole(text)
        return Uniform(length, length)
    path = Path(text)
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(
            f"expected lognormal:median=M,max=N, uniform:min=N,max=N, a length, or a file with a length on each line,"
            f" got '{text}' ({reason})"
        ) from None
    lengths = [_whole(line.strip(), f"{text}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not lengths:
        raise ValueError(f"expected a file with a length on each line, got '{text}', which is empty")
    return Recorded(sorted(lengths))


def _lognormal(text: str, settings: str) -> Law:
    found = _settings(text, settings, ("median", "max"), {"spread": str(_SPREAD), "min": "1"})
    least, largest = _whole(found["min"], text), _whole(found["max"], text)
    middle, spread = _number(found["median"], LARGEST_INT32, text), _number(found["spread"], _MOST_SPREAD, text)
    if not least <= middle <= largest:
        raise ValueError(f"expected a median between min and max, {least} and {largest}, got '{text}'")
    return Lognormal(middle, largest, spread, least)


def _uniform(text: str, settings: str) -> Law:
    found = _settings(text, settings, ("min", "max"), {})
    least, largest = _whole(found["min"], text), _whole(found["max"], text)
    if least > largest:
        raise ValueError(f"expected a max of {least}, the min, or more, got '{text}'")
    return Uniform(least, largest)


_LAWS: Mapping[str, Callable[[str, str], Law]] = {"lognormal": _lognormal, "uniform": _uniform}
# A dimension may be called "uniform:1".
_LAW = re.compile(f"({'|'.join(_LAWS)})(?::(?![0-9]+=)|$)")


def _settings(text: str, settings: str, needed: Sequence[str], defaults: Mapping[str, str]) -> Mapping[str, str]:
    known = (*needed, *defaults)
    pairs = [entry.partition("=") for entry in filter(None, settings.split(","))]
    names = [name.strip() for name, _, _ in pairs]
    if not set(needed) <= set(names) <= set(known) or len(set(names)) < len(names):
        form = ",".join(f"{name}=N" for name in needed)
        form += "".join(f"[,{name}={value}]" for name, value in defaults.items())
        raise ValueError(f"expected {text.partition(':')[0]}:{form}, got '{text}'")
    return {**defaults, **{name.strip(): value.strip() for name, _, value in pairs}}


def _whole(text: str, where: str = "") -> int:
    """`where`: the text or the line of a file that has it."""
    if text.isascii() and text.isdecimal() and len(text) <= len(str(LARGEST_INT32)) and 0 < int(text) <= LARGEST_INT32:
        return int(text)
    raise ValueError(
        f"expected a length, a whole number from 1 to {LARGEST_INT32}, got '{text}'"
        + (f" in '{where}'" if where else "")
    )


def _number(text: str, most: float, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    # Written this way to refuse "nan".
    if not 0 <= value <= most:
        raise ValueError(f"expected a number from 0 to {most:g}, got '{text}' in '{where}'")
    return value


LENGTHS = Kind("[DIM=]LAW", _read)


def lengths_flag() -> tuple[WrittenLengths, ...]:
    """Declare a field of options."""
    return repeated(
        LENGTHS,
        "the lengths of an open dimension in the requests, in place of one size: lognormal:median=40,max=512 (also"
        " spread=0.8 and min=1), uniform:min=1,max=512, a length, or a file with a length on each line; sequence=LAW"
        " is for the dimension 'sequence' (default: the only open one)",
    )
