"""The flags of `rocserve serve`: tritonserver's names, and a few of our own.

A flag of tritonserver whose subject this version does not serve is refused with a message, unless it switches its
subject off; it is never ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rocserve.repository.settings import ControlMode
from rocserve.settings import GrpcSettings, LogSettings, MetricsSettings, ServerSettings, engine_settings


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "on"):
        return True
    if text.lower() in ("false", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got '{text}'")


def _folder(text: str) -> str:
    """Absolute, as workers and their children are told of it."""
    return str(Path(text).expanduser().absolute())


def at_least(minimum: float, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of numbers from `minimum` on, for argparse."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got '{text}'") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum:g}, got '{text}'")
        return value

    return parse


_COUNT = at_least(0, int)
_POSITIVE = at_least(1, int)
_SECONDS = at_least(0, float)
_MILLISECONDS = at_least(0, int)
_POSITIVE_MILLISECONDS = at_least(1, int)

_SHOWN_VALUES: dict[Callable[[str], Any], str] = {
    _boolean: "true|false",
    Path: "FILE",
    _folder: "DIR",
    _COUNT: "N",
    _POSITIVE: "N",
    _SECONDS: "SECONDS",
    _MILLISECONDS: "MS",
    _POSITIVE_MILLISECONDS: "MS",
}
"""What stands for a flag's value in the help."""


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    target: str
    """The settings' field; "grpc.", "metrics.", "log." and "engines." lead into their parts."""
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    aliases: tuple[str, ...] = ()
    value: str = ""
    """What stands for the value in the help; empty: what `parse` says."""


_REPOSITORY = (
    Flag(
        "model-repository",
        "model_repositories",
        Path,
        "a folder of models; repeatable",
        repeatable=True,
        aliases=("model-store",),
        value="DIR",
    ),
    Flag(
        "model-control-mode",
        "control_mode",
        str,
        "poll: follow the folder; none: load all that is there at the start; explicit: load what --load-model and"
        " clients name (default poll)",
        choices=tuple(mode.value for mode in ControlMode),
    ),
    Flag(
        "load-model",
        "load_models",
        str,
        "load this at the start in explicit mode; * = all; repeatable",
        repeatable=True,
        value="MODEL",
    ),
    Flag(
        "repository-settle-secs",
        "settle_seconds",
        _SECONDS,
        "how long a model's files must stay unchanged before a change counts (default 0.5)",
    ),
    Flag(
        "repository-poll-secs",
        "poll_seconds",
        _SECONDS,
        "how often to look even if nothing tells of a change (default 15)",
    ),
    Flag("model-load-thread-count", "load_thread_count", _POSITIVE, "models that load beside each other (default 4)"),
    Flag(
        "disable-auto-complete-config",
        "strict_model_config",
        _boolean,
        "complete no configuration from the model's file (default false)",
        aliases=("strict-model-config",),
    ),
    Flag(
        "model-config-name",
        "model_config_name",
        str,
        "of models that have a configs/NAME.pbtxt, read that instead of config.pbtxt",
        value="NAME",
    ),
)

_SERVER = (
    Flag("id", "server_id", str, "the server's name in its metadata (default rocserve)", value="NAME"),
    Flag("strict-readiness", "strict_readiness", _boolean, "ready only when every model is (default true)"),
    Flag("exit-on-error", "exit_on_error", _boolean, "end when a model fails to load at the start (default true)"),
    Flag("exit-timeout-secs", "exit_timeout_seconds", _SECONDS, "how long the end waits for work in hand (default 30)"),
    Flag("max-queue-requests", "max_queue_requests", _POSITIVE, "requests that may wait for a version (default 10000)"),
    Flag(
        "max-queue-bytes",
        "max_queue_bytes",
        _POSITIVE,
        "bytes of inputs that may wait for a version (default 4294967296)",
    ),
)

