"""An engine held against ONNX Runtime on the same inputs. The engines here are wrong as real ones were seen to be."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.load_check import Loaded, load, model, normal, unhurried

from rocserve.core.datatypes import DataType
from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.reference import Case, ReferenceVerdict, compare, load_cases, reference_cases, save_cases
from rocserve.load_check.tensors import ROWS, Array, CheckedInput, Feed

_NEGATION = "g (float[N, 4] x) => (float[N, 4] y) { y = Neg(x) }"


def cases_of(loaded: Loaded, rows: int = 2, seed: int = 0) -> list[Case]:
    found = reference_cases(loaded.run, loaded.inputs, loaded.outputs, loaded.facts, unhurried(), seed, rows)
    return list(found)


def verdict_on(
    text: str, candidate: Callable[[Feed], Array], precision: str = "fp32", **weights: Array
) -> ReferenceVerdict:
    """Check a candidate that gives output "y"."""
    cases = cases_of(load(model(text, **weights)))
    assert cases
    return compare(cases, lambda feed: {"y": candidate(feed)}, precision)


def log_softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    with np.errstate(divide="ignore"):
        return np.log(e / e.sum(-1, keepdims=True))


def test_an_engine_that_agrees_is_right() -> None:
    verdict = verdict_on(_NEGATION, lambda feed: -feed["x"])
    assert (verdict.right, verdict.largest_error, verdict.remark) == (True, 0, "")
    assert verdict.reason == f"{verdict.cases} inputs, largest error 0"


def test_rounding_is_right() -> None:
    w = normal(4, 3)
    text = "g (float[N, 4] x) => (float[N, 3] y) { y = MatMul(x, w) }"
    verdict = verdict_on(text, lambda feed: (feed["x"].astype(np.float64) @ w).astype(np.float32), w=w)
    assert verdict.right
    assert verdict.largest_error < 1e-5


@pytest.mark.parametrize(
    ("text", "candidate", "case"),
    [
        (_NEGATION, lambda feed: feed["x"], "plain"),
        (_NEGATION, lambda feed: -feed["x"][:, :2], "plain"),
        (
            "g (float[N, 4] x) => (float[N, 4] y) { y = LogSoftmax<axis = 1>(x) }",
            lambda f: log_softmax(f["x"]),
            "large",
        ),
        ("g (float[N, 4] x) => (float[N, 4] y) { y = Softplus(x) }", lambda feed: np.log1p(np.exp(feed["x"])), "large"),
        (
            "g (float[N, 4] x) => (bool[N, 4] y) { y = Cast<to = 9>(x) }",
            lambda feed: feed["x"].astype(np.int32).astype(bool),
            "fractional",
        ),
        (
            "g (float[N, 4] x) => (float[N, 4] y) { y = Round(x) }",
            lambda feed: np.floor(feed["x"] + np.float32(0.5)),
            "ties",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_names_what_is_wrong(text: str, candidate: Callable[[Feed], Array], case: str) -> None:
    verdict = verdict_on(text, candidate)
    assert (verdict.right, verdict.output, verdict.case) == (False, "y", case)
    assert verdict.reason.startswith(f"output 'y' is wrong with {case} inputs: ")


_BRANCHES = {
    "a flag": "a = Identity(flag) y = Where(a, p, n)",
    "a flag of If": """y = If(flag) <then_branch = one () => (float[N, 4] u) { u = Identity(p) },
        else_branch = other () => (float[N, 4] v) { v = Identity(n) }>""",
    "a mode": "a = Equal(mode, seven) y = Where(a, p, n)",
    "a mode above a number": "a = Greater(mode, seven) y = Where(a, p, n)",
    "a largest value": "m = ReduceMax<keepdims = 0>(x) a = Greater(m, far) y = Where(a, p, n)",
    "a value below a number": "a = Less(x, minus_far) y = Where(a, p, n)",
}


@pytest.mark.parametrize("wrong", ["p", "n"])
@pytest.mark.parametrize("kind", _BRANCHES)
def test_an_engine_is_wrong_in_one_branch_only(kind: str, wrong: str) -> None:
    """Without an input that takes it, the branch would serve wrong answers."""
    numbers = {"seven": np.array(7), "far": np.float32(200), "minus_far": np.float32(-250)}

    def engine(fault: str = "") -> Loaded:
        p, n = ("Softsign(x)" if fault == "p" else "Tanh(x)"), ("Cos(x)" if fault == "n" else "Sin(x)")
        inputs = "float[N, 4] x, bool flag, int64 mode"
        return load(model(f"g ({inputs}) => (float[N, 4] y) {{ p = {p} n = {n} {_BRANCHES[kind]} }}", **numbers))

    right, faulty = engine(), engine(wrong)
    assert compare(cases_of(right), right.run, "fp32").right
    assert not compare(cases_of(right), faulty.run, "fp32").right


def test_an_engine_may_answer_anything_where_nothing_is_left() -> None:
    """Softmax of a row in which all is hidden is NaN, or zeros in fused kernels."""
    text = """g (float[N, 4] x, int64[N, 4] ids) => (float[N, 4] y) {
        hidden = Equal(ids, zero) low = Where(hidden, least, x) y = Softmax <axis = 1> (low) }"""
    loaded = load(model(text, zero=np.array(0), least=np.float32(-np.inf)))
    cases = cases_of(loaded)
    assert any("equal to" in case.name for case in cases)
    verdict = compare(cases, lambda feed: {"y": np.nan_to_num(loaded.run(feed)["y"])}, "fp32")
    assert verdict.right, verdict.reason


def test_negative_indices_that_the_reference_takes() -> None:
    text = "g (float[3, 4] x, int64[3, 4] i) => (float[3, 4] y) { y = GatherElements<axis = 0>(x, i) }"
    loaded = load(model(text))

    def clamped(feed: Feed) -> Feed:
        return {"y": np.take_along_axis(feed["x"], np.maximum(feed["i"], 0), 0)}

    verdict = compare(cases_of(loaded, rows=0), clamped, "fp32")
    assert (verdict.right, verdict.case) == (False, "minus one")


def test_an_error_names_place_and_both_differences() -> None:
    verdict = verdict_on(_NEGATION, lambda feed: np.where(np.arange(4) == 2, 1.25, -feed["x"]).astype(np.float32))
    assert "1.25 instead of " in verdict.reason
    assert "of its largest value; 0.001 allowed)" in verdict.reason


def test_an_ill_conditioned_network_may_differ_by_its_noise() -> None:
    text = "g (float[N, 4] x) => (float[N, 4] y) { a = Mul(x, big) y = Sin(a) }"
    off = verdict_on(text, lambda feed: np.sin(feed["x"].astype(np.float64) * 1e5), big=np.array(1e5, np.float32))
    assert off.right
    assert off.largest_error > 1e-3


@pytest.mark.parametrize(
    ("precision", "error", "right"), [("fp32", 5e-3, False), ("fp16", 5e-3, True), ("bf16", 5e-2, True)]
)
def test_a_coarser_precision_may_differ_more(precision: str, error: float, right: bool) -> None:
    verdict = verdict_on(_NEGATION, lambda feed: -feed["x"] * np.float32(1 + error), precision)
    assert verdict.right is right


def test_a_large_value_may_overflow_half_precision() -> None:
    def half(feed: Feed) -> Array:
        with np.errstate(over="ignore"):
            return (feed["x"] * 1e3).astype(np.float16).astype(np.float32)

    text = "g (float[N, 4] x) => (float[N, 4] y) { y = Mul(x, k) }"
    verdict = verdict_on(text, half, "fp16", k=np.array(1e3, np.float32))
    assert verdict.right
    assert verdict.remark.startswith("output 'y' is wrong with large inputs: ")


def test_int8_only_leads_to_a_remark_but_not_if_it_is_nan() -> None:
    rough = verdict_on(_NEGATION, lambda feed: -feed["x"] * np.float32(1.5), "int8")
    assert rough.right
    assert "of its largest value" in rough.remark
    broken = verdict_on(_NEGATION, lambda feed: np.full_like(feed["x"], np.nan), "int8")
    assert not broken.right


def test_an_engine_that_refuses_plain_inputs_is_wrong() -> None:
    def refuse(feed: Feed) -> Array:
        raise RuntimeError("no kernel")

    verdict = verdict_on(_NEGATION, refuse)
    assert (verdict.right, verdict.reason) == (False, "it refuses an input that the reference accepts: no kernel")


def test_an_engine_may_refuse_values_at_the_edges() -> None:
    def refuse_large(feed: Feed) -> Array:
        if np.abs(feed["x"]).max() > 50:
            raise RuntimeError("too large")
        return -feed["x"]

    assert verdict_on(_NEGATION, refuse_large).right


def test_random_outputs_are_not_compared() -> None:
    loaded = load(model("g (float[N, 4] x) => (float[N, 4] y, float[N, 4] r) { y = Neg(x) r = RandomNormalLike(x) }"))
    assert {name for case in cases_of(loaded) for name in case.outputs} == {"y"}


def test_cases_survive_a_file(tmp_path: Path) -> None:
    text = "g (string[N] s, float[N] x, bool[N] b) => (string[N] t, float[N] y, bool[N] c) "
    cases = cases_of(load(model(text + "{ t = Identity(s) y = Neg(x) c = Not(b) }")))
    save_cases(tmp_path / "cases.npz", cases)
    again = load_cases(tmp_path / "cases.npz")
    assert [(case.name, case.noise, case.precision) for case in again] == [
        (case.name, case.noise, case.precision) for case in cases
    ]
    for one, other in zip(cases, again, strict=True):
        for before, after in ((one.feed, other.feed), (one.outputs, other.outputs)):
            assert before.keys() == after.keys()
            for name, values in before.items():
                assert values.dtype == after[name].dtype
                assert values.shape == after[name].shape
                np.testing.assert_array_equal(values, after[name])


def test_texts_keep_zeros_at_their_end(tmp_path: Path) -> None:
    texts = np.array(["a\0", "", b"b"], object)
    save_cases(tmp_path / "cases.npz", [Case("plain", {"x": texts}, {}, {"y": math.inf})])
    (case,) = load_cases(tmp_path / "cases.npz")
    assert list(case.feed["x"]) == ["a\0", "", "b"]
    assert case.noise == {"y": math.inf}


def test_a_sample_is_the_plain_case() -> None:
    loaded = load(model(_NEGATION))
    sample = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
    cases = reference_cases(loaded.run, loaded.inputs, loaded.outputs, NO_FACTS, unhurried(), 0, 2, [sample])
    np.testing.assert_array_equal(cases[0].feed["x"], sample["x"])


def test_bf16_inputs_are_bits() -> None:
    seen: list[Array] = []

    def reference(feed: Feed) -> Feed:
        seen.append(feed["x"])
        return {"y": (feed["x"].astype(np.uint32) << 16).view(np.float32)}

    inputs = [CheckedInput("x", DataType.BF16, (ROWS, 4))]
    cases = reference_cases(reference, inputs, ["y"], NO_FACTS, unhurried(), 0, 2)
    assert {values.dtype for values in seen} == {np.dtype(np.uint16)}
    assert "large" in {case.name for case in cases}
    assert 0.01 < np.abs(cases[0].outputs["y"]).mean() < 10


def test_no_time_gives_no_cases() -> None:
    loaded = load(model(_NEGATION))
    assert not reference_cases(loaded.run, loaded.inputs, loaded.outputs, loaded.facts, Budget(0), 0)
