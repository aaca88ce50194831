"""The table of answers in time, and the guide's simulated day: its measured numbers, and the simulation's results
now."""

from __future__ import annotations

import re

import pytest
from support.migraphx import CHECKOUT

from benchmarks import scale
from benchmarks.cases import Case, Quantity, Target, add_sub_cases, identity_cases
from benchmarks.comparison import Comparison, compare, round_order
from benchmarks.deadline_clients import Answers
from benchmarks.overload import MODELS, Goodput, goodput_table
from benchmarks.ratios import Measurement, Spread, ratio
from benchmarks.table import (
    IDLE_SHARE_LIMIT,
    added_time_table,
    cpu_table,
    idle_note,
    latency_table,
    markdown_table,
    rate_table,
    ratio_cells,
)


def rounds(*rates: float, p50: float | None = 0.001) -> list[Measurement]:
    return [Measurement(rate, p50, p50) for rate in rates]


def test_rates_are_paired_round_by_round() -> None:
    # The machine was half as fast in the last round, for both: medians alone would give 150 / 110.
    assert ratio(Quantity.RATE, rounds(150, 300, 75), rounds(100, 110, 50)) == Spread(1.5, 1.5, 300 / 110)


def test_a_shorter_latency_is_a_ratio_above_one() -> None:
    ours = [Measurement(1, p50=0.001), Measurement(1, p50=0.002)]
    peer = [Measurement(1, p50=0.002), Measurement(1, p50=0.002)]
    assert ratio(Quantity.P50, ours, peer) == Spread(1.5, 1.0, 2.0)


def test_no_latency_ratio_where_one_side_times_no_requests() -> None:
    assert ratio(Quantity.P50, rounds(1, 2), rounds(1, 2, p50=None)) is None


def test_less_cpu_time_is_a_ratio_above_one() -> None:
    ours, peer = [Measurement(1, cpu=100e-6)], [Measurement(1, cpu=150e-6)]
    assert ratio(Quantity.CPU, ours, peer) == Spread(pytest.approx(1.5), pytest.approx(1.5), pytest.approx(1.5))
    # Shorter than the clock's tick: no ratio, and no division by zero.
    assert ratio(Quantity.CPU, [Measurement(1, cpu=0.0)], peer) is None


def test_cpu_times_are_shown_in_microseconds() -> None:
    measurements = {"rocserve": [Measurement(1, cpu=100e-6)], "triton": [Measurement(1, cpu=150e-6)]}
    row = cpu_table([Comparison(add_sub_cases("add_sub")[0], measurements, {})], "rocserve").splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")][1:] == ["100", "triton", "150", "1.50", "1.50 to 1.50"]


def test_cpu_time_is_taken_from_the_contender_that_is_measured() -> None:
    class Worker:
        """Uses 2 ms of CPU time a request while it is measured, and 0.5 s while others are."""

        def __init__(self, name: str, idle: float) -> None:
            self.name = name
            self._cpu = 0.0
            self._idle = idle

        def prepare(self, case: Case) -> None: ...

        def measure(self, case: Case, seconds: float) -> Measurement:
            self._cpu += 2e-3 * 100 * seconds
            return Measurement(rate=100 * case.units_per_request)

        def cpu_seconds(self) -> float:
            self._cpu += self._idle
            return self._cpu

    lines: list[str] = []
    contenders = [Worker("calm", 0.0), Worker("restless", 0.5)]
    comparison = compare(identity_cases()[0], contenders, rounds=2, seconds=3.0, report=lines.append)
    assert [one.cpu for one in comparison.measurements["calm"]] == pytest.approx([2e-3, 2e-3])
    assert comparison.idle_share["calm"] == 0.0
    assert comparison.idle_share["restless"] > IDLE_SHARE_LIMIT
    assert len(lines) == 4


def test_unequal_rounds_are_an_error() -> None:
    with pytest.raises(ValueError, match="argument"):
        ratio(Quantity.RATE, rounds(1, 2), rounds(1))


def test_a_target_is_held_from_its_value_on() -> None:
    case = next(case for case in add_sub_cases("add_sub") if case.targets == (Target(Quantity.RATE, "triton", 1.4),))
    assert ratio_cells(case, Quantity.RATE, "triton", Spread(1.4, 1.2, 1.5)) == ["1.40", "1.20 to 1.50", "1.40: held"]
    assert ratio_cells(case, Quantity.RATE, "triton", Spread(1.39, 1.2, 1.5))[2] == "1.40: missed"
    assert ratio_cells(case, Quantity.RATE, "bare", Spread(1.39, 1.2, 1.5))[2] == "-"
    assert ratio_cells(case, Quantity.P50, "triton", Spread(1.39, 1.2, 1.5))[2] == "-"


def test_the_table_has_medians_and_each_peer() -> None:
    case = add_sub_cases("add_sub")[2]
    measurements = {
        "rocserve": rounds(2000, 3000, 1000),
        "triton": rounds(1000, 1000, 1000),
        "bare": rounds(4000, 6000, 2000),
    }
    lines = rate_table([Comparison(case, measurements, {})], "rocserve").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert cells == [
        [case.title, "requests/s", "2,000", "triton", "1,000", "2.00", "1.00 to 3.00", "1.40: held"],
        [case.title, "requests/s", "2,000", "bare", "4,000", "0.50", "0.50 to 0.50", "-"],
    ]


