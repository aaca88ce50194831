"""LogSettings, and the parameters of load and unload requests: accepted values, and Triton's words for the others."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from rocserve.core.errors import ServeError, StatusCode
from rocserve.observability.logs import ROOT, ServerLog
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.repository.model_repository import ModelRepository
from rocserve.services.control import log_settings, repository_methods
from rocserve.settings import LogSettings

Value = bool | int | str | None
Service = Callable[[str, Message], Awaitable[object]]
"""Takes a method's name and its request."""


class Control:
    """The service, with plain values."""

    def __init__(self, log: ServerLog) -> None:
        self._log = log

    def ask(self, **settings: Value) -> dict[str, Value]:
        request = pb.LogSettingsRequest()
        for name, value in settings.items():
            entry = request.settings[name]
            if value is not None:
                kinds = {bool: "bool_param", int: "uint32_param", str: "string_param"}
                setattr(entry, kinds[type(value)], value)
        answer = log_settings(self._log, request)
        return {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in answer.settings.items()}


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    logger = logging.getLogger(ROOT)
    before = (logger.level, logger.propagate, logger.handlers)
    log = ServerLog(LogSettings(file=tmp_path / "log"))
    yield Control(log)
    log.close()
    logger.setLevel(before[0])
    logger.propagate, logger.handlers = before[1:]


def at_start(folder: Path) -> dict[str, Value]:
    return {
        "log_file": str(folder / "log"),
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }


def test_what_is_taken(control: Control, tmp_path: Path) -> None:
    changed: dict[str, Value] = {
        "log_info": False,
        "log_warning": False,
        "log_error": False,
        "log_verbose_level": 2,
        "log_format": "ISO8601",
    }
    assert control.ask(**changed, nothing="x") == at_start(tmp_path) | changed
    assert control.ask(log_verbose_level=3_000_000_000)["log_verbose_level"] == 0


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("log_warning", 1, "expect boolean for 'log_warning'"),
        ("log_error", None, "expect boolean for 'log_error'"),
        ("log_format", True, "expect string for 'log_format'"),
        ("log_format", "iso", "invalid argument for log_format, got: iso"),
    ],
)
def test_what_is_refused(control: Control, name: str, value: Value, text: str) -> None:
    with pytest.raises(ServeError) as raised:
        control.ask(**{name: value})
    assert (raised.value.code, raised.value.text) == (StatusCode.INVALID_ARGUMENT, text)


def test_the_file_stays_what_it_is(control: Control) -> None:
    with pytest.raises(ServeError) as raised:
        control.ask(log_file="elsewhere", log_info=False)
    text = "log file location can not be updated through network protocol"
    assert (raised.value.code, raised.value.text) == (StatusCode.UNIMPLEMENTED, text)
    assert control.ask()["log_info"] is True


def test_what_stands_before_a_fault_has_been_changed(control: Control) -> None:
    with pytest.raises(ServeError):
        control.ask(log_format="bad", log_warning=False)
    assert control.ask()["log_warning"] is False


class NotingRepository:
    """Records its requests."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def load(self, name: str, parameters: Mapping[str, bool | int | str | bytes]) -> None:
        self.calls.append(("load", name, dict(parameters)))

    async def unload(self, name: str, unload_dependents: bool, version: int | None = None) -> None:
        self.calls.append(("unload", name, unload_dependents))


@pytest.fixture
def repository() -> NotingRepository:
    return NotingRepository()


@pytest.fixture
def service(repository: NotingRepository) -> Service:
    methods = repository_methods(cast(ModelRepository, repository))
    return lambda name, request: methods[name].answer(request)


async def test_parameters_of_a_load(service: Service, repository: NotingRepository) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = "{}"
    request.parameters["file:1/x"].bytes_param = b"x"
    await service("RepositoryModelLoad", request)
    assert repository.calls == [("load", "m", {"config": "{}", "file:1/x": b"x"})]


@pytest.mark.parametrize("value", [True, False])
async def test_unload_dependents(service: Service, repository: NotingRepository, value: bool) -> None:
    request = pb.RepositoryModelUnloadRequest(model_name="m")
    request.parameters["unload_dependents"].bool_param = value
    await service("RepositoryModelUnload", request)
    await service("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name="m"))
    assert repository.calls == [("unload", "m", value), ("unload", "m", False)]


async def test_an_unknown_parameter_of_an_unload_is_refused(service: Service, repository: NotingRepository) -> None:
    """A misspelt version would unload all versions."""
    request = pb.RepositoryModelUnloadRequest(model_name="m")
    request.parameters["verson"].int64_param = 1
    with pytest.raises(ServeError, match="unrecognized unload parameter 'verson'"):
        await service("RepositoryModelUnload", request)
    assert repository.calls == []


def test_json_is_written_until_the_server_ends(tmp_path: Path, control: Control) -> None:
    """What reads the log reads all of it. The fixture `control` restores the logger."""
    log = ServerLog(LogSettings(file=tmp_path / "json", format="json"))
    own = Control(log)
    assert own.ask(log_format="json", log_verbose_level=1)["log_format"] == "json"
    for value in ("default", "ISO8601"):
        with pytest.raises(ServeError) as refused:
            own.ask(log_format=value)
        text = f"log_format is 'json' until the server ends, got: {value}; start it with --log-format={value}"
        assert (refused.value.code, refused.value.text) == (StatusCode.INVALID_ARGUMENT, text)
    log.close()
    with pytest.raises(ServeError, match="invalid argument for log_format, got: json"):
        control.ask(log_format="json")