_ENGINES = (
    Flag(
        "cache-directory",
        "engines.cache_directory",
        _folder,
        "where programs that MIGraphX has compiled are kept; several servers may share it (default rocserve/ in"
        " $XDG_CACHE_HOME or ~/.cache)",
    ),
    Flag(
        "cache-size-bytes",
        "engines.cache_bytes",
        _POSITIVE,
        "how much they may take; those used least lately go first (default 21474836480)",
    ),
    Flag(
        "migraphx-root",
        "engines.migraphx_root",
        _folder,
        "a folder that holds MIGraphX together with the C library that it was built for (default"
        " $ROCSERVE_MIGRAPHX_ROOT, else this system's MIGraphX)",
    ),
)

_GRPC = (
    Flag("allow-grpc", "grpc.allow", _boolean, "must be true, for gRPC is the only front end (default true)"),
    Flag("grpc-address", "grpc.address", str, "the address to listen on (default 0.0.0.0)", value="ADDRESS"),
    Flag("grpc-port", "grpc.port", _COUNT, "the port to listen on; 0 = any free one (default 8001)", value="PORT"),
    Flag("reuse-grpc-port", "grpc.reuse_port", _boolean, "let several servers share the port (default false)"),
    Flag(
        "grpc-transport",
        "grpc.transport",
        str,
        "reactor: the fast one; aio: grpc.aio; auto: the reactor where it suits the installed grpcio (default auto)",
        choices=("auto", "reactor", "aio"),
    ),
    Flag(
        "grpc-infer-response-compression-level",
        "grpc.response_compression_level",
        str,
        "how hard to compress responses (default none)",
        choices=("none", "low", "medium", "high"),
    ),
)

_METRICS = (
    Flag("allow-metrics", "metrics.allow", _boolean, "serve metrics over HTTP, at /metrics (default true)"),
    Flag("metrics-address", "metrics.address", str, "the address to listen on (default 0.0.0.0)", value="ADDRESS"),
    Flag(
        "metrics-port", "metrics.port", _COUNT, "the port to listen on; 0 = any free one (default 8002)", value="PORT"
    ),
    Flag(
        "metrics-interval-ms",
        "metrics.interval_ms",
        _POSITIVE_MILLISECONDS,
        "taken as tritonserver takes it; all metrics are read when they are asked for (default 2000)",
    ),
)

_TLS = (
    Flag("grpc-use-ssl", "grpc.use_ssl", _boolean, "serve TLS only (default false)"),
    Flag(
        "grpc-use-ssl-mutual",
        "grpc.use_ssl_mutual",
        _boolean,
        "serve TLS only, to clients that show a certificate (default false)",
    ),
    Flag("grpc-server-cert", "grpc.server_cert", Path, "the server's certificate chain, PEM"),
    Flag("grpc-server-key", "grpc.server_key", Path, "the server's private key, PEM"),
    Flag("grpc-root-cert", "grpc.root_cert", Path, "what clients' certificates are checked against, PEM"),
)

_CONNECTIONS = (
    Flag(
        "grpc-keepalive-time",
        "grpc.keepalive_time_ms",
        _POSITIVE_MILLISECONDS,
        "pause in the traffic at which the server pings (default 7200000)",
    ),
    Flag(
        "grpc-keepalive-timeout",
        "grpc.keepalive_timeout_ms",
        _POSITIVE_MILLISECONDS,
        "wait for the answer to a ping before the connection is ended (default 20000)",
    ),
    Flag(
        "grpc-keepalive-permit-without-calls",
        "grpc.keepalive_permit_without_calls",
        _boolean,
        "ping connections without calls too (default false)",
    ),
    Flag(
        "grpc-http2-max-pings-without-data",
        "grpc.http2_max_pings_without_data",
        _COUNT,
        "pings that the server sends without data between them; 0 = no limit (default 2)",
    ),
    Flag(
        "grpc-http2-min-recv-ping-interval-without-data",
        "grpc.http2_min_recv_ping_interval_without_data_ms",
        _MILLISECONDS,
        "least pause between a client's pings without data (default 300000)",
    ),
    Flag(
        "grpc-http2-max-ping-strikes",
        "grpc.http2_max_ping_strikes",
        _COUNT,
        "pings that come too soon before the connection is ended; 0 = no limit (default 2)",
    ),
    Flag(
        "grpc-max-connection-age",
        "grpc.max_connection_age_ms",
        _MILLISECONDS,
        "age at which a connection is ended; 0 = never (default 0)",
    ),
    Flag(
        "grpc-max-connection-age-grace",
        "grpc.max_connection_age_grace_ms",
        _MILLISECONDS,
        "time that its calls then have to finish; 0 = as long as they take (default 0)",
    ),
)

