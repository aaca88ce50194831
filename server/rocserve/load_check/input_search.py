"""Searches for inputs that a model accepts, and with which its outputs change by far more than rounding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rocserve.load_check.budget import Budget, OutOfTime, Trials
from rocserve.load_check.difference import differences
from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.made_inputs import InputMaker, Recipe, bits_of, nudged
from rocserve.load_check.tensors import CheckedInput, Feed, Run, largest_integer


class NoInputs(Exception):
    """The model accepts no made-up input; the text is the reason."""

    refusal = ""
    """The engine's refusal of all inputs, zeros among them; "" = some ran, or none was tried."""


@dataclass(frozen=True, slots=True)
class Found:
    """A recipe that runs, its rows "a" and "b", and their outputs."""

    recipe: Recipe
    rows: Sequence[Feed]
    outputs: Sequence[Feed]
    power: float
    """How much the outputs change with the row, relative to their largest value."""
    noise: Mapping[str, float]
    """Output -> how much it changes with the last place of the inputs."""

    @property
    def quality(self) -> float:
        """Above 1, the outputs distinguish rows."""
        noise = 10 * max(self.noise.values(), default=0.0)
        # Smaller changes count as rounding, regardless of nudged inputs. A change of 5 % is enough beside any noise: a
        # network whose answer turns over with the last place of its inputs, such as the best 300 of many equal boxes,
        # also shows each dependence.
        return self.power / max(1e-5, min(noise, 5e-2))


def find_inputs(trials: Trials, run: Callable[[Feed], Feed | None], maker: InputMaker) -> Found:
    """Return the first recipe whose outputs change enough, or the best of those that run. `run` returns the outputs of
    one row, None if the engine refuses it. Raises NoInputs or OutOfTime."""
    best: Found | None = None
    why = ""
    compared = 0
    for recipe, first in _recipes(trials, run, maker):
        rows = [maker.row(recipe, name) for name in "ab"]
        moved, second = run(nudged(rows[0])), run(rows[1])
        if moved is None or second is None:
            continue
        if any(values.size and values.dtype.kind == "f" and not np.isfinite(values).any() for values in first.values()):
            why = "its outputs are NaN"
            continue
        power = max(differences(first, second).values(), default=0.0)
        found = Found(recipe, rows, (first, second), power, differences(first, moved))
        for name in "cdef":
            # Some rows have equal answers by chance, such as those of a category that the model does not know.
            if found.quality <= 1 and (other := run(maker.row(recipe, name))) is not None:
                found = replace(found, power=max(found.power, *differences(second, other).values()))
        best = found if best is None or found.quality > best.quality else best
        compared += 1
        if best.quality > 1 or compared == 8:
            break
    if best is None:
        none = NoInputs(why or trials.refusal)
        if math.isinf(trials.fastest_row) and not _takes_zeros(run, maker):
            none.refusal = trials.refusal
        raise none
    return best


def refusal_of(run: Run, inputs: Sequence[CheckedInput], budget: Budget) -> str:
    """Return the engine's refusal of all inputs; "" = it takes one of them, or none was tried, or the time ended."""
    encode = bits_of(inputs)
    trials, maker = Trials(lambda feed: run(encode(feed)), budget), InputMaker(inputs, NO_FACTS, 0)
    try:
        taken = next(_recipes(trials, trials.run, maker), None)
        return "" if taken or _takes_zeros(trials.run, maker) else trials.refusal
    except (NoInputs, OutOfTime, MemoryError):
        return ""


def _takes_zeros(run: Callable[[Feed], Feed | None], maker: InputMaker) -> bool:
    """Return whether the model takes zeros of some size, with texts that are numbers."""
    numbers = {given.name for given in maker.inputs if given.kind == "O"}

    def zeros(recipe: Recipe) -> Feed:
        row = maker.zeros(maker.row(recipe, "a"))
        return {name: np.full_like(values, "0") if name in numbers else values for name, values in row.items()}

    recipes = (recipe for recipe in _candidates(maker) if not _too_large(recipe, maker))
    return any(run(zeros(recipe)) is not None for recipe in itertools.islice(recipes, 4))


