"""Compares an engine with a reference: the same inputs must give the same outputs, within the precision."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rocserve.load_check.batches import joined
from rocserve.load_check.budget import Budget, OutOfTime, Trials
from rocserve.load_check.difference import NOTHING, difference, differences, example, largest
from rocserve.load_check.edge_inputs import (
    BEYOND_HALF,
    LARGE,
    NAN,
    PLAIN,
    TIES,
    chooses_branch,
    edge_inputs,
    is_special,
)
from rocserve.load_check.facts import GraphFacts
from rocserve.load_check.input_search import NoInputs, find_inputs
from rocserve.load_check.made_inputs import InputMaker, bits_of, nudged, row_name
from rocserve.load_check.tensors import Array, CheckedInput, Feed, Run

_TOLERANCES: Mapping[str, float] = {"fp32": 1e-3, "fp16": 2e-2, "quantised": 5e-2, "bf16": 1e-1}
"""Precision -> error, relative to the output's largest value, that an engine may have in any model. Correct programs of
one network differ by 1e-6 in float32 and 1e-3 in float16 for nine models of ten. "quantised": the file itself holds the
scales, so engines differ by a step of them here and there."""


CASE_ROWS = 3
"""Rows of a case of a model whose rows are independent: one more than a program of two rows takes at once."""


@dataclass(frozen=True, slots=True)
class Case:
    """An input, and the reference's answer to it."""

    name: str
    """The kind of the input's values: "plain", "large", ..."""
    feed: Feed
    outputs: Feed
    noise: Mapping[str, float]
    """Output -> how much the reference's own answer moves when the input moves in its last place."""
    precision: str = "fp32"
    """The file's precision: "fp32", "fp16", "bf16" or "quantised"."""
    drawn: tuple[str, ...] = ()
    """Outputs that are left out because they differ between equal runs."""


@dataclass(frozen=True, slots=True)
class ReferenceVerdict:
    """Whether an engine's results equal the reference's."""

    right: bool
    cases: int
    """How many cases were compared."""
    largest_error: float
    """Relative to the output's largest value."""
    output: str
    """The output with the largest error, or the first wrong one; "" = none differs."""
    case: str
    """The case in which it differs so much."""
    reason: str
    """A clause for log and index; names output, case, difference and limit."""
    remark: str = ""
    """A finding that is not a failure but deserves a warning; "" = none."""


def reference_cases(
    reference: Run,
    inputs: Sequence[CheckedInput],
    outputs: Sequence[str],
    facts: GraphFacts,
    budget: Budget,
    seed: int,
    rows: int = 0,
    samples: Sequence[Feed] = (),
) -> Sequence[Case]:
    """Make inputs that the reference accepts, and run it on them. `rows`: the size of each batch; 0 = inputs have no
    rows, or one. Returns no cases if nothing made-up runs, fewer if the time ends. Outputs that differ between equal
    runs are left out. `reference` may give inner tensors, too: see GraphFacts.narrowed."""
    encode = bits_of(inputs)
    trials = Trials(lambda feed: reference(encode(feed)), budget)
    maker = InputMaker(inputs, facts, seed, samples)

    def run(feed: Feed) -> Feed | None:
        answer = trials.run(feed, max(rows, 1))
        if answer is None:
            return None
        inner = {name: np.asarray(answer[name]) for name in facts.narrowed.values() if name in answer}
        return inner | {name: np.asarray(answer[name]) for name in outputs}

    cases: list[Case] = []
    drawn: tuple[str, ...] = ()
    try:
        found = find_inputs(trials, lambda row: run(joined([row] * max(rows, 1), inputs)), maker)
        plain = joined([maker.row(found.recipe, row_name(number)) for number in range(max(rows, 1))], inputs)
        again = run(plain)
        for name, feed in edge_inputs(inputs, plain, facts.precision == "fp16", bool(facts.narrowed), facts.compared):
            answer, moved = run(feed), run(nudged(feed))
            if answer is None or moved is None:
                continue
            if name == PLAIN and again is not None:
                drawn = tuple(one for one, off in differences(answer, again).items() if off > _TOLERANCES["fp32"])
                outputs = [one for one in outputs if one not in drawn]
            answer = {
                one: answer[one]
                for one in outputs
                if _is_defined(answer[one], {**feed, **answer}.get(facts.narrowed.get(one, "")))
            }
            if chooses_branch(name):
                answer = {one: values for one, values in answer.items() if _is_finite(values)}
            noise = differences(answer, moved)
            if name == TIES and cases:
                # A nudge decides a tie, but an engine gets the tie itself. Arithmetic may make classes equally likely.
                floats = {one for one, values in answer.items() if values.dtype.kind == "f"}
                noise |= {one: cases[0].noise[one] for one in floats & cases[0].noise.keys()}
            cases.append(Case(name, encode(feed), answer, noise, facts.precision, drawn if name == PLAIN else ()))
    except (NoInputs, OutOfTime, MemoryError):
        pass
    return cases


