"""The flags of `rocserve serve`: tritonserver's names, and a few of our own.

A flag of tritonserver whose subject this version does not serve is refused with a message, unless it switches its
subject off; it is never ignored.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rocserve.repository.settings import ControlMode
from rocserve.settings import GrpcSettings, LogSettings, ServerSettings


def _boolean(text: str) -> bool:
    if text.lower() in ("true", "1", "on"):
        return True
    if text.lower() in ("false", "0", "off"):
        return False
    raise argparse.ArgumentTypeError(f"expected true or false, got '{text}'")


def _at_least(minimum: float, kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected a number, got '{text}'") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"expected at least {minimum:g}, got '{text}'")
        return value

    return parse


_COUNT = _at_least(0, int)
_POSITIVE = _at_least(1, int)
_SECONDS = _at_least(0, float)


@dataclass(frozen=True, slots=True)
class Flag:
    name: str
    target: str
    """The settings' field; "grpc." and "log." lead into their parts."""
    parse: Callable[[str], Any]
    help: str
    choices: tuple[str, ...] = ()
    repeatable: bool = False
    aliases: tuple[str, ...] = ()


FLAGS: tuple[Flag, ...] = (
    Flag(
        "model-repository",
        "model_repositories",
        Path,
        "a folder of models (repeatable)",
        repeatable=True,
        aliases=("model-store",),
    ),
    Flag(
        "model-control-mode",
        "control_mode",
        str,
        "none: load all at the start; poll: follow the folder (default); explicit: load what clients ask for",
        choices=tuple(mode.value for mode in ControlMode),
    ),
    Flag("repository-poll-secs", "poll_seconds", _SECONDS, "seconds between two looks at the repository (default 15)"),
    Flag(
        "repository-settle-secs",
        "settle_seconds",
        _SECONDS,
        "seconds that a model's files must stay unchanged before a change counts (default 0.5)",
    ),
    Flag("load-model", "load_models", str, "a model to load at the start in explicit mode; * = all", repeatable=True),
    Flag("model-load-thread-count", "load_thread_count", _POSITIVE, "models that load beside each other (default 4)"),
    Flag(
        "disable-auto-complete-config",
        "strict_model_config",
        _boolean,
        "complete nothing from the model file",
        aliases=("strict-model-config",),
    ),
    Flag("model-config-name", "model_config_name", str, "read configs/<name>.pbtxt instead of config.pbtxt"),
    Flag("strict-readiness", "strict_readiness", _boolean, "ready only when every model is (default true)"),
    Flag("exit-on-error", "exit_on_error", _boolean, "end when a model fails to load at the start (default true)"),
    Flag("exit-timeout-secs", "exit_timeout_seconds", _SECONDS, "seconds for work in hand at the end (default 30)"),
    Flag("max-queue-requests", "max_queue_requests", _POSITIVE, "requests that may wait for a model (default 10000)"),
    Flag("max-queue-bytes", "max_queue_bytes", _POSITIVE, "bytes of inputs that may wait for a model (default 4 GiB)"),
    Flag("id", "server_id", str, "the server's name in its metadata (default rocserve)"),
    Flag("allow-grpc", "grpc.allow", _boolean, "serve gRPC (default true)"),
    Flag("grpc-address", "grpc.address", str, "the address to listen on (default 0.0.0.0)"),
    Flag("grpc-port", "grpc.port", _COUNT, "the port to listen on (default 8001; 0 = any free one)"),
    Flag("reuse-grpc-port", "grpc.reuse_port", _boolean, "let several servers listen on the port"),
    Flag(
        "grpc-transport",
        "grpc.transport",
        str,
        "auto (default), reactor or aio",
        choices=("auto", "reactor", "aio"),
    ),
    Flag("grpc-use-ssl", "grpc.use_ssl", _boolean, "TLS"),
    Flag("grpc-use-ssl-mutual", "grpc.use_ssl_mutual", _boolean, "TLS, and clients must show a certificate"),
    Flag("grpc-server-cert", "grpc.server_cert", Path, "the server's certificate chain (PEM)"),
    Flag("grpc-server-key", "grpc.server_key", Path, "the server's private key (PEM)"),
    Flag("grpc-root-cert", "grpc.root_cert", Path, "the certificates that clients' are checked against (PEM)"),
    Flag(
        "grpc-infer-response-compression-level",
        "grpc.response_compression_level",
        str,
        "none (default), low, medium or high",
        choices=("none", "low", "medium", "high"),
    ),
    Flag("grpc-keepalive-time", "grpc.keepalive_time_ms", _POSITIVE, "ms between keepalive pings (default 7200000)"),
    Flag("grpc-keepalive-timeout", "grpc.keepalive_timeout_ms", _POSITIVE, "ms to wait for a ping's answer"),
    Flag("grpc-keepalive-permit-without-calls", "grpc.keepalive_permit_without_calls", _boolean, "ping idle ones too"),
    Flag("grpc-http2-max-pings-without-data", "grpc.http2_max_pings_without_data", _COUNT, "(default 2)"),
    Flag(
        "grpc-http2-min-recv-ping-interval-without-data",
        "grpc.http2_min_recv_ping_interval_without_data_ms",
        _COUNT,
        "ms between pings that a client may send (default 300000)",
    ),
    Flag("grpc-http2-max-ping-strikes", "grpc.http2_max_ping_strikes", _COUNT, "bad pings before the end (default 2)"),
    Flag("grpc-max-connection-age", "grpc.max_connection_age_ms", _COUNT, "ms after which a connection is ended"),
    Flag("grpc-max-connection-age-grace", "grpc.max_connection_age_grace_ms", _COUNT, "ms for its calls to finish"),
    Flag("log-verbose", "log.verbose", _COUNT, "0 = off, 1 and more = detailed messages"),
    Flag("log-info", "log.info", _boolean, "information messages (default true)"),
    Flag("log-warning", "log.warning", _boolean, "warnings (default true)"),
    Flag("log-error", "log.error", _boolean, "errors (default true)"),
    Flag("log-format", "log.format", str, "default or ISO8601", choices=("default", "ISO8601")),
    Flag("log-file", "log.file", Path, "write the log to this file instead of standard error"),
)


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
    UnservedSubject(
        "The metrics endpoint",
        "allow-metrics",
        ("metrics-address", "metrics-port", "metrics-interval-ms", "metrics-config"),
    ),
    UnservedSubject("GPU metrics", "allow-gpu-metrics", ()),
    UnservedSubject("CPU metrics", "allow-cpu-metrics", ()),
    UnservedSubject("Clients' shared memory", "allow-client-shm", ()),
    UnservedSubject("Protocol restriction", "", ("grpc-restricted-protocol", "grpc-header-forward-pattern")),
    UnservedSubject("Tracing", "", ("trace-config",)),
    UnservedSubject("The response cache", "", ("cache-config", "cache-directory")),
    UnservedSubject("The rate limiter", "", ("rate-limit", "rate-limit-resource")),
    UnservedSubject("Backend settings on the command line", "", ("backend-config", "backend-directory", "host-policy")),
    UnservedSubject("The Vertex AI and SageMaker front ends", "", ("allow-vertex-ai", "allow-sagemaker")),
)


class FlagError(Exception):
    """The command line cannot be served; the text says why and what to do."""


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    for flag in FLAGS:
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
            metavar="true|false" if switch else None if flag.choices else flag.name.rsplit("-", 1)[-1].upper(),
            help=flag.help,
        )
    for subject in UNSERVED:
        for name in (subject.switch, *subject.flags):
            if name:
                parser.add_argument(f"--{name}", dest=f"unserved.{name}", action="append", help=argparse.SUPPRESS)


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
    return ServerSettings(grpc=grpc, log=LogSettings(**_part(fields, "log.")), **top)


def _part(fields: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in fields.items() if name.startswith(prefix)}


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
