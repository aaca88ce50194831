"""The settings of traces and of the log, between JSON and messages."""

from __future__ import annotations

from typing import Any

from rocserve.frontends.http.json_values import array, boolean, text, unsigned
from rocserve.protocol import grpc_service_pb2 as pb

_TRACE_TEXTS = ("trace_rate", "trace_count", "log_frequency")
_LOG_FLAGS = ("log_info", "log_warning", "log_error")
_TRACE_ORDER = ("trace_level", "trace_rate", "trace_count", "log_frequency", "trace_file", "trace_mode")
_LOG_ORDER = ("log_file", "log_info", "log_warning", "log_error", "log_verbose_level", "log_format")


def trace_settings(model_name: str, value: Any) -> pb.TraceSettingRequest:
    """A setting that is null is cleared, which gRPC says by none of its values; unknown ones are passed over."""
    message = pb.TraceSettingRequest(model_name=model_name)
    given = value if isinstance(value, dict) else {}
    for name in ("trace_file", "trace_level", *_TRACE_TEXTS):
        if name not in given:
            continue
        entry = given[name]
        # Reading a missing key of a map of messages makes the entry.
        values = message.settings[name].value
        if name == "trace_file":
            values.append(entry if isinstance(entry, str) else "")
        elif entry is not None:
            values.extend([text(level) for level in array(entry)] if name == "trace_level" else [text(entry)])
    return message


def told_trace_settings(response: pb.TraceSettingResponse) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for name in _ordered(_TRACE_ORDER, response.settings):
        values = list(response.settings[name].value)
        told[name] = values if name == "trace_level" else "".join(values[:1])
    return told


def log_settings(value: Any) -> pb.LogSettingsRequest:
    """Settings that are null stay as they are; unknown ones are passed over."""
    message = pb.LogSettingsRequest()
    given = value if isinstance(value, dict) else {}
    for name in _LOG_ORDER:
        entry = given.get(name)
        if entry is None:
            continue
        setting = message.settings[name]
        if name in _LOG_FLAGS:
            setting.bool_param = boolean(entry)
        elif name == "log_verbose_level":
            setting.uint32_param = unsigned(entry) & 0xFFFF_FFFF
        else:
            setting.string_param = text(entry)
    return message


def told_log_settings(response: pb.LogSettingsResponse) -> dict[str, Any]:
    settings = response.settings
    names = _ordered(_LOG_ORDER, settings)
    return {
        name: getattr(settings[name], settings[name].WhichOneof("parameter_choice") or "string_param") for name in names
    }


def _ordered(first: tuple[str, ...], found: Any) -> list[str]:
    """The names that are there, those in `first` in that order."""
    return [name for name in first if name in found] + sorted(name for name in found if name not in first)
