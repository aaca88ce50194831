"""Changes a running server for clients: its models, the requests that are traced, the log."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial

from rocserve.core.errors import ServeError, invalid_argument, unimplemented
from rocserve.core.serving import ServingTableHolder
from rocserve.core.trace import TraceLevel
from rocserve.observability.logs import ServerLog
from rocserve.observability.tracing.tracing import Tracing
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.repository.content import UNLOAD_DEPENDENTS, VERSION, parse_version, wrong_type
from rocserve.repository.model_repository import ModelRepository
from rocserve.services.methods import Method


def repository_methods(repository: ModelRepository) -> Mapping[str, Method]:
    """Return the methods that load and unload models, on the event loop because loads take long. They raise ServeError
    with Triton's texts."""
    return {
        "RepositoryModelLoad": Method(pb.RepositoryModelLoadRequest, partial(_load, repository), is_slow=True),
        "RepositoryModelUnload": Method(pb.RepositoryModelUnloadRequest, partial(_unload, repository), is_slow=True),
    }


async def _load(repository: ModelRepository, request: pb.RepositoryModelLoadRequest) -> pb.RepositoryModelLoadResponse:
    refuse_repository_name(request.repository_name)
    parameters: dict[str, bool | int | str | bytes] = {}
    for name, parameter in request.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise wrong_type(name, "string_param")
        parameters[name] = getattr(parameter, choice)
    await repository.load(request.model_name, parameters)
    return pb.RepositoryModelLoadResponse()


async def _unload(
    repository: ModelRepository, request: pb.RepositoryModelUnloadRequest
) -> pb.RepositoryModelUnloadResponse:
    refuse_repository_name(request.repository_name)
    for name in request.parameters:
        if name not in (UNLOAD_DEPENDENTS, VERSION):
            raise invalid_argument(f"unrecognized unload parameter '{name}'.")
    with_dependents = False
    if UNLOAD_DEPENDENTS in request.parameters:
        parameter = request.parameters[UNLOAD_DEPENDENTS]
        if parameter.WhichOneof("parameter_choice") != "bool_param":
            raise invalid_argument(f"invalid value type for '{UNLOAD_DEPENDENTS}' parameter, expected bool_param.")
        with_dependents = parameter.bool_param
    version = None
    if VERSION in request.parameters:
        parameter = request.parameters[VERSION]
        version = parse_version(getattr(parameter, parameter.WhichOneof("parameter_choice") or "", b""))
        if with_dependents:
            raise invalid_argument(f"'{UNLOAD_DEPENDENTS}' applies to a whole model; remove it or 'version'")
    await repository.unload(request.model_name, with_dependents, version)
    return pb.RepositoryModelUnloadResponse()


def refuse_repository_name(name: str) -> None:
    """Raise ServeError (UNIMPLEMENTED) if a request names a repository."""
    if name:
        raise unimplemented("'repository_name' specification is not supported")


_NUMBER = re.compile(r"\s*([+-]?)0*([0-9]+)")
"""A number as C++ parses it: any text may follow."""


def trace_setting(
    tracing: Tracing, tables: ServingTableHolder, request: pb.TraceSettingRequest
) -> pb.TraceSettingResponse:
    """Change the named settings, then report all, on the data plane's thread. A setting without a value is reset: for
    one model to the setting of all models, for all models to the value at the server's start. Raises ServeError:
    INVALID_ARGUMENT for a model that is not ready or an invalid value; UNIMPLEMENTED for the trace file."""
    name = request.model_name
    if name:
        try:
            tables.table.find(name, "")
        except ServeError:
            raise invalid_argument(f"Request for unknown model : {name}") from None
    if request.settings:
        tracing.change(name, _change({key: list(value.value) for key, value in request.settings.items()}))
    options, values = tracing.options, tracing.values_of(name)
    answer = pb.TraceSettingResponse()
    levels = [part.name or "" for part in TraceLevel if values.level & part]
    answer.settings["trace_level"].value.extend(levels or ["OFF"])
    answer.settings["trace_rate"].value.append(str(values.rate))
    answer.settings["trace_count"].value.append(str(values.count))
    if options.mode == "triton":
        answer.settings["log_frequency"].value.append(str(values.log_frequency))
        answer.settings["trace_file"].value.append(options.file)
    answer.settings["trace_mode"].value.append(options.mode)
    for key, value in options.shown:
        answer.settings[key].value.append(value)
    return answer


