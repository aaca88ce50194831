"""How inputs are found for a model of which only names, types and shapes are known."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from support.load_check import unhurried

from rocserve.core.datatypes import DataType
from rocserve.load_check.budget import Budget, OutOfTime, Trials
from rocserve.load_check.facts import NO_FACTS, GraphFacts
from rocserve.load_check.input_search import Found, NoInputs, find_inputs, refusal_of
from rocserve.load_check.made_inputs import InputMaker, Recipe
from rocserve.load_check.tensors import ROWS, Array, CheckedInput, Feed, Run


def found(run: Run, *inputs: CheckedInput, facts: GraphFacts = NO_FACTS, samples: tuple[Feed, ...] = ()) -> Found:
    trials = Trials(run, unhurried())
    return find_inputs(trials, trials.run, InputMaker(inputs, facts, 0, samples))


def of_size(sizes: Mapping[str, int], name: str, dimension: int = 1) -> Run:
    """An engine that takes an input only if a dimension has one of the sizes."""

    def run(feed: Feed) -> Feed:
        if feed[name].shape[dimension] not in sizes.values():
            raise RuntimeError("wrong size")
        return {"y": feed[name].astype(np.float64).sum(keepdims=True)}

    return run


@pytest.mark.parametrize("size", [7, 16, 128, 1024, 16000, 1])
def test_climbs_to_the_length_of_a_signal(size: int) -> None:
    x = CheckedInput("x", DataType.FP32, (ROWS, "samples"))
    assert found(of_size({"x": size}, "x"), x).recipe.sizes == {"samples": size}


@pytest.mark.parametrize("size", [64, 48, 224, 640])
def test_climbs_to_the_sides_of_an_image(size: int) -> None:
    x = CheckedInput("x", DataType.FP32, (ROWS, 3, "height", ""))
    assert found(of_size({"x": size}, "x", 3), x).recipe.sizes["x[3]"] == size


def test_equal_names_are_one_size_and_sums_follow() -> None:
    shapes: list[tuple[int, ...]] = []

    def run(feed: Feed) -> Feed:
        shapes.append(feed["mask"].shape)
        assert feed["mask"].shape[1] == feed["past"].shape[1] + 2
        return {"y": feed["past"]}

    found(
        run,
        CheckedInput("past", DataType.FP32, (ROWS, "past")),
        CheckedInput("mask", DataType.INT64, (ROWS, "past + 2")),
    )
    assert shapes[0] == (1, 9)


def test_a_batch_elsewhere_is_small() -> None:
    state = CheckedInput("state", DataType.FP32, (2, "batch_size", 4))
    assert found(lambda feed: {"y": feed["state"]}, state).recipe.sizes == {"batch_size": 1}


def test_uses_the_known_end_of_indices_at_once() -> None:
    seen: list[Array] = []

    def run(feed: Feed) -> Feed:
        seen.append(feed["ids"])
        return {"y": feed["ids"].astype(np.float32)}

    ids = CheckedInput("ids", DataType.INT64, (ROWS, 500))
    result = found(run, ids, facts=GraphFacts(ends={"ids": 300}))
    assert result.recipe.ends == {"ids": 300}
    assert len(seen) == 3
    assert max(values.max() for values in seen) in range(280, 300)
    assert min(values.min() for values in seen) == 1


@pytest.mark.parametrize(("end", "expected"), [(2, 2), (6, 5), (70, 60), (10**6, 30000)])
def test_raises_an_unknown_end_while_the_model_takes_it(end: int, expected: int) -> None:
    table = np.random.default_rng(0).standard_normal(min(end, 40000))

    def run(feed: Feed) -> Feed:
        return {"y": table[feed["ids"]]}

    result = found(run, CheckedInput("ids", DataType.INT32, (ROWS, 50)))
    assert result.recipe.ends == {"ids": expected}


def test_an_end_counts_wherever_the_model_looks() -> None:
    def run(feed: Feed) -> Feed:
        return {"y": np.arange(160.0)[feed["ids"][:, -1:]]}

    assert found(run, CheckedInput("ids", DataType.INT64, (ROWS, 7))).recipe.ends == {"ids": 60}


def test_an_integer_that_sets_a_size_stays_small() -> None:
    def run(feed: Feed) -> Feed:
        return {"y": np.arange(1, 2 + int(feed["n"].max()) * 10) * 1.0}

    result = found(run, CheckedInput("n", DataType.INT64, (ROWS,)))
    assert 2 <= result.recipe.ends["n"] <= 1000


@pytest.mark.parametrize(("datatype", "end"), [(DataType.INT8, 128), (DataType.UINT8, 256), (DataType.INT16, 30000)])
def test_stays_within_the_type(datatype: DataType, end: int) -> None:
    result = found(lambda feed: {"y": feed["x"] * 1.0}, CheckedInput("x", datatype, (ROWS, 9)))
    assert result.recipe.ends == {"x": end}


def test_the_least_value_of_an_integer_is_kept() -> None:
    def run(feed: Feed) -> Feed:
        assert feed["x"].min() >= 3
        return {"y": feed["x"] * 1.0}

    assert found(run, CheckedInput("x", DataType.INT64, (ROWS, 9), end=9, least=3)).recipe.ends == {"x": 9}


@pytest.mark.parametrize("shown", [0, 1])
def test_finds_out_what_a_mask_means(shown: int) -> None:
    def run(feed: Feed) -> Feed:
        return {"y": np.where(feed["mask"] == shown, feed["x"], 0)}

    x = CheckedInput("x", DataType.FP32, (ROWS, 5))
    assert found(run, x, CheckedInput("mask", DataType.INT64, (ROWS, 5))).recipe.mask == shown


def test_lengths_are_full() -> None:
    def run(feed: Feed) -> Feed:
        if feed["lengths"].max() > feed["x"].shape[1]:
            raise RuntimeError("too long")
        return {"y": feed["x"] * (np.arange(feed["x"].shape[1]) < feed["lengths"][:, None])}

    x = CheckedInput("x", DataType.FP32, (ROWS, "time"))
    result = found(run, x, CheckedInput("lengths", DataType.INT64, (ROWS,)))
    assert result.recipe.full_lengths
    assert result.quality > 1


@pytest.mark.parametrize(
    ("floats", "answer"),
    [
        ("whole", lambda x: np.where((x == x.round()) & (x >= 0), x, 0)),
        ("unit", lambda x: np.where((x >= 0).all() and (x < 1).all(), x, 0)),
    ],
)
def test_tries_floats_of_other_kinds(floats: str, answer: Run) -> None:
    x = CheckedInput("x", DataType.FP32, (ROWS, 20))
    result = found(lambda feed: {"y": answer(feed["x"])}, x)  # type: ignore[arg-type]
    assert result.recipe.floats == floats


def test_floats_of_trees_lie_near_their_thresholds() -> None:
    x = CheckedInput("x", DataType.FP32, (ROWS, 3))
    facts = GraphFacts(levels={"x": (1e6, 2e6)})
    result = found(lambda feed: {"y": (feed["x"] > 1.5e6) * 1.0}, x, facts=facts)
    assert result.recipe.floats == "levels"
    assert result.quality > 1


def test_says_why_nothing_runs() -> None:
    def refuse(feed: Feed) -> Feed:
        raise RuntimeError("no kernel")

    with pytest.raises(NoInputs, match="no kernel"):
        found(refuse, CheckedInput("x", DataType.FP32, (ROWS, 3)))
    with pytest.raises(NoInputs, match="its outputs are NaN"):
        found(lambda feed: {"y": feed["x"] * np.nan}, CheckedInput("x", DataType.FP32, (ROWS, 3)))


def test_tells_a_model_that_refuses_all_from_one_that_takes_zeros() -> None:
    def only_zeros(feed: Feed) -> Feed:
        if feed["x"].any() or feed["text"][0, 0] != "0":
            raise RuntimeError("too large")
        return {"y": feed["x"]}

    def refuse(feed: Feed) -> Feed:
        raise RuntimeError("no kernel")

    inputs = CheckedInput("x", DataType.FP32, (ROWS, 3)), CheckedInput("text", DataType.BYTES, (ROWS, 1))
    for run, refusal in ((only_zeros, ""), (refuse, "no kernel")):
        with pytest.raises(NoInputs) as none:
            found(run, *inputs)
        assert none.value.refusal == refusal
        assert refusal_of(run, inputs, Budget(math.inf)) == refusal


def test_sizes_that_would_fill_the_memory_are_not_tried() -> None:
    largest = 0

    def run(feed: Feed) -> Feed:
        nonlocal largest
        largest = max(largest, feed["x"].size)
        if feed["x"].shape[1:] != (16, 576):
            raise RuntimeError("wrong size")
        return {"y": feed["x"]}

    result = found(run, CheckedInput("x", DataType.FP32, (ROWS, "", "")))
    assert list(result.recipe.sizes.values()) == [16, 576]
    assert largest <= 1 << 24
    with pytest.raises(NoInputs, match=r"a row of input 'x' has the shape \[1, 99999, 99999\]"):
        found(run, CheckedInput("x", DataType.FP32, (ROWS, 99999, 99999)))


def test_ends_when_the_time_does() -> None:
    trials = Trials(lambda feed: {"y": feed["x"]}, Budget(0))
    maker = InputMaker([CheckedInput("x", DataType.FP32, (ROWS, 3))], NO_FACTS, 0)
    with pytest.raises(OutOfTime):
        find_inputs(trials, trials.run, maker)


def test_outputs_that_never_change_are_the_best_that_there_is() -> None:
    result = found(lambda feed: {"y": np.ones((1, 2))}, CheckedInput("x", DataType.FP32, (ROWS, 3)))
    assert (result.power, result.quality) == (0, 0)


@pytest.mark.parametrize("datatype", list(DataType))
def test_makes_every_datatype(datatype: DataType) -> None:
    given = CheckedInput("x", datatype, (ROWS, 6))
    maker = InputMaker([given], NO_FACTS, 3)
    recipe = Recipe(ends={"x": 9} if given.kind in "iu" else {})
    one, again, other = (maker.row(recipe, name)["x"] for name in "aab")
    assert one.shape == (1, 6)
    assert np.array_equal(one, again)
    assert not np.array_equal(one, other) or datatype is DataType.BOOL
    if datatype is not DataType.BF16:
        assert one.dtype == datatype.numpy_dtype