def _recipes(trials: Trials, run: Callable[[Feed], Feed | None], maker: InputMaker) -> Iterator[tuple[Recipe, Feed]]:
    """Yield recipes, most likely ones first, with the outputs of row "a"."""
    candidates, too_large = _candidates(maker), ""
    for recipe in (Recipe(from_samples=True), *candidates) if maker.sample_rows else candidates:
        if reason := _too_large(recipe, maker):
            too_large = too_large or reason
            continue
        for start in (replace(recipe, ends=maker.ends), recipe) if maker.ends else (recipe,):
            if (first := run(maker.row(start, "a"))) is None:
                continue
            for wider in _widened(start, first, trials, run, maker):
                outputs = first if wider == start else run(maker.row(wider, "a"))
                if outputs is not None:
                    yield wider, outputs
            break
    if too_large and not trials.runs:
        raise NoInputs(too_large)


def _too_large(recipe: Recipe, maker: InputMaker) -> str:
    """Return which input would have a row of too many values; "" = none."""
    for given in maker.inputs:
        shape = given.shape_with(recipe.sizes) if not recipe.from_samples else ()
        # One row of an input takes 128 MB while it is made.
        if math.prod(shape) > 1 << 24:
            return f"a row of input '{given.name}' has the shape {list(shape)}"
    return ""


def _candidates(maker: InputMaker) -> Iterator[Recipe]:
    """Yield sizes of the open dimensions, all sizes from one step of the ladders first, with each style of values."""
    inputs = maker.inputs
    styles = [*([Recipe(floats="levels")] if maker.levels else []), *_styles(maker)]
    names = list(dict.fromkeys(name for given in inputs for name in given.open_dimensions()))
    first = {name for given in inputs for name in replace(given, shape=given.shape[:1]).open_dimensions()}
    images = {name for given in inputs if len(given.shape) >= 4 for name in given.open_dimensions()}
    # Sizes of a first dimension that does not count rows, or of one called "batch" elsewhere.
    few = (1, 4)
    # Heights and widths. 64 runs in most models; 32 and 48 suit text, 224 to 640 networks with fully connected layers.
    image = (64, 32, 48, 96, 224, 320, 640)
    # Lengths of sequences and signals. None is a number of rows, so no output has the right shape by chance.
    line = (7, 16, 32, 64, 128, 576, 1024, 4096, 16000)
    ladders = [few if name in first or "batch" in name.lower() else image if name in images else line for name in names]
    steps = range(max(map(len, ladders), default=1))
    together = [tuple(1 if sizes is few else sizes[min(step, len(sizes) - 1)] for sizes in ladders) for step in steps]
    mixed = itertools.product(*((*sizes[:6], 1) if sizes is line else sizes for sizes in ladders))
    # More combinations of different sizes would take longer than a user waits.
    for chosen in dict.fromkeys([*together, *itertools.islice(mixed, 60)]):
        sizes = dict(zip(names, chosen, strict=True))
        yield from (replace(style, sizes=sizes) for style in styles)


def _styles(maker: InputMaker) -> Iterator[Recipe]:
    inputs = maker.inputs
    yield Recipe()
    if any(given.kind == "f" for given in inputs):
        yield from (Recipe(floats=name) for name in ("unit", "whole", "spread"))
    if any(given.kind == "O" for given in inputs):
        yield Recipe(sentences=True)
        if maker.texts:
            yield Recipe(floats="levels")
    if any(given.is_mask for given in inputs):
        yield Recipe(mask=0)
    if any(given.is_length for given in inputs):
        yield Recipe(full_lengths=False)


def _widened(
    recipe: Recipe, least: Feed, trials: Trials, run: Callable[[Feed], Feed | None], maker: InputMaker
) -> Iterator[Recipe]:
    """Raise the ends of the integers without a known one, one input after the other, while the model runs, is not slow,
    and its outputs stay small. If such outputs do not change, small ends may help."""
    # An input that sets a size should stay small.
    most = 1000 + 64 * sum(values.size for values in least.values())
    risen = False
    for given in maker.inputs:
        if given.kind not in "iu" or given.is_mask or given.name in recipe.ends:
            continue
        # The table of these integers is not known; the largest end is below the vocabulary of BERT.
        ends = (2, 5, 20, 60, 250, 1000, 8000, 30000)
        for end in dict.fromkeys(min(end, largest_integer(given.datatype) + 1) for end in ends):
            wider = replace(recipe, ends={**recipe.ends, given.name: end})
            outputs = run(maker.row(wider, "a", has_largest=True))
            is_slow = trials.last_seconds > 0.1 + 5 * trials.seconds_per_row
            if outputs is None or is_slow or sum(values.size for values in outputs.values()) > most:
                break
            recipe, risen = wider, True
    yield recipe
    if risen:
        yield replace(recipe, ends={name: min(end, 5) for name, end in recipe.ends.items()})