def test_a_contender_alone_has_a_row_too() -> None:
    comparison = Comparison(add_sub_cases("add_sub")[0], {"rocserve": rounds(2000)}, {})
    row = rate_table([comparison], "rocserve").splitlines()[2]
    assert "2,000" in row


def test_a_latency_is_shown_beside_a_peer_that_has_none() -> None:
    comparison = Comparison(add_sub_cases("add_sub")[0], {"rocserve": rounds(1), "bare": rounds(2, p50=None)}, {})
    row = latency_table([comparison], "rocserve").splitlines()[2]
    assert [cell.strip() for cell in row.strip("|").split("|")][1:5] == ["1.000", "1.000", "-", "-"]


def test_the_table_shows_in_microseconds_what_serving_adds() -> None:
    measurements = {"rocserve": rounds(1000, 2000, 500), "bare": rounds(2000, 10_000, 1000)}
    row = added_time_table([Comparison(add_sub_cases("add_sub")[0], measurements, {})], "rocserve").splitlines()[2]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    assert cells == ["1,000", "500", "500", "400 to 1,000"]


def test_columns_line_up() -> None:
    lines = markdown_table(["a", "long header"], [["longer cell", "b"]]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert len(lines) == 3


def test_a_note_names_a_contender_that_was_busy_while_idle() -> None:
    case = add_sub_cases("add_sub")[0]
    calm = Comparison(case, {}, {"triton": IDLE_SHARE_LIMIT})
    busy = Comparison(case, {}, {"triton": IDLE_SHARE_LIMIT * 2})
    assert "doubtful" not in idle_note([calm])
    assert "doubtful" in idle_note([calm, busy])
    assert "triton 10.0%" in idle_note([busy, calm])


def test_every_contender_begins_a_round() -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    contenders = [Named("a"), Named("b"), Named("c")]
    orders = ["".join(one.name for one in round_order(contenders, index)) for index in range(4)]  # type: ignore[arg-type]
    assert orders == ["abc", "bca", "cab", "abc"]


def test_goodput_is_beside_the_peak_of_the_same_server_and_model():
    single, batched = MODELS
    results = [
        Goodput(single, 0.9, "rocserve", 2.0, [Answers(sent=200, in_time=160), Answers(sent=220, in_time=200)]),
        Goodput(single, 4.0, "rocserve", 2.0, [Answers(sent=800, in_time=90), Answers(sent=800, in_time=90)]),
        Goodput(single, 4.0, "triton", 2.0, [Answers(sent=800, in_time=10, p50_ms=12.0)]),
        Goodput(batched, 4.0, "rocserve", 2.0, [Answers(sent=800)]),
    ]
    cells = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in goodput_table(results).splitlines()
        if line.startswith("| ")
    ][2:]
    assert [row[1:6] for row in cells] == [
        ["0.9", "rocserve", "105.0", "90.0", "1.00"],
        ["4", "rocserve", "400.0", "45.0", "0.50"],
        ["4", "triton", "400.0", "5.0", "1.00"],
        ["4", "rocserve", "400.0", "0.0", "-"],
    ]
    assert cells[2][6] == "12.0"


def test_a_replica_does_what_was_measured() -> None:
    results = (CHECKOUT / "benchmarks/results/gpu.md").read_text()
    measured = re.findall(r"1 instance, (\d+) in flight \(another day\) \| ([\d,]+) \| \S+ \| ([\d.]+) ", results)
    in_flight, rates, latencies = zip(*measured, strict=True)
    assert tuple(map(float, in_flight)) == scale.IN_FLIGHT[1:4]
    rates = [float(rate.replace(",", "")) for rate in rates]
    assert rates[-1] == scale.CAPACITY
    assert [rate / scale.CAPACITY for rate in rates] == pytest.approx(scale.BUSY[1:4])
    assert [round(float(latency), 1) for latency in latencies] == list(scale.LATENCY_MS[1:4])
    page = (CHECKOUT / "docs/guides/scale.md").read_text()
    assert f"{scale.CAPACITY:,.0f} a second" in " ".join(page.split())


@pytest.mark.long
def test_the_table_is_what_the_simulation_prints() -> None:
    table = (CHECKOUT / "benchmarks/results/scale.md").read_text().partition("| scaled by |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert len(rows) == 11
    policies = {policy.name: policy for policy in scale.POLICIES}
    # A row of each way to scale: the simulation of one is half a second.
    text, found = [], []
    for name, target, *outcomes in (row for row in rows if row[0]):
        value = float(re.sub(r"[^\d.]", "", target.partition(" ")[0]))
        if name == "a fixed number":
            numbers = [scale.fixed(round(value), 1000)]
        else:
            policy = policies[name]
            value = value / 100 if "%" in target else value
            numbers = [scale.mean_outcome(policy, value, 1000, start) for start in scale.STARTS]
        text.append([outcome for outcome in outcomes if outcome])
        found.append([f"{100 * late:.2f} %, {over:.2f}" for late, over in numbers])
    assert text == found
