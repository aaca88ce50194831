"""The options of a check of rows beside the model: noise, fixed sizes, samples, time, and what it cannot decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from support.load_check import Loaded, load, model, normal, unhurried
from support.row_models import DEPENDENT, INDEPENDENT

from rocserve.core.datatypes import DataType
from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.rows import Independence, RowsVerdict, check_rows
from rocserve.load_check.tensors import ROWS, Array, CheckedInput, Feed, Run

_LINEAR = INDEPENDENT["linear"]
_NEED_MORE_RUNS = {
    "a row far behind, at the largest lag of a usual batch",
    "another branch above eight rows",
    "another sign with four rows",
    "another sign with two rows",
    "another sign with a number of rows that five divides",
    "another sign with 21 to 29 rows",
    "another sign unless all flags are set",
    "a number of rows that eight divides",
    "a row far behind",
    "cut at five times the mean of all",
    "missing values from other rows",
    "values below a limit from other rows",
}
"""What pairs of rows do not show, or more of them than slow models are given."""
X = CheckedInput("x", DataType.FP32, (ROWS, 4))


def checked(run: Run, *inputs: CheckedInput, **options: object) -> RowsVerdict:
    given = {"samples": (), "is_noisy": False, "fixed_rows": None, "budget": unhurried(), **options}
    return check_rows(
        run,
        inputs or (X,),
        ["y"],
        NO_FACTS,
        given["budget"],  # type: ignore[arg-type]
        0,
        samples=given["samples"],  # type: ignore[arg-type]
        is_noisy=bool(given["is_noisy"]),
        fixed_rows=given["fixed_rows"],  # type: ignore[arg-type]
    )


class Noisy:
    """An engine whose equal runs differ."""

    def __init__(self, size: float, coupling: float = 0.0) -> None:
        self._rng = np.random.default_rng(0)
        self._size = size
        self._coupling = coupling

    def run(self, feed: Feed) -> Feed:
        x = feed["x"]
        noise = self._rng.standard_normal(x.shape) * self._size
        return {"y": (x * (1 + noise) + self._coupling * np.tanh(np.nan_to_num(x)).mean()).astype(np.float32)}


def test_the_verdict_names_output_difference_and_neighbour() -> None:
    verdict = load(DEPENDENT["mean of rows"]()).check()
    assert verdict.output == "y"
    assert 0 < verdict.difference < 10
    shown = f"{verdict.difference:.2g}"
    assert shown in verdict.reason
    assert verdict.reason.startswith("rows depend on each other: output 'y' of a row ")


def test_texts_that_differ_are_not_so_far_apart() -> None:
    texts = model(
        "g (string[N] x) => (string[N] y) { f = Gather(x, zero) y = StringConcat(x, f) }", opset=20, zero=np.array([0])
    )
    assert load(texts).check().reason == "rows depend on each other: output 'y' of a row differs in a batch"


def test_lost_rows_are_named() -> None:
    verdict = load(DEPENDENT["time first in the output"]()).check()
    assert verdict.reason == "rows depend on each other: 1 row gives output 'y' of shape [7, 1, 4]"
    assert verdict.difference == np.inf


def test_what_the_file_decides_needs_no_run() -> None:
    verdict = load(DEPENDENT["scale of the whole batch"]()).check()
    assert verdict.reason == "rows depend on each other: DynamicQuantizeLinear takes one scale from all rows"
    assert verdict.runs == 0


@pytest.mark.parametrize("seed", range(3))
def test_equal_seeds_give_equal_inputs(seed: int) -> None:
    loaded = load(_LINEAR())

    def inputs() -> list[Array]:
        seen: list[Array] = []

        def run(feed: Feed) -> Mapping[str, Array]:
            seen.append(feed["x"])
            return loaded.run(feed)

        check_rows(run, loaded.inputs, loaded.outputs, loaded.facts, unhurried(), seed)
        return seen

    first, second = inputs(), inputs()
    assert len(first) == len(second) > 5
    assert all(np.array_equal(one, other, equal_nan=True) for one, other in zip(first, second, strict=True))


def test_a_seed_may_be_as_long_as_a_digest() -> None:
    assert load(_LINEAR()).check(seed=int("f" * 64, 16)).state is Independence.INDEPENDENT


def test_a_noisy_engine_is_independent_within_its_noise() -> None:
    assert checked(Noisy(1e-7).run, is_noisy=True).state is Independence.INDEPENDENT
    assert checked(Noisy(1e-5).run, is_noisy=True).state is Independence.INDEPENDENT


def test_a_noisy_engine_is_dependent_beyond_its_noise() -> None:
    assert checked(Noisy(1e-6, coupling=0.1).run, is_noisy=True).state is Independence.DEPENDENT


def test_random_outputs_are_undecided() -> None:
    verdict = load(model("g (float[N, 4] x) => (float[N, 4] y) { r = RandomNormalLike(x) y = Add(x, r) }")).check()
    assert verdict.state is Independence.UNDECIDED
    assert verdict.reason.startswith("not checked: equal runs differ by ")
    assert verdict.reason.endswith(" (RandomNormalLike); give warm-up samples or check.npz")


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
def test_an_engine_of_one_fixed_size(rows: int) -> None:
    def fixed(loaded: Loaded) -> Run:
        def run(feed: Feed) -> Feed:
            assert {len(values) for values in feed.values()} == {rows}
            return loaded.run(feed)

        return run

    for name in INDEPENDENT:
        loaded = load(INDEPENDENT[name]())
        verdict = check_rows(
            fixed(loaded), loaded.inputs, loaded.outputs, loaded.facts, unhurried(), 1, fixed_rows=rows
        )
        assert verdict.state is Independence.INDEPENDENT, (name, verdict.reason)
    for name in ("mean of rows", "softmax of rows", "time first in the output", "row number", "cumulative sum of rows"):
        loaded = load(DEPENDENT[name]())
        verdict = check_rows(
            fixed(loaded), loaded.inputs, loaded.outputs, loaded.facts, unhurried(), 1, fixed_rows=rows
        )
        assert verdict.state is Independence.DEPENDENT, name


def test_one_row_at_a_time_decides_nothing() -> None:
    verdict = checked(lambda feed: {"y": feed["x"]}, fixed_rows=1)
    assert verdict.state is Independence.UNDECIDED
    assert verdict.reason.startswith("not checked: the engine takes one row at a time")


@pytest.mark.parametrize(("largest", "state"), [(256, Independence.DEPENDENT), (64, Independence.INDEPENDENT)])
def test_the_largest_batch_that_is_configured_is_tried(largest: int, state: Independence) -> None:
    text = """g (float[N, 4] x) => (float[N, 4] y) {
        s = Shape(x) n = Gather(s, zero) c = Greater(n, k) other = Neg(x) y = Where(c, other, x) }"""
    loaded = load(model(text, zero=np.array(0), k=np.array(200)))
    assert loaded.check(largest_batch=largest).state is state


def test_an_engine_that_takes_no_input_is_undecided() -> None:
    def refuse(feed: Feed) -> Feed:
        raise RuntimeError("sizes do not fit")

    verdict = checked(refuse)
    assert verdict.state is Independence.UNDECIDED
    assert verdict.reason == (
        "not checked: the engine takes no made-up input (sizes do not fit); give warm-up samples or check.npz"
    )


@pytest.mark.parametrize("seed", range(5))
def test_ids_that_are_looked_up_at_one_place_stay_within_their_table(seed: int) -> None:
    table = normal(160, 4)

    def run(feed: Feed) -> Feed:
        return {"y": table[feed["ids"][:, -1]]}

    ids = CheckedInput("ids", DataType.INT64, (ROWS, "length"))
    verdict = check_rows(run, [ids], ["y"], NO_FACTS, unhurried(), seed)
    assert verdict.state is Independence.INDEPENDENT, verdict.reason


def test_a_batch_is_refused_for_its_rows_or_for_their_number() -> None:
    def only_one(feed: Feed) -> Feed:
        if len(feed["x"]) > 1:
            raise RuntimeError("one row, please")
        return {"y": feed["x"]}

    verdict = checked(only_one)
    assert verdict.reason == "rows depend on each other: the engine takes 1 row, but not 3 rows"


@pytest.mark.parametrize(
    ("known", "reason"), [(3, "the engine refuses made-up rows"), (4, "no batch of other rows runs")]
)
def test_rows_that_are_refused_decide_nothing(known: int, reason: str) -> None:
    first: list[Array] = []

    def run(feed: Feed) -> Feed:
        if len(first) < known:
            first.extend(feed["x"])
        if not all(any(np.array_equal(row, one) for one in first) for row in feed["x"]):
            raise RuntimeError("another row")
        return {"y": feed["x"]}

    verdict = checked(run)
    assert verdict.state is Independence.UNDECIDED
    assert verdict.reason == f"not checked: {reason} (another row); give warm-up samples or check.npz"


def test_samples_tell_what_made_up_inputs_do_not_meet() -> None:
    # Only lengths that are a multiple of 37, and codes above 1000, run.
    def run(feed: Feed) -> Feed:
        codes = feed["codes"]
        if codes.shape[1] % 37 or codes.min() < 1000:
            raise RuntimeError("no such code")
        return {"y": np.tanh(codes / 2000).sum(axis=1, dtype=np.float32)}

    codes = CheckedInput("codes", DataType.INT64, (ROWS, "length"))
    assert checked(run, codes).state is Independence.UNDECIDED
    sample = {"codes": np.arange(1000, 1074).reshape(1, 74)}
    assert checked(run, codes, samples=[sample]).state is Independence.INDEPENDENT

    def coupled(feed: Feed) -> Feed:
        answer = run(feed)["y"]
        return {"y": answer - answer.mean()}

    assert checked(coupled, codes, samples=[sample]).state is Independence.DEPENDENT


def test_samples_of_several_rows_and_other_lengths() -> None:
    lengths: set[int] = set()

    def run(feed: Feed) -> Feed:
        lengths.add(feed["x"].shape[1])
        return {"y": feed["x"].sum(axis=1)}

    open_length = CheckedInput("x", DataType.FP32, (ROWS, ""))
    samples = [{"x": normal(3, 5)}, {"x": normal(2, 6)}, {"other": normal(1)}]
    assert checked(run, open_length, samples=samples).state is Independence.INDEPENDENT
    assert lengths == {5}


def test_the_time_bounds_the_check() -> None:
    now = 0.0

    def clock() -> float:
        return now

    def slow(feed: Feed) -> Feed:
        nonlocal now
        now += 1.0 * len(feed["x"])
        return {"y": feed["x"]}

    verdict = checked(slow, budget=Budget(10, clock))
    assert verdict.state is Independence.UNDECIDED
    assert verdict.reason == "not checked: 10 s are too few where a row takes 1 s; raise --load-check-seconds"
    assert now <= 10


class Slow:
    """An engine that takes a tenth of a second for a row, by the test's clock."""

    def __init__(self, loaded: Loaded) -> None:
        self.now = 0.0
        self.sizes: set[int] = set()
        self._loaded = loaded

    def run(self, feed: Feed) -> Feed:
        rows = len(next(iter(feed.values())))
        self.now += 0.1 * rows
        self.sizes.add(rows)
        return self._loaded.run(feed)

    def check(self, seed: int) -> RowsVerdict:
        loaded, budget = self._loaded, Budget(10, lambda: self.now)
        return check_rows(self.run, loaded.inputs, loaded.outputs, loaded.facts, budget, seed)


