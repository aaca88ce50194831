"""From a command line to the server's settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rocserve.backends.registry import discover_backends
from rocserve.cache.directory import cache_directory
from rocserve.core.remote_places import RemotePlace
from rocserve.flags.flag import Flag, FlagError
from rocserve.flags.front_ends import CONNECTIONS, GRPC, HTTP, TLS
from rocserve.flags.observing import LOG, METRICS, TRACE
from rocserve.flags.serving import ENGINES, REPOSITORY, SERVER, WORKERS
from rocserve.flags.tls import check_tls
from rocserve.flags.unserved import UNSERVED, WITHOUT_EFFECT, refuse_unserved
from rocserve.flags.values import boolean, readiness_rule, repository
from rocserve.observability.tracing.options import trace_options
from rocserve.repository.single_model import find_single_model, model_endings
from rocserve.settings import (
    CacheSettings,
    ControlMode,
    GrpcSettings,
    HttpSettings,
    LogSettings,
    MetricsSettings,
    ResidencySettings,
    RestrictedProtocols,
    ServerSettings,
    TimeLimits,
    TraceSettings,
    WorkerSettings,
    engine_settings,
)

FLAG_GROUPS: tuple[tuple[str, tuple[Flag, ...]], ...] = (
    ("model repository", REPOSITORY),
    ("server", SERVER),
    ("engines", ENGINES),
    ("workers", WORKERS),
    ("HTTP", HTTP),
    ("gRPC", GRPC),
    ("TLS", TLS),
    ("connections", CONNECTIONS),
    ("metrics", METRICS),
    ("traces", TRACE),
    ("log", LOG),
)
FLAGS: tuple[Flag, ...] = tuple(flag for _, group in FLAG_GROUPS for flag in group)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        type=repository,
        metavar="WHAT",
        help="a model's file (.onnx, .mxr, .pb, .graphdef, .pt2, .pt, pipeline .json, model.py), the folder that holds"
        " it, a model folder, or a repository of models, also by its URL (s3://, gs://, as://, hf://, https://)",
    )
    for title, flags in FLAG_GROUPS:
        group = parser.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag)
    for subject in UNSERVED:
        for name in (subject.switch, *subject.flags):
            if name:
                parser.add_argument(f"--{name}", dest=f"unserved.{name}", action="append", help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT:
        parser.add_argument(f"--{name}", dest=f"ignored.{name}", action="append", help=argparse.SUPPRESS)


def _add_flag(parser: argparse._ArgumentGroup, flag: Flag) -> None:
    names = [f"--{name}" for name in (flag.name, *flag.aliases)]
    # "nargs=?" lets a switch stand without "=true", as tritonserver allows.
    switch = flag.parse in (boolean, readiness_rule)
    parser.add_argument(
        *names,
        dest=flag.target,
        type=flag.parse,
        choices=flag.choices or None,
        action="append" if flag.repeatable else "store",
        nargs="?" if switch else None,
        const=flag.parse("true") if switch else None,
        default=None,
        metavar=flag.shown_value,
        help=flag.help,
    )


def settings_from(arguments: argparse.Namespace) -> ServerSettings:
    """The settings that parsed arguments describe.

    Raises:
        FlagError: a flag's subject is not served, flags contradict each other, or a needed one is missing.
    """
    settings = _settings(arguments)
    _check(settings)
    return settings


def settings_again(words: Sequence[str]) -> ServerSettings:
    """The settings of a command line that has been found good before: what it names may have gone since."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    return _settings(parser.parse_args(words))


def _settings(arguments: argparse.Namespace) -> ServerSettings:
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    refuse_unserved({name.removeprefix("unserved."): value for name, value in given.items() if "unserved." in name})
    fields = {flag.target: _frozen(given[flag.target]) for flag in FLAGS if flag.target in given}
    what = given.get("what")
    if what is None and not fields.get("model_repositories"):
        raise FlagError(
            "name what to serve: a model's file, its folder, or a repository of models (or --model-repository=FOLDER)"
        )
    if what is not None:
        if "model_repositories" in fields:
            raise FlagError(f"'{what}' and --model-repository both say what to serve; leave one of them out")
        if isinstance(what, RemotePlace):
            fields["model_repositories"] = (what,)
        else:
            fields |= {"what": what, "model_repositories": (what if what.is_dir() else what.absolute().parent,)}
    if "metrics.config" in fields:
        fields["metrics.config"] = dict(fields["metrics.config"])
    if "control_mode" in fields:
        fields["control_mode"] = ControlMode(fields["control_mode"])
    cache = _cache(fields.pop("cache", ()))
    engines = replace(engine_settings(), **_part(fields, "engines."))
    places = [_with_home(place, cache_directory(engines)) for place in fields["model_repositories"]]
    fields["remote_repositories"] = tuple(place for place in places if isinstance(place, RemotePlace))
    fields["model_repositories"] = tuple(place.root if isinstance(place, RemotePlace) else place for place in places)
    return ServerSettings(
        **{name: value for name, value in fields.items() if "." not in name},
        http=HttpSettings(**_part(fields, "http.")),
        grpc=GrpcSettings(**_part(fields, "grpc.")),
        metrics=MetricsSettings(**_part(fields, "metrics.")),
        residency=ResidencySettings(**_part(fields, "residency.")),
        trace=TraceSettings(**_part(fields, "trace.")),
        log=LogSettings(**_part(fields, "log.")),
        limits=TimeLimits(**_part(fields, "limits.")),
        workers=_workers(_part(fields, "workers.")),
        engines=engines,
        cache=cache,
    )