def compare(cases: Sequence[Case], candidate: Run, precision: str, budget: Budget | None = None) -> ReferenceVerdict:
    """Run the candidate on the cases, as long as the time lasts. `precision`: the engine's: "fp32",
    "fp16", "bf16", "quantised", or "int8" and others that calibration quantises, whose errors only lead to a remark."""
    is_quantised = precision not in _TOLERANCES
    trials = Trials(candidate, budget or Budget(math.inf))
    compared, worst, remark = 0, _Error(), ""
    scales = NOTHING
    # Calibration does not cover values at the edges.
    for case in cases[:1] if is_quantised else cases:
        try:
            answer = trials.run(case.feed)
        except OutOfTime:
            break
        if answer is None:
            if case.name == PLAIN:
                reason = f"it refuses an input that the reference accepts: {trials.refusal}"
                return ReferenceVerdict(False, compared, math.inf, "", case.name, reason)
            # A client gets the error; no answer is wrong.
            continue
        compared += 1
        if case.name == PLAIN:
            # At least a hundredth of the largest value with plain inputs: a saturated output of 1e-10 has no digits
            # where an engine adds it to 1.
            scales = {output: 0.01 * largest(values) for output, values in case.outputs.items()}
        if case.name in (NAN, BEYOND_HALF):
            case, answer = _where_it_stays(case, answer, cases[0])
        if case.drawn and (same := _same_again(case, answer, candidate)):
            reason = f"output '{same}' is the same in two runs, but the model draws random numbers for it"
            return ReferenceVerdict(False, compared, math.inf, same, case.name, reason)
        tolerance = max(_TOLERANCES.get(precision, math.inf), _TOLERANCES[case.precision])
        for error in _errors(case, answer, tolerance, scales):
            # The large values of a float32 file may overflow within an engine of less precision.
            is_coarser = case.precision == "fp32" and tolerance > _TOLERANCES["fp32"]
            is_overflow = case.name == LARGE and is_coarser and error.size == math.inf
            if error.counts and not is_overflow:
                return ReferenceVerdict(False, compared, error.size, error.output, case.name, str(error))
            if error.counts:
                remark = remark or str(error)
            elif error.size > worst.size:
                worst = error
    # Users should know such an error of a quantised model: only they can judge the acceptable cost of calibration.
    if is_quantised and worst.size > 0.15:
        remark = str(worst)
    reason = f"{compared} inputs, largest error {worst.size:.2g}"
    return ReferenceVerdict(True, compared, worst.size, worst.output, worst.case, reason, remark)


def _where_it_stays(case: Case, answer: Feed, plain: Case) -> tuple[Case, Feed]:
    """Return the elements that are NaN (in the case NAN; else infinite), of those entries of the outputs' first
    dimensions whose share of such elements is not larger than the share of special values in all inputs together.
    Engines lose NaN in a Relu, and so in every convolutional network; if NaN has spread, the reference's answer shows
    nothing anyway. An output of one dimension is one entry. Of other outputs, return the elements that are made of a
    special value."""
    special = [is_special(values) for values in case.feed.values() if values.dtype.kind == "f" and values.size]
    shares = [_entries(places).mean(axis=1).max() for places in special]
    right, given = {}, {}
    for name, values in case.outputs.items():
        found = np.asarray(answer.get(name, ()))
        if not values.size or found.shape != values.shape:
            continue
        if values.dtype.kind == "f":
            lost = _entries(np.isnan(values) if case.name == NAN else np.isinf(values))
            # If more than 70 % of an output are NaN or infinity, these have spread, however many inputs have some.
            places = (lost & (lost.mean(axis=1) <= min(sum(shares), 0.7))[:, np.newaxis]).reshape(values.shape)
        else:
            places = _made_of_one(values, plain.outputs.get(name), special)
        right[name], given[name] = values[places], found[places]
    return replace(case, outputs=right), given


def _made_of_one(values: Array, plain: Array | None, special: Sequence[Array]) -> Array:
    """Return where an output of BOOL or integers has a special value at the same place of an input; nowhere if it
    differs from the plain output at other places too, or if that output is one value everywhere, and so shows nothing.
    The integer that NaN becomes in few bits is undefined: those are quantised."""
    places = np.zeros(values.shape, bool)
    for one in special:
        if one.shape == values.shape:
            places |= one
    if plain is None or plain.shape != values.shape or values.dtype not in (np.bool_, np.int32, np.int64):
        return np.zeros_like(places)
    usual = plain[~places]
    is_elementwise = np.array_equal(usual, values[~places]) and np.unique(usual).size > 1
    return places & is_elementwise