@pytest.mark.parametrize("name", INDEPENDENT)
def test_pairs_suffice_for_slow_models_with_independent_rows(name: str) -> None:
    slow = Slow(load(INDEPENDENT[name]()))
    assert slow.check(1).state is Independence.INDEPENDENT
    assert slow.sizes == {1, 2}


@pytest.mark.parametrize("name", sorted(DEPENDENT.keys() - _NEED_MORE_RUNS))
def test_pairs_suffice_for_slow_models_with_dependent_rows(name: str) -> None:
    assert Slow(load(DEPENDENT[name]())).check(1).state is Independence.DEPENDENT


def checked_slowly(run: Run) -> RowsVerdict:
    """Check a function that takes a tenth of a second for a row."""
    now = 0.0

    def slow(feed: Feed) -> Feed:
        nonlocal now
        now += 0.1 * len(feed["x"])
        return run(feed)

    return checked(slow, budget=Budget(10, lambda: now))


@pytest.mark.parametrize("check", [checked, checked_slowly])
def test_no_batch_runs_twice(check: Callable[[Run], RowsVerdict]) -> None:
    batches: list[bytes] = []

    def run(feed: Feed) -> Feed:
        if len(feed["x"]) > 1:
            batches.append(feed["x"].tobytes())
        return {"y": feed["x"] * 2}

    assert check(run).state is Independence.INDEPENDENT
    assert len(set(batches)) == len(batches) > 4