_LOG = (
    Flag("log-info", "log.info", _boolean, "write information (default true)"),
    Flag("log-warning", "log.warning", _boolean, "write warnings (default true)"),
    Flag("log-error", "log.error", _boolean, "write errors (default true)"),
    Flag("log-verbose", "log.verbose", _COUNT, "write details from 1 on (default 0)"),
    Flag("log-format", "log.format", str, "how a line begins (default default)", choices=("default", "ISO8601")),
    Flag("log-file", "log.file", Path, "write to this file, not to standard error"),
)

FLAG_GROUPS: tuple[tuple[str, tuple[Flag, ...]], ...] = (
    ("model repository", _REPOSITORY),
    ("server", _SERVER),
    ("engines", _ENGINES),
    ("gRPC", _GRPC),
    ("TLS", _TLS),
    ("connections", _CONNECTIONS),
    ("metrics", _METRICS),
    ("log", _LOG),
)
FLAGS: tuple[Flag, ...] = tuple(flag for _, group in FLAG_GROUPS for flag in group)


@dataclass(frozen=True, slots=True)
class UnservedSubject:
    """A part of tritonserver that this version lacks."""

    name: str
    switch: str
    """The flag that switches it; empty where tritonserver has none."""
    flags: tuple[str, ...]


UNSERVED: tuple[UnservedSubject, ...] = (
    UnservedSubject(
        "HTTP",
        "allow-http",
        (
            "http-address",
            "http-port",
            "http-thread-count",
            "reuse-http-port",
            "http-restricted-api",
            "http-header-forward-pattern",
            "http-max-input-size",
        ),
    ),
    UnservedSubject("Summaries and histograms of latencies", "", ("metrics-config",)),
    UnservedSubject("GPU metrics", "allow-gpu-metrics", ()),
    UnservedSubject("CPU metrics", "allow-cpu-metrics", ()),
    UnservedSubject("Clients' shared memory", "allow-client-shm", ()),
    UnservedSubject("Protocol restriction", "", ("grpc-restricted-protocol", "grpc-header-forward-pattern")),
    UnservedSubject("Tracing", "", ("trace-config",)),
    UnservedSubject("The response cache", "", ("cache-config",)),
    UnservedSubject("The rate limiter", "", ("rate-limit", "rate-limit-resource")),
    UnservedSubject("Backend settings on the command line", "", ("backend-config", "backend-directory", "host-policy")),
    UnservedSubject("The Vertex AI front end", "allow-vertex-ai", ()),
    UnservedSubject("The SageMaker front end", "allow-sagemaker", ()),
)


class FlagError(Exception):
    """The command line cannot be served; the text says why and what to do."""


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    for title, flags in FLAG_GROUPS:
        group = parser.add_argument_group(title)
        for flag in flags:
            _add_flag(group, flag)
    for subject in UNSERVED:
        for name in (subject.switch, *subject.flags):
            if name:
                parser.add_argument(f"--{name}", dest=f"unserved.{name}", action="append", help=argparse.SUPPRESS)