def _entries(values: Array) -> Array:
    return values.reshape(len(values) if values.ndim > 1 else 1, -1)


@dataclass(frozen=True, slots=True)
class _Error:
    """The difference of a candidate's output from the reference's."""

    size: float = 0.0
    output: str = ""
    case: str = ""
    allowed: float = 0.0
    example: str = ""

    @property
    def counts(self) -> bool:
        """Whether it is more than rounding. Different shapes, or NaN at other places, always are."""
        return self.size > self.allowed or (self.size == math.inf and self.example != "")

    def __str__(self) -> str:
        off = "" if math.isinf(self.size) else f" ({self.size:.2g} of its largest value; {self.allowed:.2g} allowed)"
        return f"output '{self.output}' is wrong with {self.case} inputs: {self.example}{off}"


def _same_again(case: Case, answer: Feed, candidate: Run) -> str:
    """Return an output that another run repeats, among those that differ between runs of the reference; "" = none."""
    again = candidate(case.feed)
    return next((name for name in case.drawn if difference(answer[name], again[name]) == 0), "")


def _errors(case: Case, answer: Feed, tolerance: float, scales: Mapping[str, float]) -> Iterator[_Error]:
    """`scales`: output -> the least value that errors are relative to."""
    for output, size in differences(case.outputs, answer, least=scales).items():
        # An engine may be off by so many times the reference's own noise: an ill-conditioned network amplifies
        # rounding.
        noise = 100 * case.noise.get(output, 0.0)
        if noise == math.inf:
            # After a nudge, the reference itself has inf or NaN at other places.
            continue
        given = np.asarray(answer[output]) if output in answer else None
        text = "it is missing" if given is None else example(case.outputs[output], given) if size else ""
        yield _Error(size, output, case.name, max(tolerance, noise), text)


def _is_finite(values: Array) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())


def _is_defined(values: Array, narrowed: Array | None) -> bool:
    """Return whether ONNX defines the output: a float beyond an integer type becomes any integer, with x86's
    instructions the least one of 32 or 64 bits. `narrowed`: the Cast's input; None = unknown."""
    if values.dtype.kind not in "iu":
        return True
    limits = np.iinfo(values.dtype)
    if narrowed is not None and narrowed.dtype.kind == "f":
        whole = np.trunc(narrowed)
        return bool(((whole >= limits.min) & (whole <= limits.max)).all())
    return values.dtype.itemsize < 4 or values.dtype.kind != "i" or bool((values > limits.min).all())


def save_cases(path: Path, cases: Sequence[Case]) -> None:
    """Write cases to an .npz file, for another process."""
    arrays: dict[str, Array] = {}
    described = []
    for number, case in enumerate(cases):
        entry: dict[str, Any] = {"name": case.name, "noise": dict(case.noise), "precision": case.precision}
        entry["drawn"] = case.drawn
        entry |= {"feed": {}, "outputs": {}}
        for kind, tensors in (("feed", case.feed), ("outputs", case.outputs)):
            for name, values in tensors.items():
                key = f"{kind}.{number}.{len(entry[kind])}"
                entry[kind][name] = key
                arrays[key] = values if values.dtype.kind != "O" else _packed(values)
        described.append(entry)
    arrays["description"] = np.frombuffer(json.dumps(described).encode(), np.uint8)
    with path.open("wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def load_cases(path: Path) -> Sequence[Case]:
    """Read the cases that `save_cases` wrote."""
    with np.load(path, allow_pickle=False) as arrays:

        def tensors(keys: Mapping[str, str]) -> Feed:
            return {name: _unpacked(arrays[key]) for name, key in keys.items()}

        return [
            Case(
                one["name"],
                tensors(one["feed"]),
                tensors(one["outputs"]),
                one["noise"],
                one["precision"],
                tuple(one["drawn"]),
            )
            for one in json.loads(arrays["description"].tobytes())
        ]


def _packed(texts: Array) -> Array:
    """Return texts as an array that needs no pickle: a U array drops zeros at the end, so each has a mark there."""
    marked = [
        (value if isinstance(value, str) else value.decode(errors="surrogateescape")) + "|" for value in texts.flat
    ]
    return np.array(marked, dtype=np.str_).reshape(texts.shape)


def _unpacked(values: Array) -> Array:
    if values.dtype.kind != "U":
        return values
    return np.array([str(value)[:-1] for value in values.flat], dtype=object).reshape(values.shape)
