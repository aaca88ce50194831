"""Decides whether open dimensions may be padded: whether the answer to an input stays the same when the input is padded
to a larger size, alone and beside longer ones.

Inputs are padded as in the server (core.padding). Outputs are cut back at the places whose sizes follow the length, and
compared with those of the unpadded input. Shapes and kernels differ, and so does rounding, hence the tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from rocserve.core.padding import Lengths, Padding
from rocserve.load_check.batches import RowsLost
from rocserve.load_check.budget import OutOfTime
from rocserve.load_check.difference import by, difference
from rocserve.load_check.input_search import NoInputs
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.made_inputs import has_floats
from rocserve.load_check.padding_lengths import Trial, TrialLengths, Unit
from rocserve.load_check.padding_verdict import (
    DimensionVerdict,
    PaddingState,
    PaddingVerdict,
    all_dimensions,
    named,
    refused,
    unclear,
    undecided,
)
from rocserve.load_check.short_inputs import Reading, ShortInputs, readings, unknown_lengths
from rocserve.load_check.tensors import Array, Feed


class _Changed(Exception):
    """An answer changes when the input is padded; the text names it."""


class _Unclear(Exception):
    """Nothing can be compared; the text is the reason."""


def check_padding(
    model: LengthTrials, padding: Padding, written_values: frozenset[str] = frozenset()
) -> PaddingVerdict:
    """Decide by experiment, and by the file's facts, which dimensions may be padded to their sizes.

    `written_values`: inputs whose padding value is configured; for others, a value that hides is searched for. Never
    raises OutOfTime."""
    if coupled := model.facts.couples_rows:
        reason = refused(padding.dimensions, f"{coupled}, and from added elements")
        return all_dimensions(padding, PaddingState.REFUSED, reason)
    if unknown := unknown_lengths(model.inputs, padding):
        return undecided(padding, unknown, is_lasting=True)
    try:
        found = model.found
        if found.quality < 1:
            return undecided(padding, "the outputs hardly change with the inputs", is_lasting=True)
        usual: Sequence[DimensionVerdict] = ()
        best: Sequence[DimensionVerdict] = ()
        values = padding.values
        for reading in readings(model.inputs, found.recipe, padding, written_values):
            verdicts = _PaddingCheck(model, padding, reading).run()
            usual = usual or verdicts
            if not best or _allowed(verdicts) > _allowed(best):
                best, values = verdicts, reading.fills
            if _allowed(best) == len(best):
                break
    except OutOfTime as ended:
        return undecided(padding, f"{ended}; raise --load-check-seconds")
    except (MemoryError, NoInputs) as none:
        refusal = f" ({none})" if str(none) else ""
        reason = f"the engine takes no made-up input{refusal}; give warm-up samples or check.npz"
        return undecided(padding, reason, is_lasting=isinstance(none, NoInputs))
    # The usual reading has the best reason why a dimension must not be padded.
    final = [
        old if new.state is not PaddingState.ALLOWED and old.state is not PaddingState.ALLOWED else new
        for old, new in zip(usual, best, strict=True)
    ]
    return PaddingVerdict(tuple(final), {name: value for name, value in values.items() if value}, model.trials.runs)


class _PaddingCheck:
    """The experiments on one model, under one reading of its inputs."""

    def __init__(self, model: LengthTrials, padding: Padding, reading: Reading) -> None:
        self._trials = model.trials
        self._batches = model.batches
        self._shorts = ShortInputs(model.maker, model.found.recipe, padding, reading)
        self._facts = model.facts
        self._noise = model.found.noise
        self._dimensions = padding.dimensions
        self._reading = reading
        self._has_company = model.has_company
        self._answers: dict[tuple[str, Lengths], Feed | None] = {}
        self._lengths = TrialLengths(padding.dimensions, self._shorts.usual_lengths())

    def run(self) -> Sequence[DimensionVerdict]:
        """Return the verdict on each dimension. Raises OutOfTime."""
        verdicts: dict[int, DimensionVerdict] = {}
        units = list(self._units())
        firsts: list[tuple[Unit, Trial]] = []
        for unit in units:
            state, reason = self._judged([unit], partial(self._try, unit, firsts))
            verdicts |= self._verdicts(unit, state, reason)
        allowed = [one for one in firsts if verdicts[one[0].indices[0]].state is PaddingState.ALLOWED]
        if len(allowed) > 1:
            joined, together = [unit for unit, _ in allowed], self._lengths.joined(allowed)
            state, reason = self._judged(joined, partial(self._try_kinds, joined, together))
            if state is not PaddingState.ALLOWED:
                for unit in joined:
                    verdicts |= self._verdicts(unit, state, reason)
        return [verdicts[index] for index in range(len(self._dimensions))]

    def _judged(self, units: Sequence[Unit], trials: Callable[[], None]) -> tuple[PaddingState, str]:
        dimensions = [self._dimensions[index] for unit in units for index in unit.indices]
        try:
            trials()
        except (_Changed, RowsLost) as changed:
            return PaddingState.REFUSED, refused(dimensions, str(changed))
        except _Unclear as why:
            return PaddingState.UNDECIDED, unclear(dimensions, str(why))
        ones = [f"'{name}'" for name, value in self._reading.fills.items() if value == 1]
        hidden = f", with 1 in {', '.join(ones)}" if ones and not self._reading.is_usual else ""
        return PaddingState.ALLOWED, f"{named(dimensions)} may be padded{hidden}"

    def _verdicts(self, unit: Unit, state: PaddingState, reason: str) -> Mapping[int, DimensionVerdict]:
        return {index: DimensionVerdict(self._dimensions[index].label, state, reason) for index in unit.indices}

    def _units(self) -> Iterator[Unit]:
        """Yield the dimensions, together if the engine refuses different lengths of them."""
        linked: list[int] = []
        for index in range(len(self._dimensions)):
            unit = self._with_places([index])
            if unit.follows:
                yield unit
            else:
                linked.append(index)
        if linked:
            yield self._with_places(linked)

    def _with_places(self, indices: Sequence[int]) -> Unit:
        """Return the unit of these dimensions with the places of outputs that have their length."""
        seen: list[tuple[int, Feed]] = []
        tried = (trial.lengths for trial in self._lengths.short(indices))
        for lengths in (*tried, *self._lengths.whole(indices)):
            length = lengths[indices[0]]
            # A dimension of 1 may be dropped, and cannot distinguish a length from rows.
            if length > 1 and all(length != other for other, _ in seen):
                outputs = self._answer("a", lengths)
                seen += [(length, outputs)] if outputs is not None else []
            if len(seen) == 2:
                break
        if len(seen) < 2:
            return Unit(indices)
        (short, one), (long, other) = seen
        follows = {
            name: tuple(
                place
                for place, pair in enumerate(zip(values.shape, other[name].shape, strict=False))
                if pair == (short, long)
            )
            for name, values in one.items()
        }
        return Unit(indices, follows)

    def _try(self, unit: Unit, firsts: list[tuple[Unit, Trial]]) -> None:
        """Return if the unit's dimensions may be padded, with the first trial in `firsts`. Raises _Changed, _Unclear,
        RowsLost or OutOfTime."""
        if not unit.follows:
            raise _Unclear(f"the engine takes no two lengths{self._refusal}")
        first = next((trial for trial in self._lengths.short(unit.indices) if self._answer("a", trial.lengths)), None)
        if first is None:
            raise _Unclear(f"the engine takes no made-up input to pad{self._refusal}")
        if not self._reading.is_usual:
            self._check_hiding(unit, first.lengths)
        self._try_kinds([unit], first)
        self._try_shortest(unit)
        for trial in self._lengths.further(first, unit.indices):
            self._compare([unit], "a", trial)
        firsts.append((unit, first))

    def _try_kinds(self, units: Sequence[Unit], trial: Trial) -> None:
        one, other = (self._answer(name, trial.lengths) for name in "ab")
        if one is None or other is None:
            raise _Unclear(f"the engine takes no made-up input to pad{self._refusal}")
        # Only answers that differ by ten times the tolerance show anything.
        if all(difference(one[name], other[name]) <= 10 * self._limit(name) for name in one):
            raise _Unclear("the outputs hardly change with the inputs")
        for row in "ab":
            self._compare(units, row, trial)
        for kind, made in self._shorts.kinds(trial.lengths):
            if (right := self._batches.single(made)) is not None:
                self._compare_with(units, made, right, trial, f" ({kind})")
        if self._has_company:
            self._compare_beside_longer(units, trial, one)

    def _try_shortest(self, unit: Unit) -> None:
        """Pad the shortest input that runs: with only one element, of either sign, a maximum over the length cannot
        hide the padding."""
        trial = next((one for one in self._lengths.shortest(unit.indices) if self._is_whole(unit, one)), None)
        if trial is None:
            return
        for name in "abcd":
            self._compare([unit], name, trial)
            row = self._shorts.row(name, trial.lengths)
            negated = None if row is None or not has_floats(row) else self._shorts.negated(row)
            if negated is not None and (right := self._batches.single(negated)) is not None:
                self._compare_with([unit], negated, right, trial, " (negated)")

    def _is_whole(self, unit: Unit, trial: Trial) -> bool:
        """Return whether the engine takes the lengths, and has not dropped a dimension of 1."""
        answer, length = self._answer("a", trial.lengths), trial.lengths[unit.indices[0]]
        return answer is not None and all(
            answer[name].shape[place : place + 1] == (length,)
            for name, places in unit.follows.items()
            for place in places
        )

    def _compare(self, units: Sequence[Unit], name: str, trial: Trial) -> None:
        row, right = self._shorts.row(name, trial.lengths), self._answer(name, trial.lengths)
        if row is not None and right is not None:
            self._compare_with(units, row, right, trial)

    def _compare_with(self, units: Sequence[Unit], row: Feed, right: Feed, trial: Trial, kind: str = "") -> None:
        """Compare a row's answer with that of the padded row. Raises _Changed or _Unclear."""
        padded = self._batches.single(self._shorts.padded(row, trial.sizes))
        if padded is None:
            raise _Changed(f"the engine refuses an input when {trial}{self._refusal}")
        for name, values in right.items():
            found = self._cut(units, name, padded, trial)
            if found is None or (size := self._difference(name, values, found, trial)) <= self._limit(name):
                continue
            if values.shape != found.shape:
                if name in self._facts.exposed:
                    continue
                shapes = f"{list(found.shape)} instead of {list(values.shape)}"
                raise _Changed(f"output '{name}' has the shape {shapes} when {trial}")
            again = self._batches.single(row)
            if again is None or difference(values, again[name]) > self._limit(name):
                raise _Unclear(f"equal runs differ{f' ({self._facts.is_random})' if self._facts.is_random else ''}")
            if values.dtype.kind == "f" or self._differs_again(units, name, trial):
                raise _Changed(f"output '{name}' changes{by(size)} when {trial}{kind}")

    def _difference(self, name: str, right: Array, found: Array, trial: Trial) -> float:
        """Return the difference of two outputs, even beside large constants, such as the -1e9 of hidden elements."""
        whole = difference(right, found)
        one, other = (self._answers.get((row, trial.lengths)) for row in "ab")
        if one is None or other is None or not one[name].shape == other[name].shape == right.shape == found.shape:
            return whole
        varying = one[name] != other[name]
        return max(whole, difference(right[varying], found[varying]))

    def _differs_again(self, units: Sequence[Unit], name: str, trial: Trial) -> bool:
        """Return whether a class or an index differs for another row, too."""
        # Two rows may be equally likely by chance.
        for other in "fgh":
            row, right = self._shorts.row(other, trial.lengths), self._answer(other, trial.lengths)
            if row is None or right is None:
                continue
            padded = self._batches.single(self._shorts.padded(row, trial.sizes))
            found = None if padded is None else self._cut(units, name, padded, trial)
            if found is None or difference(right[name], found) > self._limit(name):
                return True
        return False

    def _compare_beside_longer(self, units: Sequence[Unit], trial: Trial, right: Feed) -> None:
        """Compare a padded row beside an unpadded one with the row alone."""
        row = self._shorts.row("a", trial.lengths)
        longer = self._shorts.row("c", trial.sizes) or self._shorts.row("c", trial.lengths)
        if row is None or longer is None:
            return
        for place in (0, 1):
            rows = [self._shorts.padded(longer, trial.sizes)] * 2
            rows[place] = self._shorts.padded(row, trial.sizes)
            batch = self._batches.run(rows)
            if batch is None:
                raise _Changed(f"the engine refuses a row when {trial}, beside a longer one{self._refusal}")
            for name, values in right.items():
                found = self._cut(units, name, {name: batch[name][place : place + 1]}, trial) if name in batch else None
                if (
                    found is None
                    or (size := difference(values, found)) <= self._limit(name)
                    or values.dtype.kind != "f"
                ):
                    continue
                raise _Changed(f"output '{name}' changes{by(size)} when {trial} beside a longer row")

    def _check_hiding(self, unit: Unit, lengths: Lengths) -> None:
        """Raise _Changed unless the model hides exactly the elements of the reading: a network that reads only its own
        element would be equal under any reading."""
        half = tuple(length // 2 if index in unit.indices else length for index, length in enumerate(lengths))
        trial = Trial(half, lengths)
        for is_hidden in (False, True):
            # Attention may be so peaked that one pair of rows shows nothing.
            seen = [
                self._is_seen(unit, trial, self._shorts.changed_behind(pair, half, lengths, is_hidden))
                for pair in ("ab", "cd", "ef", "gh")
            ]
            if any(seen) is is_hidden:
                raise _Changed("nothing shows what hides added elements")

    def _is_seen(self, unit: Unit, trial: Trial, rows: Sequence[Feed]) -> bool:
        """Return whether two rows that differ only in the cut-off part differ in the rest of their answers."""
        answers = [self._batches.single(row) for row in rows]
        if len(answers) < 2 or answers[0] is None or answers[1] is None:
            return False
        for name in answers[0]:
            one, other = (self._cut([unit], name, answer, trial) for answer in answers if answer is not None)
            if one is not None and other is not None and difference(one, other) > self._limit(name):
                return True
        return False

    def _cut(self, units: Sequence[Unit], name: str, padded: Feed, trial: Trial) -> Array | None:
        """Return an output without the added elements' part; None = an inner tensor that cannot be cut. Raises
        _Changed if the output is not as long as the padded input."""
        values = padded[name]
        places = [slice(None)] * values.ndim
        for unit in units:
            index = unit.indices[0]
            for place in unit.follows.get(name, ()):
                if values.shape[place : place + 1] != (trial.sizes[index],):
                    if name in self._facts.exposed:
                        return None
                    raise _Changed(f"output '{name}' has the shape {list(values.shape)} when {trial}")
                places[place] = slice(trial.lengths[index])
        return values[tuple(places)]

    def _answer(self, name: str, lengths: Lengths) -> Feed | None:
        """Return the answer to an unpadded row; None = the engine refuses it."""
        if (name, lengths) not in self._answers:
            row = self._shorts.row(name, lengths)
            self._answers[name, lengths] = None if row is None else self._batches.single(row)
        return self._answers[name, lengths]

    @property
    def _refusal(self) -> str:
        """The engine's last message, in one line and in brackets."""
        return f" ({' '.join(self._trials.refusal.split())})" if self._trials.refusal else ""

    def _limit(self, name: str) -> float:
        """Return the largest allowed difference from the right answer."""
        # Precision of the file -> largest difference from the answer to the unpadded input, relative to its largest
        # value: the effect of other shapes on rounding. A step of int8 is 1/127.
        tolerances = {"fp32": 5e-5, "fp16": 1e-2, "bf16": 5e-2, "quantised": 2e-2}
        # Or 30 times the effect of the inputs' last place, but no more than 5e-2.
        return max(tolerances[self._facts.precision], min(30 * self._noise.get(name, 0.0), 5e-2))


def _allowed(verdicts: Sequence[DimensionVerdict]) -> int:
    return sum(one.state is PaddingState.ALLOWED for one in verdicts)
