"""The table of models that a start prints."""

from __future__ import annotations

import io

import pytest

from rocserve.core.serving import IndexEntry, ServingTable
from rocserve.start_table import print_table


def printed(*rows: IndexEntry) -> list[str]:
    file = io.StringIO()
    print_table(rows, ServingTable(), file)
    return file.getvalue().splitlines()


def row(number: int, state: str = "READY", reason: str = "") -> IndexEntry:
    return IndexEntry(f"m{number}", "1", state, reason)


def test_few_models_have_a_row_each() -> None:
    lines = printed(*(row(number) for number in range(30)))
    assert len(lines) == 30 + 2
    assert lines[0].split() == ["model", "version", "runs", "on", "inputs", "outputs", "state"]


@pytest.mark.parametrize("broken", [0, 2])
def test_of_many_models_those_that_need_attention_have_a_row(broken: int) -> None:
    rows = [row(number) for number in range(60)]
    failed = [row(100 + number, "UNAVAILABLE", f"reason {number}") for number in range(broken)]
    lines = printed(*rows, *failed)
    assert lines[0] == f"{60 + broken} versions of models, 60 READY; rocserve status lists them"
    names = [line.split()[0] for line in lines if "UNAVAILABLE" in line]
    assert names == [f"m{100 + number}" for number in range(broken)]
    assert [line for line in lines if "reason" in line] == [f"m{100 + n} 1: reason {n}" for n in range(broken)]


def test_a_folder_that_cannot_be_read_has_a_reason_without_a_version() -> None:
    assert "m: bad configuration" in printed(IndexEntry("m", "", "UNAVAILABLE", "bad configuration"))


def test_more_failures_than_a_screen_holds_are_cut() -> None:
    lines = printed(*(row(number, "UNAVAILABLE", "the reason") for number in range(500)))
    assert sum(line.endswith("UNAVAILABLE") for line in lines) == 30