def test_an_engine_that_refuses_quiet_rows_gets_others() -> None:
    def run(feed: Feed) -> Feed:
        if (np.abs(feed["x"]).max(axis=1) < 0.01).any():
            raise ValueError("too quiet")
        return {"y": feed["x"] * 2}

    assert checked_slowly(run).state is Independence.INDEPENDENT


@pytest.mark.parametrize("lowest", [-0.5, -0.1, -0.01])
def test_pairs_show_a_branch_for_batches_without_low_values(lowest: float) -> None:
    def run(feed: Feed) -> Feed:
        return {"y": feed["x"] * (2 if feed["x"].min() > lowest else 3)}

    verdict = checked_slowly(run)
    assert verdict.state is Independence.DEPENDENT
    assert verdict.reason.endswith("with its neighbours (zeros)")


def test_pairs_share_inputs_without_rows() -> None:
    classes = model(
        "g (float[N, 4] x, float[4] shift) => (int64[N] y) { s = Sub(x, shift) y = ArgMax<axis = 1, keepdims = 0>(s) }"
    )
    assert Slow(load(classes)).check(1).state is Independence.INDEPENDENT


def test_inputs_without_rows_are_one_for_the_whole_batch() -> None:
    seen: list[Feed] = []

    def run(feed: Feed) -> Feed:
        seen.append(feed)
        return {"y": feed["x"] * feed["scale"]}

    scale = CheckedInput("scale", DataType.FP32, ())
    assert checked(run, X, scale).state is Independence.INDEPENDENT
    assert {feed["scale"].shape for feed in seen} == {()}