def _with_home(place: Path | RemotePlace, cache: Path) -> Path | RemotePlace:
    return replace(place, home=place.home_in(cache)) if isinstance(place, RemotePlace) else place


def _frozen(value: Any) -> Any:
    """Repeatable flags give lists."""
    return tuple(value) if isinstance(value, list) else value


def _part(fields: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


def _workers(given: dict[str, Any]) -> WorkerSettings:
    variables = [pair for pairs in given.pop("environment", ()) for pair in pairs]
    return WorkerSettings(**given, environment=tuple(variables))


def _cache(values: Sequence[tuple[str, str, str]]) -> CacheSettings:
    if not values:
        return CacheSettings()
    for name, setting, value in values:
        if name != "local":
            raise FlagError(
                f"--cache-config={name},{setting}={value}: there is only the cache 'local'; write local,size=BYTES"
            )
        if setting != "size" or not value.isdecimal():
            raise FlagError(f"--cache-config=local,{setting}={value}: expected local,size=BYTES")
    return CacheSettings("local", int(values[-1][2]))


def _check(settings: ServerSettings) -> None:
    if settings.load_models and settings.control_mode is not ControlMode.EXPLICIT:
        raise FlagError("--load-model needs --model-control-mode=explicit")
    if settings.allow_remote_models and not settings.allow_remote_files:
        raise FlagError("--allow-remote-models needs --allow-remote-files: the files of such a model are the request's")
    _check_what(settings)
    if settings.exit_on_error:
        copies = {place.root for place in settings.remote_repositories}
        _check_repositories([folder for folder in settings.model_repositories if folder not in copies])
    for folder in settings.worker_load_folders:
        if not folder.is_dir():
            raise FlagError(f"--allow-worker-load={folder}: there is no such folder")
    if not settings.grpc.allow and not settings.http.allow:
        raise FlagError("--allow-grpc=false and --allow-http=false leave nothing to serve; allow one of them")
    _check_restricted("--http-restricted-api", "api", settings.http.restricted)
    _check_restricted("--grpc-restricted-protocol", "protocol", settings.grpc.restricted)
    check_tls(settings)
    try:
        trace_options(settings.trace.values)
    except ValueError as error:
        raise FlagError(f"--trace-config: {error}") from None


def _check_what(settings: ServerSettings) -> None:
    what = settings.what
    of_one_model = {
        "--model-name": settings.model_name,
        "--preprocess": settings.preprocess,
        "--labels": settings.labels,
    }
    flag = next((flag for flag, value in of_one_model.items() if value), "")
    if what is None:
        if flag:
            raise FlagError(f"{flag} is for one model: rocserve serve MODEL {flag}={of_one_model[flag]}")
        return
    if settings.labels and not settings.labels.is_file():
        raise FlagError(f"--labels={settings.labels}: there is no such file")
    if settings.exit_on_error and not what.exists():
        raise FlagError(f"there is no file or folder '{what}'")
    registry = discover_backends()
    endings = model_endings(registry)
    if not what.is_dir() and not what.name.lower().endswith(endings):
        raise FlagError(f"'{what}' is no model file by its ending; expected {', '.join(endings)}, or a folder")
    try:
        single = find_single_model(what, settings.model_name, registry)
    except OSError as error:
        raise FlagError(f"'{what}' cannot be read: {error.strerror}") from None
    if single is None and flag:
        raise FlagError(f"{flag} is for one model; '{what}' is a repository, whose models say it in their folders")
    if single is not None and settings.control_mode is ControlMode.EXPLICIT:
        raise FlagError(f"'{what}' is one model, and is served; --model-control-mode=explicit is for repositories")


def _check_repositories(folders: Sequence[Path]) -> None:
    for folder in folders:
        if not folder.is_dir():
            raise FlagError(
                f"--model-repository={folder}: there is no such folder; with --exit-on-error=false the server waits"
                " for it"
            )


def _check_restricted(flag: str, kind: str, groups: Sequence[RestrictedProtocols]) -> None:
    seen: set[str] = set()
    for protocol in (protocol for group in groups for protocol in group.protocols):
        if protocol in seen:
            raise FlagError(f"{flag}: restricted {kind} '{protocol}' can not be specified in multiple config groups")
        seen.add(protocol)
    for group in groups:
        if group.file is not None and not group.file.is_file():
            raise FlagError(f"{flag}: there is no file {group.file}, which is to hold the value of '{group.header}'")
