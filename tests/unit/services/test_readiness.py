"""Readiness with models that say themselves whether they are ready."""

from __future__ import annotations

from typing import cast

import pytest

from rocserve.core.serving import ReadinessCheck, ServedModel, ServedVersion, ServingTable, ServingTableHolder
from rocserve.services.readiness import Readiness, Ready


class Version:
    def __init__(self, own_check: ReadinessCheck | None) -> None:
        self.own_check = own_check


async def says_yes() -> bool:
    return True


async def says_no() -> bool:
    return False


def readiness(asks_models: bool = True, repository_is_ready: bool = True, **checks: ReadinessCheck | None) -> Readiness:
    tables, versions = ServingTableHolder(), {name: cast(ServedVersion, Version(one)) for name, one in checks.items()}
    tables.table = ServingTable({name: ServedModel(name, {1: one}, one) for name, one in versions.items()})
    return Readiness(tables, lambda: repository_is_ready, asks_models)


async def value(ready: Ready) -> bool:
    return ready if isinstance(ready, bool) else await ready


async def test_a_models_own_word_counts_for_it_and_for_the_server() -> None:
    both = readiness(up=says_yes, down=says_no, silent=None)
    assert await value(both.of_model("up"))
    assert not await value(both.of_model("down", "1"))
    assert both.of_model("silent") is True
    assert not await value(both.of_server())
    assert await value(readiness(up=says_yes, silent=None).of_server())


@pytest.mark.parametrize("name", ["missing", "up"])
async def test_what_is_not_served_is_not_asked(name: str) -> None:
    asked = readiness(up=says_yes)
    assert asked.of_model(name, "9") is False
    asked.is_exiting = True
    assert asked.of_model(name) is False
    assert asked.of_server() is False


async def test_without_strict_readiness_no_model_is_asked() -> None:
    assert readiness(asks_models=False, down=says_no).of_server() is True
    assert readiness(repository_is_ready=False, up=says_yes).of_server() is False