def test_bf16_inputs_are_bits() -> None:
    def run(feed: Feed) -> Feed:
        assert feed["x"].dtype == np.uint16
        x = (feed["x"].astype(np.uint32) << 16).view(np.float32)
        return {"y": x - x.mean(axis=0)}

    assert checked(run, CheckedInput("x", DataType.BF16, (ROWS, 4))).state is Independence.DEPENDENT


def test_an_inner_tensor_may_lose_rows_but_an_output_may_not() -> None:
    text = """g (float[N, 4] x) => (int64[N] y) {
        m = MatMul(x, w) f = Reshape(m, flat) s = Reshape(f, shape) y = ArgMax<axis = 1, keepdims = 0>(s) }"""
    loaded = load(model(text, w=normal(4, 3), flat=np.array([-1]), shape=np.array([-1, 3])))
    loaded.facts = type(loaded.facts)(exposed=("s",))
    assert loaded.check().state is Independence.INDEPENDENT


def test_a_machine_that_stops_at_times_makes_no_model_slow() -> None:
    """All runs but a few of each size are stopped: what the model itself takes decides how many rows are tried."""
    loaded, now, runs = load(DEPENDENT["a row far behind"]()), 0.0, 0

    def run(feed: Feed) -> Feed:
        nonlocal now, runs
        now, runs = now + (0.05 if runs % 3 else 1e-4), runs + 1
        return loaded.run(feed)

    budget = Budget(60, lambda: now)
    assert check_rows(run, loaded.inputs, loaded.outputs, loaded.facts, budget, 1).state is Independence.DEPENDENT
