"""Decides whether the rows of a batch are independent of each other.

A row is compared in two batches of one size, at one place, beside different rows. The arithmetic is the same, so an
independent row is equal to the bit, and no tolerance has to separate rounding from dependence. A row alone is compared
with the row in a batch only loosely, which finds outputs that follow the row's number or the number of rows."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from rocserve.core.load_check import ROWS as FAILED_ROWS
from rocserve.core.load_check import LoadCheckReport
from rocserve.load_check.batches import Batches, RowsLost
from rocserve.load_check.budget import Budget, OutOfTime, Trials
from rocserve.load_check.difference import by, difference
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.input_search import Found, NoInputs, find_inputs
from rocserve.load_check.made_inputs import InputMaker, bits_of
from rocserve.load_check.neighbours import SAME, Group, groups
from rocserve.load_check.tensors import CheckedInput, Feed, Run

_ROWS = 3
"""Of a batch: two whose outputs are compared, and their neighbour."""
_ALONE = 5e-2
"""Largest difference of a row alone and in a batch. Ill-conditioned networks reach 1.3e-2."""
_NOISE_FACTOR = 30
"""A difference beside others counts if it is so many times the difference of equal runs."""
_REPETITIONS = 3
"""Equal runs that measure the noise of an engine known to be noisy; two of them may be equal by chance."""
_SAME = 1e-5
"""Difference up to which two rows count as equal, and so compare nothing."""
_TRIES = 10
"""Further rows that are tried if outputs are equal, or the same number everywhere."""
_MOST_ROWS = 128
"""Rows of the largest batch that is tried because the model compares something with a number."""
_ROUND = 64
"""Rows of a batch that most divisors of numbers of rows divide, and in which kernels take their widest ways."""
_DEPENDENT = "rows depend on each other: {}"
_NOT_CHECKED = "not checked: {}; give warm-up samples or check.npz"


class Independence(enum.Enum):
    INDEPENDENT = "independent"
    DEPENDENT = "dependent"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class RowsVerdict:
    """Whether rows are independent, with the evidence."""

    state: Independence
    reason: str
    """A clause for log and index: "rows are independent", "rows depend on each other: ...", "not checked: ..."."""
    output: str = ""
    """The output that differs; "" = none, or all of them."""
    difference: float = 0.0
    """How much a row's output changes with its neighbours, relative to its largest value; inf = its shape changes."""
    runs: int = 0
    is_lasting: bool = True
    """Whether another check would find the same; False if the time ended it."""
    refusal: str = ""
    """The engine's refusal of every input that was tried; "" = some ran, or none was tried."""

    @property
    def doubt(self) -> str:
        """Why the rows of requests may depend on each other; "" = they do not."""
        return "" if self.state is Independence.INDEPENDENT else self.reason

    def report(self, batching_is_written: bool, warns_of_undecided: bool) -> LoadCheckReport:
        """Return the report for users. A written batching is kept, with a warning if rows depend on each other, and
        with `warns_of_undecided` also if nothing is known of them."""
        if self.refusal:
            return refusal_report(self.refusal)
        depends = self.state is Independence.DEPENDENT
        if not batching_is_written or not (depends or (self.doubt and warns_of_undecided)):
            return LoadCheckReport((self.reason,))
        return LoadCheckReport(
            (self.reason,), f"batched as configured, but {self.reason}", (FAILED_ROWS,) if depends else ()
        )


def refusal_report(refusal: str, seconds: float = 0.0) -> LoadCheckReport:
    """Return the report on a model that has refused every input that was tried."""
    # The index cuts long texts off.
    advice = (
        "each request may fail, as no made-up input runs; compare the inputs' data_type and dims in config.pbtxt with"
        f" the model's, or give warm-up samples or check.npz; the error: {refusal}"
    )
    return LoadCheckReport((_refused(refusal),), advice, seconds=seconds)


def _refused(refusal: str) -> str:
    return _NOT_CHECKED.format(f"the engine takes no made-up input{f' ({refusal})' if refusal else ''}")