def _add_flag(parser: argparse._ArgumentGroup, flag: Flag) -> None:
    names = [f"--{name}" for name in (flag.name, *flag.aliases)]
    # "nargs=?" lets a switch stand without "=true", as tritonserver allows.
    switch = flag.parse is _boolean
    parser.add_argument(
        *names,
        dest=flag.target,
        type=flag.parse,
        choices=flag.choices or None,
        action="append" if flag.repeatable else "store",
        nargs="?" if switch else None,
        const=True if switch else None,
        default=None,
        metavar=None if flag.choices else flag.value or _SHOWN_VALUES[flag.parse],
        help=flag.help,
    )


def settings_from(arguments: argparse.Namespace) -> ServerSettings:
    """The settings that parsed arguments describe.

    Raises:
        FlagError: a flag's subject is not served, flags contradict each other, or a needed one is missing.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    _refuse_unserved({name.removeprefix("unserved."): value for name, value in given.items() if "unserved." in name})
    fields = {flag.target: given[flag.target] for flag in FLAGS if flag.target in given}
    if not fields.get("model_repositories"):
        raise FlagError("--model-repository=FOLDER is needed: the folder that holds the models")
    grpc = GrpcSettings(**_part(fields, "grpc."))
    _check_grpc(grpc)
    top = {name: value for name, value in fields.items() if "." not in name}
    top["model_repositories"] = tuple(top["model_repositories"])
    top["load_models"] = tuple(top.get("load_models", ()))
    if "control_mode" in top:
        top["control_mode"] = ControlMode(top["control_mode"])
    if top["load_models"] and top.get("control_mode") is not ControlMode.EXPLICIT:
        raise FlagError("--load-model needs --model-control-mode=explicit")
    if top.get("exit_on_error", True):
        _check_repositories(top["model_repositories"])
    engines = replace(engine_settings(), **_part(fields, "engines."))
    metrics = MetricsSettings(**_part(fields, "metrics."))
    log = LogSettings(**_part(fields, "log."))
    return ServerSettings(grpc=grpc, metrics=metrics, log=log, engines=engines, **top)


def _part(fields: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


def _check_repositories(folders: Sequence[Path]) -> None:
    for folder in folders:
        if not folder.is_dir():
            raise FlagError(
                f"--model-repository={folder}: there is no such folder; with --exit-on-error=false the server waits"
                " for it"
            )


def _check_grpc(grpc: GrpcSettings) -> None:
    if not grpc.allow:
        raise FlagError("--allow-grpc=false leaves nothing to serve: gRPC is the only front end of this version")
    for path in (grpc.server_cert, grpc.server_key, grpc.root_cert):
        if path is not None and not path.is_file():
            raise FlagError(f"the certificate or key file {path} does not exist")
    if (grpc.use_ssl or grpc.use_ssl_mutual) and not (grpc.server_cert and grpc.server_key):
        raise FlagError("TLS needs --grpc-server-cert and --grpc-server-key")
    if grpc.use_ssl_mutual and not grpc.root_cert:
        raise FlagError("--grpc-use-ssl-mutual needs --grpc-root-cert to check clients' certificates against")


def _refuse_unserved(given: dict[str, Sequence[str]]) -> None:
    for subject in UNSERVED:
        switched_off = False
        if subject.switch in given:
            try:
                switched_off = not _boolean(given[subject.switch][-1])
            except argparse.ArgumentTypeError as error:
                raise FlagError(f"argument --{subject.switch}: {error}") from None
            if not switched_off:
                raise FlagError(
                    f"--{subject.switch}={given[subject.switch][-1]}: {subject.name} is not served by this version;"
                    f" leave the flag out or write --{subject.switch}=false"
                )
        if switched_off:
            continue
        for name in subject.flags:
            if name in given:
                advice = f", or write --{subject.switch}=false" if subject.switch else ""
                raise FlagError(f"--{name}: {subject.name} is not served by this version; leave the flag out{advice}")
