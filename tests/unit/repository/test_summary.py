"""The line that says how the start has ended."""

from __future__ import annotations

from rocserve.core.serving import IndexEntry
from rocserve.repository.model_repository import outcomes, summary

COMMAND = "`rocserve status --url=localhost:9001`"


def test_all_are_served() -> None:
    assert summary([IndexEntry("a", "1", "READY")], COMMAND) == "1 model served"
    # The second row is a version that was replaced, the third a folder that nobody has asked for.
    rows = [
        IndexEntry("a", "2", "READY"),
        IndexEntry("a", "1", "UNAVAILABLE", "unloaded"),
        IndexEntry("b", "1", "READY", "newer content is being loaded"),
        IndexEntry("c"),
    ]
    assert summary(rows, COMMAND) == "2 models served"


def test_some_are_not() -> None:
    rows = [
        IndexEntry("b", "1", "UNAVAILABLE", "Invalid argument: no file"),
        IndexEntry("a", "", "", "at least one version must be available"),
        IndexEntry("c", "1", "READY"),
        IndexEntry("c", "2", "UNAVAILABLE", "Internal: it failed"),
    ]
    assert summary(rows, COMMAND) == "1 model served, not served: a, b; `rocserve status --url=localhost:9001` says why"
    assert summary([], COMMAND) == "0 models served"
    assert outcomes(rows) == {"a": False, "b": False, "c": True}
