"""Makes, from plain inputs, those at which engines are known to differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from rocserve.load_check.made_inputs import changed_floats
from rocserve.load_check.tensors import Array, CheckedInput, Feed, largest_integer

PLAIN = "plain"
NAN = "nan"
TIES = "ties"
BEYOND_HALF = "beyond half"
LARGE = "large"
"""This case may overflow a type of few bits even in a correct engine."""
_NAN_PLACES, _NAN_STEP = (0, 7), 10
"""Some are the first of a reduced group, some are not. The places of two inputs differ."""
_FLAGS, _ABOVE, _BELOW, _EQUAL = "other flags", "above", "below", "equal to"
_BEYOND_HALF = 70000
"""Infinity in float16, which reaches to 65504."""


def edge_inputs(
    inputs: Sequence[CheckedInput],
    plain: Feed,
    has_half: bool = False,
    has_casts: bool = False,
    compared: Sequence[float] = (),
) -> Iterator[tuple[str, Feed]]:
    """Yield inputs by the kind of their values, the plain ones first. `has_half`: the file computes in float16.
    `has_casts`: the model casts floats to integers that cannot be negative. `compared`: see GraphFacts."""
    yield PLAIN, plain
    made = {
        LARGE: changed_floats(plain, _large),
        "negative": changed_floats(plain, lambda values: -np.abs(values) - 1),
        "fractional": changed_floats(plain, lambda values: np.resize((0.5, 0.25, 0.0, -0.25, -0.5), values.shape)),
        TIES: changed_floats(plain, lambda values: np.round(values) + 0.5),
        "minus one": _negative_indices(inputs, plain),
        "small integers": _small_integers(inputs, plain),
        "zero bytes": _zero_bytes(inputs, plain),
        "high bits": _high_bits(inputs, plain),
        NAN: _with_some(np.nan, plain),
    }
    if has_half:
        made[BEYOND_HALF] = _with_some(_BEYOND_HALF, plain)
    if has_casts:
        made["positive"] = changed_floats(plain, np.abs)
    made[_FLAGS] = _other_flags(inputs, plain)
    for number in compared:
        made |= _beside(number, inputs, plain)
    for name, feed in made.items():
        if any(feed[tensor] is not values and not _equal(feed[tensor], values) for tensor, values in plain.items()):
            yield name, feed


def _negative_indices(inputs: Sequence[CheckedInput], plain: Feed) -> Feed:
    """Return the inputs with -1 in all integers, a valid index in ONNX."""
    whole = {given.name for given in inputs if given.kind == "i" and not given.is_mask}
    return {name: np.full_like(values, -1) if name in whole else values for name, values in plain.items()}


def _small_integers(inputs: Sequence[CheckedInput], plain: Feed) -> Feed:
    whole = {given.name for given in inputs if given.kind in "iu" and not given.is_mask}
    # Small integers are below 5: integers and zero points of bytes wrap at 128 in engines without a sign.
    return {name: np.remainder(values, 5) if name in whole else values for name, values in plain.items()}


def _zero_bytes(inputs: Sequence[CheckedInput], plain: Feed) -> Feed:
    """Return the inputs with integers whose last byte is 0: engines that take the truth of a number from its last byte
    take them for false. Every other one is 0, so that a shape made of them has no elements."""
    wide = {
        given.name
        for given in inputs
        if given.kind in "iu" and given.datatype.itemsize > 1 and not (given.is_mask or given.is_length)
    }
    return {
        name: np.resize((256, 0), values.shape).astype(values.dtype) if name in wide else values
        for name, values in plain.items()
    }


def _high_bits(inputs: Sequence[CheckedInput], plain: Feed) -> Feed:
    """Return the inputs with integers that are negative to an engine which takes them for signed ones. Plain bytes have
    their highest bit already."""
    unsigned = [given for given in inputs if given.kind == "u" and not (given.is_mask or given.is_length)]
    wide = {given.name for given in unsigned if given.datatype.itemsize > 1}
    return {
        name: np.asarray(values | values.dtype.type(1 << (8 * values.dtype.itemsize - 1))) if name in wide else values
        for name, values in plain.items()
    }


def _other_flags(inputs: Sequence[CheckedInput], plain: Feed) -> Feed:
    """Return the inputs with the other value in each flag: it may choose what the model computes. Arrays of BOOL may be
    masks, of which not all elements may be hidden."""
    flags = {given.name for given in inputs if given.kind == "b" and not given.is_mask}
    return {
        name: np.asarray(~values) if name in flags and values.size == (len(values) if values.ndim else 1) else values
        for name, values in plain.items()
    }


def _beside(number: float, inputs: Sequence[CheckedInput], plain: Feed) -> Mapping[str, Feed]:
    """Return the inputs with numbers on either side of a number, and with integers equal to it, by kind. Floats still
    differ, so that what is computed of them is seen."""
    step = max(1.0, abs(number)) / 4
    whole = [given for given in inputs if given.kind in "iu" and not (given.is_mask or given.is_length)]

    def integers(value: float) -> dict[str, Array]:
        return {
            given.name: np.full_like(plain[given.name], int(value))
            for given in whole
            if given.least <= value <= largest_integer(given.datatype)
        }

    def floats(direction: int) -> Feed:
        return changed_floats(plain, lambda values: number + direction * step * (1 + np.abs(values)))

    made = {f"{_ABOVE} {number:g}": {**floats(1), **integers(np.floor(number) + 1)}}
    made[f"{_BELOW} {number:g}"] = {**floats(-1), **integers(np.ceil(number) - 1)}
    if float(number).is_integer():
        made[f"{_EQUAL} {number:g}"] = {**plain, **integers(number)}
    return made


def _large(values: np.ndarray[tuple[int, ...], np.dtype[np.floating]]) -> object:
    # exp(x) overflows from 88.8 in float32, log(softmax(x)) underflows 104 below the largest value. In float16 inner
    # tensors overflow sooner.
    result = np.asarray(values * (30 if values.dtype == np.float16 else 150))
    # The first two values are the largest, so that the few of a small input are large, too.
    result.flat[:2] = (300, -300)[: result.size]
    return result


def _with_some(special: float, plain: Feed) -> Feed:
    """Return the inputs with a value in some floats, at different places in each input: some engines lose the NaN of
    one operand. Types that cannot hold the value stay unchanged, and so do single numbers, which affect everything."""
    floats = [
        name
        for name, values in plain.items()
        if values.dtype.kind == "f" and values.size > 1 and not special > np.finfo(values.dtype).max
    ]

    def changed(name: str, values: Array) -> Array:
        places = np.add(_NAN_PLACES, floats.index(name)) % _NAN_STEP
        chosen = np.isin(np.arange(values.size).reshape(values.shape) % _NAN_STEP, places)
        return np.where(chosen, special, values).astype(values.dtype)

    return {name: changed(name, values) if name in floats else values for name, values in plain.items()}


def chooses_branch(name: str) -> bool:
    """Return whether the inputs of this kind are there for the branch that they choose. They may also hide everything
    from a network that attends to something, whose answer is NaN then."""
    return name.startswith((_FLAGS, _ABOVE, _BELOW, _EQUAL))


def is_special(values: Array) -> Array:
    """Return where the cases NAN and BEYOND_HALF have their values."""
    return np.asarray(np.isnan(values) | (values == _BEYOND_HALF))


def _equal(one: np.ndarray[tuple[int, ...], np.dtype[np.generic]], other: object) -> bool:
    return bool(np.array_equal(one, other))  # type: ignore[arg-type]
