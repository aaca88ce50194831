"""What is wrong in the folder: it is told, retried, and harms nothing that serves."""

from __future__ import annotations

import shutil

from rocserve.core.errors import ServeError

from .conftest import FakeLoader, Folders, Served, Start


async def test_a_typo_in_the_config_keeps_what_serves_and_is_told(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    served: Served = await start()
    folders.config("m", "max_bach_size: 8")
    await served.until(lambda: "max_bach_size" in served.reason("m"))
    assert served.state("m") == "READY"
    assert served.reason("m").startswith("newer content failed to load: ")
    assert "config.pbtxt" in served.reason("m")
    assert served.data("m") == "good"
    assert served.repository.is_ready()
    assert served.repository.failed_models() == {}
    folders.config("m")
    await served.until(lambda: served.rows("m") == {"1": ("READY", "")})
    assert loader.loads == [("m", 1)], "the config is what it was, so nothing need be loaded"


async def test_a_typo_in_the_config_of_a_new_model_is_told(start: Start, folders: Folders) -> None:
    served: Served = await start()
    folders.model("m", 1, more="max_bach_size: 8")
    await served.until(lambda: served.state("m", "") == "UNAVAILABLE")
    assert "max_bach_size" in served.reason("m", "")
    folders.config("m")
    await served.until(lambda: served.rows("m") == {"1": ("READY", "")})
    assert served.repository.is_ready()


async def test_a_broken_version_leaves_the_good_one_and_is_retried_when_its_files_change(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    served: Served = await start(retry_seconds=1000.0, longest_retry_seconds=1000.0)
    folders.version("m", 2, "broken")
    await served.until(lambda: served.state("m", "2") == "UNAVAILABLE")
    assert "cannot parse the model of version 2 (failed once, next try in 1000 s)" in served.reason("m", "2")
    assert served.data("m") == "good"
    assert served.data("m", "2") == "Request for unknown model: 'm' version 2 is not at ready state"
    assert served.repository.is_ready(), "what serves goes on, so nothing is unready"
    folders.version("m", 2, "repaired")
    await served.until(lambda: served.data("m") == "repaired")
    assert loader.loads == [("m", 1), ("m", 2), ("m", 2)]


async def test_a_broken_version_that_is_taken_away_again_leaves_no_trace(start: Start, folders: Folders) -> None:
    folders.model("m", 1)
    served: Served = await start()
    folder = folders.version("m", 2, "broken")
    await served.until(lambda: served.state("m", "2") == "UNAVAILABLE")
    shutil.rmtree(folder)
    await served.until(lambda: served.rows("m") == {"1": ("READY", "")})


async def test_a_served_version_overwritten_with_something_broken_goes_on_serving(
    start: Start, folders: Folders
) -> None:
    folders.model("m", 1)
    served: Served = await start()
    folders.version("m", 1, "broken")
    await served.until(lambda: "newer content failed to load: cannot parse" in served.reason("m"))
    assert served.state("m") == "READY"
    assert served.data("m") == "good"
    assert served.repository.is_ready()


async def test_failures_are_retried_later_and_later_with_the_reason(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    loader.failing["m"] = ServeError(14, "the device is lost")  # type: ignore[arg-type]
    served: Served = await start(retry_seconds=0.1)
    await served.until(lambda: len(loader.loads) >= 4)
    assert "the device is lost" in served.reason("m")
    await served.until(lambda: "times, next try in" in served.reason("m"))
    del loader.failing["m"]
    await served.until(lambda: served.state("m") == "READY")
    assert served.reason("m") == ""


async def test_an_exception_that_nobody_foresaw_is_a_failure_with_its_text(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.model("m", 1)
    loader.failing["m"] = ZeroDivisionError("oh")
    served: Served = await start()
    assert "ZeroDivisionError: oh" in served.reason("m")