def _change(settings: Mapping[str, Sequence[str]]) -> dict[str, int | None]:
    """Return field -> new value (None = reset). As in Triton, unknown settings and levels are ignored. Raises as
    `trace_setting`."""
    if "trace_file" in settings:
        raise unimplemented("trace file location can not be updated through network protocol")
    change: dict[str, int | None] = {}
    if "trace_level" in settings:
        names = settings["trace_level"]
        if "OFF" in names and len(names) > 1:
            raise invalid_argument("Expect only one trace level 'OFF' is specified")
        known = [TraceLevel[name] for name in names if name in TraceLevel.__members__]
        if known or not names:
            change["level"] = TraceLevel.of(known) if known else None
    # Setting -> (field of TraceValues, least value, largest value).
    numbers = {
        "trace_rate": ("rate", 0, (1 << 32) - 1),
        "trace_count": ("count", -1, (1 << 31) - 1),
        "log_frequency": ("log_frequency", 0, (1 << 32) - 1),
    }
    for name, (field, least, most) in numbers.items():
        if name not in settings:
            continue
        values = settings[name]
        if not values:
            change[field] = None
            continue
        if len(values) > 1:
            raise invalid_argument(f"expect only 1 value for '{name}'")
        unable, got = f"Unable to parse '{name}'", f"got: {values[0]}"
        found = _NUMBER.match(values[0])
        if found is None:
            raise invalid_argument(f"{unable}, {got}")
        # A number of 11 digits is out of range. Python refuses to parse thousands of digits.
        number = int(found[1] + found[2][:11])
        if not -(1 << 31) <= number < 1 << 31:
            raise invalid_argument(f"{unable}, value is out of range [ {least}, {most} ], {got}")
        if number < least < 0:
            raise invalid_argument(f"{unable}. Expecting value >= {least}, {got}")
        # To Triton a negative rate or frequency is a very large one.
        change[field] = number if least < 0 else number % (most + 1)
    return change


def log_settings(log: ServerLog, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
    """Change the named settings, then report all, on any thread. As in Triton, settings before an invalid one stay
    changed, in the order below. Raises ServeError: UNIMPLEMENTED for the log file, INVALID_ARGUMENT for a
    value of the wrong type."""
    if "log_file" in request.settings:
        raise unimplemented("log file location can not be updated through network protocol")
    # Setting -> (field of LogSettings, field of the message, the type's name in errors), in Triton's order.
    settings = {
        "log_info": ("info", "bool_param", "boolean"),
        "log_warning": ("warning", "bool_param", "boolean"),
        "log_error": ("error", "bool_param", "boolean"),
        "log_verbose_level": ("verbose", "uint32_param", "int32"),
        "log_format": ("format", "string_param", "string"),
    }
    for name, (field, kind, expected) in settings.items():
        if name not in request.settings:
            continue
        setting = request.settings[name]
        if setting.WhichOneof("parameter_choice") != kind:
            raise invalid_argument(f"expect {expected} for '{name}'")
        value = getattr(setting, kind)
        # To Triton a larger level is a negative int32, which means level 0.
        if field == "verbose" and value > (1 << 31) - 1:
            value = 0
        if field == "format":
            _check_format(log.settings.format, value)
        log.change(**{field: value})
    answer = pb.LogSettingsResponse()
    answer.settings["log_file"].string_param = str(log.settings.file or "")
    for name, (field, kind, _) in settings.items():
        setattr(answer.settings[name], kind, getattr(log.settings, field))
    return answer


def _check_format(current: str, value: str) -> None:
    """Raises ServeError (INVALID_ARGUMENT). A log is JSON from its beginning to its end: its reader reads all of
    it."""
    if value == current:
        return
    formats = ("default", "ISO8601")
    if value not in formats:
        raise invalid_argument(f"invalid argument for log_format, got: {value}")
    if current not in formats:
        raise invalid_argument(
            f"log_format is '{current}' until the server ends, got: {value}; start it with --log-format={value}"
        )
