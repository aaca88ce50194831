"""LogSettings: what the log shows, and in which form, asked and changed while the server runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from rocserve.core.errors import invalid_argument, unimplemented
from rocserve.observability.logs import ServerLog
from rocserve.protocol import grpc_service_pb2 as pb

_Value = Any
"""A LogSettingsRequest.SettingValue."""

_FORMATS = ("default", "ISO8601")
_LARGEST_LEVEL = (1 << 31) - 1


class LogControlService:
    """Safe on any thread."""

    def __init__(self, log: ServerLog) -> None:
        self._log = log

    def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Change the settings that are named, then report all. As with Triton those before a fault have been
        changed, in the order of the fields here.

        Raises:
            ServeError: UNIMPLEMENTED for the log file, INVALID_ARGUMENT for a value of the wrong kind.
        """
        if "log_file" in request.settings:
            raise unimplemented("log file location can not be updated through network protocol")
        for name, (field, read) in _SETTINGS.items():
            if name in request.settings:
                self._log.change(**{field: read(name, request.settings[name])})
        return self._answer()

    def _answer(self) -> pb.LogSettingsResponse:
        settings = self._log.settings
        answer = pb.LogSettingsResponse()
        answer.settings["log_file"].string_param = str(settings.file or "")
        answer.settings["log_info"].bool_param = settings.info
        answer.settings["log_warning"].bool_param = settings.warning
        answer.settings["log_error"].bool_param = settings.error
        answer.settings["log_verbose_level"].uint32_param = settings.verbose
        answer.settings["log_format"].string_param = settings.format
        return answer


def _switch(name: str, value: _Value) -> bool:
    return bool(_given(value, "bool_param", f"expect boolean for '{name}'"))


def _level(name: str, value: _Value) -> int:
    level = int(_given(value, "uint32_param", f"expect int32 for '{name}'"))
    # Beyond an int32 it is negative to Triton, and that is none.
    return level if level <= _LARGEST_LEVEL else 0


def _format(name: str, value: _Value) -> str:
    text = str(_given(value, "string_param", f"expect string for '{name}'"))
    if text not in _FORMATS:
        raise invalid_argument(f"invalid argument for {name}, got: {text}")
    return text


def _given(value: _Value, kind: str, fault: str) -> Any:
    if value.WhichOneof("parameter_choice") != kind:
        raise invalid_argument(fault)
    return getattr(value, kind)


_SETTINGS: Mapping[str, tuple[str, Callable[[str, _Value], object]]] = {
    "log_info": ("info", _switch),
    "log_warning": ("warning", _switch),
    "log_error": ("error", _switch),
    "log_verbose_level": ("verbose", _level),
    "log_format": ("format", _format),
}
"""In the order in which Triton takes them: the field of LogSettings, and how its value is read."""
