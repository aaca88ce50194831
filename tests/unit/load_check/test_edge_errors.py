"""What counts as an error at the edges: NaN that an engine loses, digits beside a saturated output, steps of a
quantised file, random numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from support.load_check import load, model, unhurried

from rocserve.core.datatypes import DataType
from rocserve.load_check.edge_inputs import BEYOND_HALF, NAN, PLAIN, edge_inputs
from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.onnx_facts import expose, onnx_facts
from rocserve.load_check.reference import Case, ReferenceVerdict, compare, reference_cases
from rocserve.load_check.tensors import Array, CheckedInput

X = np.array([[1, np.nan, -2], [3, -4, 5]], np.float32)
WEIGHTS = np.arange(1, 13, dtype=np.float32).reshape(3, 4)


def compared(x: Array, right: Callable[[Array], Array], engine: Callable[[Array], Array]) -> ReferenceVerdict:
    case = Case(NAN, {"x": x}, {"y": right(x)}, {"y": 0.0})
    return compare([case], lambda feed: {"y": engine(feed["x"])}, "fp32")


def relu(x: Array) -> Array:
    return np.where(x < 0, 0, x).astype(np.float32)


def relu_without_nan(x: Array) -> Array:
    return np.where(x > 0, x, 0).astype(np.float32)


@pytest.mark.parametrize("x", [X, X[0], X[:1], X.reshape(1, 1, 2, 3), X[:, 1:]])
def test_an_engine_that_loses_nan_in_a_relu_alone_is_wrong(x: Array) -> None:
    found = compared(x, relu, relu_without_nan)
    assert not found.right
    assert found.reason.startswith("output 'y' is wrong with nan inputs: 0 instead of nan at ")
    assert compared(x, relu_without_nan, relu).right, "NaN in place of a number is not a silent error"
    assert compared(x, relu, relu).right


def test_a_network_in_which_nan_spreads_says_nothing() -> None:
    found = compared(X, lambda x: relu(x @ WEIGHTS), lambda x: relu_without_nan(x @ WEIGHTS))
    assert found.right and not found.remark


def test_what_has_no_nan_says_nothing() -> None:
    labels = compared(X, lambda x: x.argmax(1), lambda x: np.nan_to_num(x).argmax(1) + 1)
    assert labels.right
    assert compared(X, np.nan_to_num, np.nan_to_num).right


def test_a_step_of_a_quantised_file_is_rounding() -> None:
    right = np.array([[0, 128, 255]], np.uint8)
    case = Case(PLAIN, {"x": right}, {"y": right}, {"y": 0.0})

    def off_by(steps: int, precision: str) -> bool:
        return compare([case], lambda feed: {"y": np.array([[0, 128 + steps, 255]], np.uint8)}, precision).right

    assert off_by(1, "quantised") and not off_by(20, "quantised")
    assert not off_by(1, "fp32")


def test_a_saturated_output_is_judged_by_what_the_output_usually_is() -> None:
    x = np.array([[1, 2, 3]], np.float32)
    cases = [Case(PLAIN, {"x": x}, {"y": x}, {"y": 0.0}), Case("negative", {"x": -x}, {"y": x * 1e-10}, {"y": 0.0})]

    def off_by(error: float) -> bool:
        return compare(cases, lambda feed: {"y": x if feed["x"].min() > 0 else x * 1e-10 + error}, "fp32").right

    assert off_by(1e-8)
    assert not off_by(1e-4)


def test_random_numbers_must_be_drawn_anew() -> None:
    x = np.zeros((1, 4), np.float32)
    generator = np.random.default_rng(0)

    def noise(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": generator.random(feed["x"].shape), "z": feed["x"]}

    inputs = [CheckedInput("x", DataType.FP32, (1, 4))]
    cases = reference_cases(noise, inputs, ["y", "z"], NO_FACTS, unhurried(), seed=0)
    assert cases[0].drawn == ("y",) and all("y" not in case.outputs for case in cases)
    assert compare(cases, noise, "fp32").right
    constant = compare(cases, lambda feed: {"y": x, "z": feed["x"]}, "fp32")
    assert not constant.right and constant.output == "y"
    assert constant.reason == "output 'y' is the same in two runs, but the model draws random numbers for it"


@pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 2), ()])
def test_large_inputs_are_large_however_few_they_are(shape: tuple[int, ...]) -> None:
    inputs = [CheckedInput("x", DataType.FP32, shape)]
    large = dict(edge_inputs(inputs, {"x": np.full(shape, 0.01, np.float32)}))["large"]["x"]
    assert large.shape == shape and large.dtype == np.float32
    assert large.max() == 300 and (large.size == 1 or large.min() == -300)


def test_an_engine_that_takes_bytes_for_signed_numbers_is_found_by_small_ones() -> None:
    def shifted(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": feed["x"].astype(np.int32) - feed["zero"]}

    def from_128_on(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": shifted(feed)["y"] + (0 if feed["zero"].max() >= 128 else 256)}

    inputs = [CheckedInput("x", DataType.UINT8, (1, 8)), CheckedInput("zero", DataType.UINT8, (1,))]
    plain = {"x": np.arange(150, 158, dtype=np.uint8)[np.newaxis], "zero": np.array([200], np.uint8)}
    cases = [Case(name, feed, shifted(feed), {"y": 0.0}) for name, feed in edge_inputs(inputs, plain)]
    assert compare(cases[:1], from_128_on, "fp32").right
    assert compare(cases, from_128_on, "fp32").case == "small integers"


def test_an_engine_that_takes_truth_from_the_last_byte_is_found() -> None:
    loaded = load(model("g (int64[N, 4] x) => (bool[N, 4] y) { y = Cast<to = 9>(x) }"))
    cases = reference_cases(loaded.run, loaded.inputs, loaded.outputs, loaded.facts, unhurried(), 0, 2)
    assert compare(cases, lambda feed: {"y": feed["x"] != 0}, "fp32").right
    last_byte = compare(cases, lambda feed: {"y": feed["x"].astype(np.uint8) != 0}, "fp32")
    assert (last_byte.right, last_byte.case) == (False, "zero bytes")


def test_nan_stands_first_and_later_in_reduced_groups() -> None:
    feed = dict(edge_inputs([CheckedInput("x", DataType.FP32, (5, 2))], {"x": np.ones((5, 2), np.float32)}))[NAN]
    assert np.argwhere(np.isnan(feed["x"])).tolist() == [[0, 0], [3, 1]]
    case = Case(NAN, feed, {"y": feed["x"].max(1)}, {"y": 0.0})

    def last_is_kept(x: Array) -> Array:
        return np.where(x[:, 0] > x[:, 1], x[:, 0], x[:, 1])

    assert not compare([case], lambda feed: {"y": last_is_kept(feed["x"])}, "fp32").right
    assert not compare([case], lambda feed: {"y": last_is_kept(feed["x"][:, ::-1])}, "fp32").right


def bool_verdict(right: Callable[[Array], Array], engine: Callable[[Array], Array]) -> ReferenceVerdict:
    x = np.random.default_rng(0).standard_normal((3, 8)).astype(np.float32)
    feeds = dict(edge_inputs([CheckedInput("x", DataType.FP32, (3, 8))], {"x": x}))
    cases = [Case(name, feeds[name], {"y": right(feeds[name]["x"])}, {"y": 0.0}) for name in (PLAIN, NAN)]
    return compare(cases, lambda feed: {"y": engine(feed["x"])}, "fp32")


@pytest.mark.parametrize("kind", [np.bool_, np.int64])
def test_a_comparison_with_nan_counts_where_it_is_elementwise(kind: type[np.generic]) -> None:
    wrong = bool_verdict(lambda x: (x <= 0).astype(kind), lambda x: (~(x > 0)).astype(kind))
    assert (wrong.right, wrong.case, wrong.output) == (False, NAN, "y")
    assert bool_verdict(lambda x: (x <= 0).astype(kind), lambda x: (x <= 0).astype(kind)).right


def test_what_byte_nan_is_quantised_to_is_open() -> None:
    def quantised(nan: float) -> Callable[[Array], Array]:
        return lambda x: np.clip(np.nan_to_num(x, nan=nan) * 50 + 128, 0, 255).astype(np.uint8)

    assert bool_verdict(quantised(-9), quantised(9)).right


def test_a_mask_of_a_network_in_which_nan_spreads_says_nothing() -> None:
    weights = np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32)
    assert bool_verdict(lambda x: relu(x @ weights) < 1, lambda x: relu_without_nan(x @ weights) < 1).right


def test_a_number_beyond_float16_becomes_infinite_in_a_file_that_casts_to_it() -> None:
    def half(x: Array) -> Array:
        with np.errstate(over="ignore"):
            return x.astype(np.float16).astype(np.float32)

    text = "g (float[N, 4] x) => (float[N, 4] y) { a = Cast<to = 10>(x) y = Cast<to = 1>(a) }"
    loaded = load(model(text))
    cases = reference_cases(loaded.run, loaded.inputs, loaded.outputs, loaded.facts, unhurried(), 0, 2)
    assert compare(cases, lambda feed: {"y": half(feed["x"])}, "fp32").right
    clipped = compare(cases, lambda feed: {"y": half(np.clip(feed["x"], -65504, 65504))}, "fp32")
    assert (clipped.right, clipped.case) == (False, BEYOND_HALF)
    w = np.random.default_rng(0).standard_normal((4, 4)).astype(np.float16)
    network = load(model(text.replace("y =", "b = MatMul(a, w) y =").replace("(a) }", "(b) }"), w=w))
    cases = reference_cases(network.run, network.inputs, network.outputs, network.facts, unhurried(), 0, 2)
    assert BEYOND_HALF in {case.name for case in cases}

    def saturated(feed: Mapping[str, Array]) -> dict[str, Array]:
        return {"y": network.run({"x": np.clip(feed["x"], -65504, 65504)})["y"]}

    assert compare(cases, saturated, "fp32").right, "infinity has spread"


@pytest.mark.parametrize(("code", "kind"), [(2, np.uint8), (3, np.int8), (12, np.uint32), (13, np.uint64)])
def test_a_float_that_no_integer_of_a_cast_stands_for_is_not_compared(code: int, kind: type[np.integer[Any]]) -> None:
    text = f"g (float[N, 4] x) => ({np.dtype(kind).name}[N, 4] y) {{ a = Add(x, x) y = Cast<to = {code}>(a) }}"
    proto = model(text)
    facts = onnx_facts(proto)
    assert facts.narrowed == {"y": "a"}
    expose(proto, ["a"])
    loaded = load(proto, facts)
    cases = reference_cases(loaded.run, loaded.inputs, ["y"], facts, unhurried(), 0, 2)
    limits = np.iinfo(kind)

    def saturated(feed: Mapping[str, Array], factor: float = 2) -> dict[str, Array]:
        found = np.trunc(feed["x"].astype(np.float64) * factor)
        return {"y": np.clip(np.nan_to_num(found), limits.min, min(limits.max, 1 << 40)).astype(kind)}

    assert compare(cases, saturated, "fp32").right
    compared = {case.name for case in cases if case.outputs}
    assert "positive" in compared and not {"large", NAN} & compared
    assert not compare(cases, lambda feed: saturated(feed, 3), "fp32").right


def test_nan_is_lost_on_one_side_of_two_inputs_alone() -> None:
    x, z = np.zeros((1, 6), np.float32), np.ones((1, 6), np.float32)
    feed = dict(edge_inputs([CheckedInput(name, DataType.FP32, (1, 6)) for name in "xz"], {"x": x, "z": z}))[NAN]
    assert np.isnan(feed["x"]).tolist() != np.isnan(feed["z"]).tolist()
    case = Case(NAN, feed, {"y": np.maximum(feed["x"], feed["z"])}, {"y": 0.0})
    of_one_side = compare([case], lambda feed: {"y": np.where(feed["z"] > feed["x"], feed["z"], feed["x"])}, "fp32")
    assert not of_one_side.right


def test_a_half_precision_norm_that_overflows_is_wrong_in_its_own_file_alone() -> None:
    plain = {"x": np.array([[1, -2, 0.5]], np.float16)}
    large = dict(edge_inputs([CheckedInput("x", DataType.FP16, (1, 3))], plain))["large"]
    right = np.linalg.norm(large["x"].astype(np.float32), axis=1).astype(np.float16)
    assert np.isfinite(right).all()

    def overflowing(precision: str, file: str) -> bool:
        case = Case("large", large, {"y": right}, {"y": 0.0}, file)
        with np.errstate(over="ignore"):
            return compare([case], lambda feed: {"y": np.sqrt(np.square(feed["x"]).sum(axis=1))}, precision).right

    assert not overflowing("fp32", "fp16")
    assert overflowing("fp16", "fp32")


@pytest.mark.parametrize("datatype", [DataType.UINT16, DataType.UINT32, DataType.UINT64])
def test_integers_that_are_taken_for_signed_ones(datatype: DataType) -> None:
    kind = datatype.numpy_dtype
    inputs, plain = [CheckedInput("x", datatype, (2, 3))], {"x": np.arange(6).reshape(2, 3).astype(kind)}
    cases = [Case(name, feed, feed, {"x": 0.0}) for name, feed in edge_inputs(inputs, plain)]

    def signed(feed: Mapping[str, Array]) -> Mapping[str, Array]:
        return {"x": np.maximum(feed["x"].view(kind.name.removeprefix("u")), 0).astype(kind)}

    assert compare(cases, dict, "fp32").right
    assert compare(cases, signed, "fp32").case == "high bits"


def test_a_length_gets_no_high_bits() -> None:
    """Two billion elements would fill the memory."""
    lengths = CheckedInput("lengths", DataType.UINT32, (2,))
    assert "high bits" not in dict(edge_inputs([lengths], {"lengths": np.array([3, 4], np.uint32)}))
