"""What the guide says of a day that is simulated: of measured numbers, and as the simulation has it now."""

from __future__ import annotations

import re

import pytest
from support.migraphx import CHECKOUT

from benchmarks import scale


def test_a_replica_does_what_was_measured() -> None:
    results = (CHECKOUT / "benchmarks/results/gpu.md").read_text()
    measured = re.findall(r"1 instance, (\d+) in flight \(another day\) \| ([\d,]+) \| \S+ \| ([\d.]+) ", results)
    in_flight, rates, latencies = zip(*measured, strict=True)
    assert tuple(map(float, in_flight)) == scale.IN_FLIGHT[1:4]
    rates = [float(rate.replace(",", "")) for rate in rates]
    assert rates[-1] == scale.CAPACITY
    assert [rate / scale.CAPACITY for rate in rates] == pytest.approx(scale.BUSY[1:4])
    assert [round(float(latency), 1) for latency in latencies] == list(scale.LATENCY_MS[1:4])
    assert f"{scale.CAPACITY:,.0f}\na second" in (CHECKOUT / "docs/guides/scale.md").read_text()


@pytest.mark.long
def test_the_guides_table_is_what_the_simulation_prints() -> None:
    table = (CHECKOUT / "docs/guides/scale.md").read_text().partition("| scaled by |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]
    assert len(rows) == 11
    policies = {policy.name: policy for policy in scale.POLICIES}
    said, found, name = [], [], ""
    for scaled_by, target, *outcomes in rows:
        name = scaled_by or name
        value = float(re.sub(r"[^\d.]", "", target.partition(" ")[0]))
        if name == "a number that stays":
            numbers = [scale.fixed(round(value), 1000)]
        else:
            policy = policies[name]
            value = value / 100 if "%" in target else value
            numbers = [scale.mean_outcome(policy, value, 1000, start) for start in scale.STARTS]
        said.append([outcome for outcome in outcomes if outcome])
        found.append([f"{100 * late:.2f} %, {over:.2f}" for late, over in numbers])
    assert said == found
