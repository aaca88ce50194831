"""The table of what was answered in time."""

from __future__ import annotations

from benchmarks.deadline_clients import Answers
from benchmarks.overload import MODELS, Goodput, goodput_table


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