def couples(rows: RowsVerdict | None) -> bool:
    """Return whether a row's answer changes with its neighbours, so that no batch may be padded or cut."""
    return rows is not None and rows.state is Independence.DEPENDENT


def doubt_of(rows: RowsVerdict | None) -> str:
    """Return why the rows of requests may depend on each other; "" = they do not, or were not checked."""
    return "" if rows is None else rows.doubt


_Ran = tuple[Sequence[Feed], Feed]
"""The rows of a batch, and its outputs."""


class _Decided(Exception):
    """Ends the experiments before all are made."""

    def __init__(self, state: Independence, reason: str, output: str = "", difference: float = 0.0) -> None:
        super().__init__(reason)
        self.state = state
        self.output = output
        self.difference = difference


def check_rows(
    run: Run,
    inputs: Sequence[CheckedInput],
    outputs: Sequence[str],
    facts: GraphFacts,
    budget: Budget,
    seed: int,
    samples: Sequence[Feed] = (),
    is_noisy: bool = False,
    fixed_rows: int | None = None,
    largest_batch: int = 0,
) -> RowsVerdict:
    """Decide by experiment, and by the file's facts, whether the outputs of a row depend on the other rows.

    `outputs` may name tensors of `facts.exposed` that `run` returns beside the model's outputs. `samples` are warm-up
    samples of one or more rows. `is_noisy`: equal runs may differ slightly (GPUs), so a repeated batch measures the
    noise. `fixed_rows`: the engine takes batches of exactly this size. `largest_batch`: the configuration's, 0 = it has
    none; a size beyond the usual ones is tried, too. Never raises OutOfTime: a check that runs out of
    time is undecided."""
    encode = bits_of(inputs)
    trials = Trials(lambda feed: run(encode(feed)), budget)
    maker = InputMaker(inputs, facts, seed, samples)
    check = _RowsCheck(
        trials,
        Batches(trials, inputs, outputs, facts.exposed, fixed_rows),
        maker,
        facts,
        is_noisy,
        fixed_rows,
        largest_batch,
    )
    try:
        if facts.couples_rows:
            raise _dependent(facts.couples_rows)
        if fixed_rows == 1:
            raise _undecided("the engine takes one row at a time")
        check.run()
    except _Decided as decided:
        return RowsVerdict(decided.state, str(decided), decided.output, decided.difference, trials.runs)
    except RowsLost as lost:
        reason = _DEPENDENT.format(lost)
        return RowsVerdict(Independence.DEPENDENT, reason, lost.output, math.inf, trials.runs)
    except OutOfTime as ended:
        reason = f"not checked: {ended}; raise --load-check-seconds"
        return RowsVerdict(Independence.UNDECIDED, reason, runs=trials.runs, is_lasting=False)
    except MemoryError as error:
        return RowsVerdict(Independence.UNDECIDED, _NOT_CHECKED.format(error), runs=trials.runs)
    except NoInputs as none:
        return RowsVerdict(Independence.UNDECIDED, _refused(str(none)), runs=trials.runs, refusal=none.refusal)
    return RowsVerdict(Independence.INDEPENDENT, "rows are independent", runs=trials.runs)


