"""What operators do on the page: the token, what is done, and that each act is an event with its address."""

from __future__ import annotations

import logging
from typing import Any, cast

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.observability.logs import ServerLog
from rocserve.protocol import page_pb2
from rocserve.repository.model_repository import ModelRepository
from rocserve.repository.table import RepositoryEvents
from rocserve.services.page_acts import PageActService
from rocserve.settings import ControlMode, LogSettings
from rocserve.workers.recent_lines import RecentLines


class Repository:
    def __init__(self) -> None:
        self.events = RepositoryEvents()
        self.calls: list[tuple[str, str]] = []

    async def reload(self, name: str) -> None:
        self.calls.append(("reload", name))

    async def unload(self, name: str, unload_dependents: bool) -> None:
        assert not unload_dependents
        self.calls.append(("unload", name))


class ServerParts:
    def __init__(self) -> None:
        self.repository, self.lines = Repository(), RecentLines()
        self.log: Any = ServerLog.__new__(ServerLog)
        self.log.settings = LogSettings()
        self.log.change = lambda verbose: setattr(self.log, "settings", LogSettings(verbose=verbose))
        self.service = PageActService(
            cast(ModelRepository, self.repository),
            self.log,
            self.lines,
            ControlMode.EXPLICIT,
            logging.getLogger("test"),
        )

    @property
    def token(self) -> str:
        return self.service.acts(page_pb2.ActsRequest()).token

    async def act(self, act: str, name: str = "m", token: str | None = None, level: int = 0) -> page_pb2.ActResponse:
        token = self.token if token is None else token
        return await self.service.act(
            page_pb2.ActRequest(token=token, act=act, name=name, level=level, address="10.1.2.3")
        )


async def test_each_act_is_an_event_with_its_address() -> None:
    server = ServerParts()
    server.lines.add("m", "WARNING", "first")
    server.lines.add("other", "INFO", "not m's")
    server.lines.add("m", "INFO", "<b>second")
    await server.act("reload")
    await server.act("unload")
    found = await server.act("log")
    await server.act("verbosity", name="", level=1)
    assert server.repository.calls == [("reload", "m"), ("unload", "m")]
    assert [(line.level, line.text) for line in found.lines] == [("WARNING", "first"), ("INFO", "<b>second")]
    assert server.service.acts(page_pb2.ActsRequest()).log_verbose_level == 1
    events = await server.repository.events.after(0, 0.0)
    assert [(event.act, event.name, event.address) for event in events] == [
        ("reload", "m", "10.1.2.3"),
        ("unload", "m", "10.1.2.3"),
        ("read the log of", "m", "10.1.2.3"),
        ("log verbosity 1", "", "10.1.2.3"),
    ]


@pytest.mark.parametrize("token", ["", "wrong", "é"])
async def test_a_wrong_token(token: str) -> None:
    server = ServerParts()
    assert len(server.token) >= 32
    assert server.token != ServerParts().token
    with pytest.raises(ServeError) as caught:
        await server.act("reload", token=token)
    assert caught.value.code is StatusCode.PERMISSION_DENIED
    assert server.repository.calls == []
    assert list(await server.repository.events.after(0, 0.0)) == []


async def test_what_is_no_act_or_no_level() -> None:
    server = ServerParts()
    for act, level in (("format", 0), ("verbosity", 10), ("verbosity", -1)):
        with pytest.raises(ServeError):
            await server.act(act, level=level)
    assert server.repository.calls == []
