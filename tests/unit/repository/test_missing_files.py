"""Models that come without their files, which somebody may fetch later: never loaded, and no fault of the server's."""

from __future__ import annotations

from .conftest import Folders, Served, Start

COMMAND = 'parameters { key: "get_with" value: { string_value: "rocserve get m" } }'
REASON = "at least one version must be available under the version policy of model 'm'; get one with: rocserve get m"
MISSING = f"ensemble e contains models that are not available or ambiguous: m; m: {REASON}"


async def test_a_model_without_any_version_is_not_loaded_and_harms_nobody(start: Start, folders: Folders) -> None:
    folders.model("m", more=COMMAND)
    folders.model("other", 1)
    served: Served = await start()
    assert served.rows("m") == {"": ("", REASON)}
    assert served.repository.failed_models() == {}
    assert served.repository.is_ready()
    assert served.data("m") == "Request for unknown model: 'm' has no available versions"


async def test_it_is_served_when_its_version_comes(start: Start, folders: Folders) -> None:
    folders.model("m", more=COMMAND)
    served: Served = await start()
    folders.version("m", 1)
    await served.until(lambda: served.state("m", "1") == "READY")
    assert served.data("m") == "good"


async def test_an_ensemble_that_misses_only_such_models_harms_nobody_either(start: Start, folders: Folders) -> None:
    folders.model("m", more=COMMAND)
    folders.ensemble("e", "m")
    folders.ensemble("a_outer", "e")
    served: Served = await start()
    assert served.rows("e") == {"1": ("UNAVAILABLE", MISSING)}
    assert MISSING in served.reason("a_outer")
    assert served.repository.failed_models() == {}
    assert served.repository.is_ready()
    folders.version("m", 1)
    await served.until(lambda: served.state("e", "1") == "READY")


async def test_a_version_that_came_and_fails_is_told_and_harms_nobody_either(start: Start, folders: Folders) -> None:
    folders.model("m", more=COMMAND)
    folders.ensemble("e", "m")
    served: Served = await start()
    folders.version("m", 1, "broken")
    await served.until(lambda: served.state("m", "1") == "UNAVAILABLE")
    assert served.repository.is_ready()
    assert set(served.repository.failed_models()) == {"m", "e"}


async def test_a_policy_that_misses_the_versions_there_are_is_a_fault(start: Start, folders: Folders) -> None:
    folders.model("m", 1, more="version_policy { specific { versions: 9 } }")
    served: Served = await start()
    assert served.state("m", "") == "UNAVAILABLE"
    assert not served.repository.is_ready()


async def test_an_ensemble_that_misses_another_model_too_is_a_fault(start: Start, folders: Folders) -> None:
    folders.model("m", more=COMMAND)
    folders.ensemble("e", "m")
    folders.ensemble("f", "absent")
    served: Served = await start()
    assert set(served.repository.failed_models()) == {"f"}
    assert not served.repository.is_ready()
