"""When the repository counts as ready: a failed drop never takes readiness from the clients of served models. And the
line that reports how the start ended."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rocserve.core.serving import IndexEntry
from rocserve.frontends.metrics.collection import repository_families
from rocserve.frontends.metrics.exposition import exposition
from rocserve.repository.model_repository import outcomes, summary
from rocserve.settings import ControlMode, ReadinessRule

from .conftest import FakeLoader, Folders, Served, Start

NOT_SERVED = (
    "the new model 'bad' is not served{reason}; the server stays ready for the others. {remedy}, or move its folder"
    " out of the repository (--strict-readiness=always makes the server unready)"
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


async def test_a_new_model_that_fails_leaves_the_server_ready_and_is_logged_once(
    start: Start, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    folders.model("good", 1)
    served: Served = await start(retry_seconds=0.05, longest_retry_seconds=0.05)
    folders.model("bad", 1, data="broken")
    await served.until(lambda: "failed 3 times" in served.reason("bad"))
    assert served.repository.is_ready()
    remedy = "The server tries again; if its files are the reason, correct them"
    assert warnings(caplog) == [NOT_SERVED.format(reason="", remedy=remedy)]
    assert "cannot parse the model of version 1" in caplog.text


async def test_a_new_model_whose_files_must_be_corrected_says_so(
    served: Served, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    folders.model("bad", 1, more="nonsense")
    await served.until(lambda: "not tried again until its files change" in served.reason("bad", ""))
    remedy = "Correct its files (the server then loads it without a restart)"
    assert warnings(caplog) == [NOT_SERVED.format(reason="", remedy=remedy)]


async def test_a_new_ensemble_that_does_not_fit_is_logged_with_the_reason(
    served: Served, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    folders.ensemble("bad", "missing")
    await served.until(lambda: bool(warnings(caplog)))
    reason = ": ensemble bad contains models that are not available or ambiguous: missing"
    remedy = "Correct the ensemble or its members (the server then loads it without a restart)"
    # They come together, however long it takes to write and see them.
    with served.unsettled() as debounce:
        folders.ensemble("later", "m")
        folders.model("m", 1)
        await served.until(lambda: {"later", "m"} <= debounce.unsettled)
    await served.until(lambda: served.state("later") == "READY")
    await served.settle()
    assert warnings(caplog) == [NOT_SERVED.format(reason=reason, remedy=remedy)]


async def test_a_model_that_has_served_counts_until_it_is_taken_away(
    served: Served, folders: Folders, loader: FakeLoader
) -> None:
    folder = folders.model("m", 1)
    await served.until(lambda: served.state("m") == "READY")
    loader.loaded[0].available = False
    loader.loaded[0].on_change()
    await served.until(lambda: not served.repository.is_ready())
    (folder / "config.pbtxt").unlink()
    (folder / "1" / "model.onnx").unlink()
    (folder / "1").rmdir()
    folder.rmdir()
    await served.until(served.repository.is_ready)
    folders.model("m", 1, data="broken")
    await served.until(lambda: served.state("m") == "UNAVAILABLE" and "cannot parse" in served.reason("m"))
    assert served.repository.is_ready(), "what was taken away is new when it comes back"


async def test_what_fails_at_the_start_counts_until_it_serves(start: Start, folders: Folders) -> None:
    folders.model("m", 1, data="broken")
    served: Served = await start()
    folders.model("bad", 1, data="broken")
    await served.until(lambda: served.state("bad") == "UNAVAILABLE")
    assert not served.repository.is_ready()
    folders.version("m", 1)
    await served.until(served.repository.is_ready)
    assert served.state("m") == "READY"


async def test_what_was_not_there_at_the_start_counts_until_it_comes_or_is_taken_away(
    start: Start, folders: Folders
) -> None:
    served: Served = await start(control_mode=ControlMode.EXPLICIT, load_models=("late", "never"))
    repository = served.repository
    assert (repository.is_ready(), sorted(repository.failed_models())) == (False, ["late", "never"])
    folders.model("late", 1)
    await repository.load("late", {})
    assert (repository.is_ready(), sorted(repository.failed_models())) == (False, ["never"])
    reviews: list[bool] = []
    repository.subscribe(lambda: reviews.append(repository.is_ready()))
    await repository.unload("never", False)
    assert (reviews, repository.failed_models()) == ([True], {})


async def test_by_tritons_rule_every_version_counts(start: Start, folders: Folders) -> None:
    folders.model("m", 1)
    served: Served = await start(readiness=ReadinessRule.ALWAYS)
    assert served.repository.is_ready()
    folders.version("m", 2, data="broken")
    await served.until(lambda: served.state("m", "2") == "UNAVAILABLE")
    assert not served.repository.is_ready()
    folders.version("m", 2)
    await served.until(lambda: served.rows("m") == {"1": ("UNAVAILABLE", "unloaded"), "2": ("READY", "")})
    assert served.repository.is_ready()


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
    assert outcomes(rows) == {("a", ""): False, ("b", ""): False, ("c", ""): True}


async def test_models_of_one_name_are_counted_and_shown_by_their_namespaces(
    start: Start, folders: Folders, tmp_path: Path
) -> None:
    folders.model("m", 1)
    other = Folders(tmp_path / "other")
    other.model("m", 1, data="broken")
    (other.root / "empty").mkdir()
    served: Served = await start(folders.root, other.root, model_namespacing=True)
    rows = served.repository.index(ready_only=False)
    empty = ("empty", str(other.root))
    assert outcomes(rows) == {("m", str(folders.root)): True, ("m", str(other.root)): False, empty: False}
    assert summary(rows, COMMAND).startswith("1 model served, not served: empty, m; ")
    metrics = exposition(repository_families(rows))
    assert f'rocserve_model_served{{model="m",namespace="{other.root}"}} 0\n' in metrics
    assert f'rocserve_model_served{{model="m",namespace="{folders.root}"}} 1\n' in metrics