class _RowsCheck:
    """The experiments on one model."""

    def __init__(
        self,
        trials: Trials,
        batches: Batches,
        maker: InputMaker,
        facts: GraphFacts,
        is_noisy: bool,
        fixed_rows: int | None,
        largest_batch: int,
    ) -> None:
        self._trials = trials
        self._batches = batches
        self._maker = maker
        self._facts = facts
        self._is_noisy = is_noisy
        self._fixed_rows = fixed_rows
        self._largest_batch = largest_batch
        self._sizes: set[int] = set()
        """Of batches whose rows were compared with themselves alone."""
        self._compared = 0
        """Batches that were compared with one of another neighbour."""

    def run(self) -> None:
        """Return if rows are independent. Raises _Decided, RowsLost, NoInputs or OutOfTime otherwise."""
        found = find_inputs(self._trials, self._batches.single, self._maker)
        (two, alone), are_telling = self._two_rows(found)
        says_little = all(values.dtype.kind != "f" for one in alone for values in one.values())
        most = self._most_rows()
        first: _Ran | None = None
        for number, group in enumerate(groups(self._maker, found.recipe, two, says_little, most)):
            neighbours = iter(group.neighbours.items())
            first = self._first(group, neighbours, first)
            if first is None:
                if number == 0:
                    usual = group.batch(next(iter(group.neighbours.values())))
                    if any(self._batches.single(row) is None for row in usual):
                        raise _undecided(f"the engine refuses made-up rows ({self._trials.refusal})")
                    raise _dependent(f"the engine takes 1 row, but not {len(usual)} rows")
                continue
            if group.rows[0] is two[0]:
                self._sizes.add(len(first[0]))
                self._compare_alone(alone, group.kept(first[1]), found)
            self._compare_beside(group, first, neighbours)
        sizes = self._telling_sizes()
        others = [self._maker.row(found.recipe, str(number)) for number in range(max(sizes, default=2) - 2)]
        for size in sizes:
            many = self._batches.run([two[0], *others[: size - 2], two[1]])
            if many is not None:
                self._compare_alone(alone, {name: values[[0, -1]] for name, values in many.items()}, found)
        if not self._compared:
            raise _undecided(f"no batch of other rows runs ({self._trials.refusal})")
        if found.quality < 1 or not are_telling:
            raise _undecided("the outputs hardly change with the inputs")

    def _most_rows(self) -> float:
        """Return how many rows a batch may have: two if the usual eight batches would take longer than 0.1 s, which is
        unnoticed beside the start of a worker, and less than the round number if a batch of that many would take
        longer than 0.02 s."""
        if self._fixed_rows:
            return self._fixed_rows
        row = self._trials.fastest_row
        return 2 if row * _ROWS * 8 > 0.1 else _ROUND - 1 if row * _ROUND > 0.02 else math.inf

    def _two_rows(self, found: Found) -> tuple[tuple[Sequence[Feed], Sequence[Feed]], bool]:
        """Return two rows and their outputs alone, and whether these outputs differ and vary."""
        names = ["a", "b", *map(str, range(_TRIES))]
        pairs: list[tuple[Feed, Feed]] = []
        first: list[tuple[Feed, Feed]] = []
        for number, name in enumerate(names):
            row = found.rows[number] if number < 2 else self._maker.row(found.recipe, name)
            outputs = found.outputs[number] if number < 2 else self._batches.single(row)
            if outputs is None:
                continue
            pair = row, self._batches.with_rows(outputs, 1)
            first.append(pair)
            if _says_something(pair[1]) and all(_largest(kept[1], pair[1])[1] > _SAME for kept in pairs):
                pairs.append(pair)
            if len(pairs) == 2:
                break
        are_telling = len(pairs) == 2
        (one, alone), (other, other_alone) = pairs if are_telling else first[:2]
        for name, values in alone.items():
            if name in other_alone and name not in self._facts.exposed and other_alone[name].shape != values.shape:
                shapes = f"{list(values.shape)} for one row and {list(other_alone[name].shape)} for another"
                raise _dependent(f"output '{name}' has shape {shapes}", name, math.inf)
        return ([one, other], [alone, other_alone]), are_telling

    def _telling_sizes(self) -> Sequence[int]:
        """Return sizes of batches: a round one and the largest, unless they take longer than 0.1 s; those above a
        number that the model compares something with, perhaps its rows, and of this number; and all up to the round
        one, as far as that takes 0.01 s."""
        if self._fixed_rows:
            return ()
        row = self._trials.fastest_row
        whole = [int(one) for one in self._facts.thresholds if one.is_integer() and 1 < one < _MOST_ROWS]
        # Making more rows would take longer than most checks.
        largest = [min(self._largest_batch, 512)] if self._largest_batch > _ROUND else []
        fast = [size for size in (_ROUND, *whole, *largest) if size * row <= 0.1 and size not in self._sizes]
        all_sizes = [size for size in range(2, _ROUND) if size * (size + 1) / 2 * row <= 0.01]
        return list(dict.fromkeys([*fast, *(size + 1 for size in whole if size >= _ROWS), *all_sizes]))

    def _compare_alone(self, alone: Sequence[Feed], together: Feed, found: Found) -> None:
        """Compare rows alone and in a batch. Raises _Decided if they are far apart."""
        for name, values in together.items():
            singles = [one[name] for one in alone[: len(values)] if name in one]
            if len(singles) < len(values):
                continue
            largest = difference(np.concatenate(singles), values)
            if largest > max(_ALONE, 100 * found.noise.get(name, 0.0)):
                if values.dtype.kind != "f" and not self._differs_again(name, found):
                    continue
                raise _dependent(f"output '{name}' of a row differs{by(largest)} in a batch", name, largest)

    def _differs_again(self, name: str, found: Found) -> bool:
        """Return whether a class or an index differs for other rows, too: two classes may be equally likely by
        chance, and rounding decides."""
        rows = [self._maker.row(found.recipe, row) for row in "fgh"]
        alone, together = [self._batches.run([row]) for row in rows], self._batches.run(rows)
        return together is None or any(
            one is None or difference(one[name], together[name][place : place + 1]) > _ALONE
            for place, one in enumerate(alone)
        )

    def _first(self, group: Group, neighbours: Iterator[tuple[str, Feed]], before: _Ran | None) -> _Ran | None:
        """Run a group's batches until the engine takes one. `before`: the first batch of the group before."""
        for kind, row in neighbours:
            if kind == SAME:
                continue
            batch = group.batch(row)
            # The very same rows give the same outputs.
            if before is not None and list(map(id, before[0])) == list(map(id, batch)):
                return before
            if (outputs := self._batches.run(batch)) is not None:
                return batch, outputs
        return None

    def _compare_beside(self, group: Group, first: _Ran, neighbours: Iterator[tuple[str, Feed]]) -> None:
        """Compare the rows of a group beside further neighbours. Raises _Decided if they differ."""
        for kind, row in neighbours:
            then = self._batches.run(group.batch(row))
            if then is None:
                # Large values may be refused even if they couple no rows.
                continue
            self._compared += kind != SAME
            name, largest = _largest(group.kept(first[1]), group.kept(then))
            # On a CPU it is 0.
            if largest <= 1e-6:
                continue
            noise = self._noise(first)
            # Equal runs that differ by more show a random model.
            if noise > 1e-3:
                random = f" ({self._facts.is_random})" if self._facts.is_random else ""
                raise _undecided(f"equal runs differ by {noise:.2g}{random}")
            if largest > _NOISE_FACTOR * noise:
                raise _dependent(
                    f"output '{name}' of a row changes{by(largest)} with its neighbours ({kind})", name, largest
                )

    def _noise(self, first: _Ran) -> float:
        """Return how much equal runs differ."""
        times, (rows, before) = _REPETITIONS if self._is_noisy else 1, first
        again = [self._batches.run(rows) for _ in range(times)]
        return max(math.inf if outputs is None else _largest(before, outputs)[1] for outputs in again)


def _says_something(outputs: Feed) -> bool:
    """Return whether some output has different numbers in different places."""
    return any(
        values.size == 1 or (values.size > 1 and (values != values.flat[0]).any()) for values in outputs.values()
    )


def _largest(one: Feed, other: Feed) -> tuple[str, float]:
    """Return the output that differs most, and by how much. Each row counts by its own size: the difference of a quiet
    one must not vanish beside a large one's values."""
    largest = "", 0.0
    for name, values in one.items():
        if name not in other:
            continue
        # Slices, because a row of one text would be a str.
        for place in range(len(values)):
            if (found := difference(values[place : place + 1], other[name][place : place + 1])) > largest[1]:
                largest = name, found
    return largest


def _dependent(reason: str, output: str = "", difference: float = 0.0) -> _Decided:
    return _Decided(Independence.DEPENDENT, _DEPENDENT.format(reason), output, difference)


def _undecided(reason: str) -> _Decided:
    return _Decided(Independence.UNDECIDED, _NOT_CHECKED.format(reason))
