"""Command line flags: converts a command line to the server's settings.

The flags of `rocserve serve` are declared in settings/: tritonserver's, and a few more. tritonserver.py has the other
flags of tritonserver, with the reason why each of them is refused or has no effect.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rocserve.backends.registry import discover_backends
from rocserve.cache.folders import cache_directory
from rocserve.config.backend_choice import advice_on_files
from rocserve.core.remote_places import RemotePlace
from rocserve.flags.arguments import add_flags, filled, for_argparse
from rocserve.flags.tritonserver import add_triton_flags, is_of_triton_caches, refusal
from rocserve.observability.tracing.trace_settings import trace_options
from rocserve.repository.scanner import find_single_model, model_endings
from rocserve.settings import (
    ControlMode,
    GrpcSettings,
    HttpSettings,
    RestrictedProtocols,
    ServerSettings,
)
from rocserve.settings.repository import SingleModel
from rocserve.settings.repository import repository as place_of
from rocserve.settings.unix_place import unix_place


class FlagError(Exception):
    """The command line is unusable; the text has the reason and the remedy."""


def check_tls(settings: ServerSettings) -> None:
    """Check the TLS settings of all ports. Raises FlagError."""
    ports = [part for part in (settings.grpc, settings.http, settings.metrics) if part.allow]
    grpc = settings.grpc
    files = {"server-cert": grpc.server_cert, "server-key": grpc.server_key, "root-cert": grpc.root_cert}
    for name, path in files.items():
        if path is not None and not path.is_file():
            raise FlagError(f"--grpc-{name}={path}: there is no such file")
    if any(port.use_ssl or port.use_ssl_mutual for port in ports) and not (grpc.server_cert and grpc.server_key):
        raise FlagError("TLS needs --grpc-server-cert and --grpc-server-key, which are for all ports")
    if any(port.use_ssl_mutual for port in ports) and not grpc.root_cert:
        raise FlagError(
            "--grpc-use-ssl-mutual, --http-use-ssl-mutual and --metrics-use-ssl-mutual need --grpc-root-cert to check"
            " clients' certificates against"
        )
    if not settings.allow_mixed_tls:
        # A user who locks one port may forget that the other port serves the same.
        both: tuple[tuple[str, GrpcSettings | HttpSettings], ...] = (("gRPC", settings.grpc), ("HTTP", settings.http))
        for (locked, locked_port), (other, port) in (both, both[::-1]):
            if not (locked_port.allow and locked_port.use_ssl_mutual) or not port.allow or port.use_ssl_mutual:
                continue
            try:
                is_local = ipaddress.ip_address(port.address).is_loopback
            except ValueError:
                is_local = port.address == "localhost" or unix_place(port.address) is not None
            if not is_local:
                flag = other.lower()
                raise FlagError(
                    f"--{locked.lower()}-use-ssl-mutual admits to {locked} only clients that show a certificate, but"
                    f" {other} at {port.address}:{port.port} would serve the same to anybody. Choose:"
                    f" --{flag}-use-ssl-mutual (with the same certificates), --{flag}-address=127.0.0.1,"
                    f" --allow-{flag}=false, or --allow-mixed-tls if that is intended"
                )


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        type=for_argparse(place_of),
        metavar="WHAT",
        help="a model's file (.onnx, .mxr, .pb, .graphdef, .pt2, .pt, pipeline .json, model.py), the folder that holds"
        " it, a model folder, or a repository of models, also by its URL (s3://, gs://, as://, hf://, https://)",
    )
    add_flags(parser, ServerSettings(), "server")
    add_triton_flags(parser)


def settings_from(arguments: argparse.Namespace) -> ServerSettings:
    """Convert parsed arguments to settings. Raises FlagError if a flag's part is unsupported, flags contradict each
    other, or a required flag or a named file is missing."""
    if isinstance(arguments.what, Path) and os.environ.get("MODEL_INIT_MODE") == "async":
        _wait_for(arguments.what)
    try:
        settings = _settings(arguments)
        single = _single_model(settings)
        _check(settings)
    except OSError as error:
        raise FlagError(f"'{error.filename}' cannot be read: {error.strerror}") from None
    return replace(settings, repository=replace(settings.repository, single=single))


def _wait_for(what: Path) -> None:
    """Wait for files from another container of the pod. KServe sets MODEL_INIT_MODE for models in OCI images:
    the image's container links them when it starts, maybe after this one."""
    if not what.exists():
        print(f"rocserve serve: waiting for '{what}' (MODEL_INIT_MODE=async)", file=sys.stderr, flush=True)
    while not what.exists():
        time.sleep(0.1)


def settings_again(words: Sequence[str]) -> ServerSettings:
    """Convert a command line that was valid before, without checks, because its files may be gone."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_serve_flags(parser)
    return _settings(parser.parse_args(words))


def _settings(arguments: argparse.Namespace) -> ServerSettings:
    if refused := refusal(arguments):
        raise FlagError(refused)
    try:
        settings = filled(ServerSettings(), arguments)
    except ValueError as error:
        raise FlagError(str(error)) from None
    what, named = arguments.what, settings.repository.roots
    if what is None and not named:
        raise FlagError(
            "name what to serve: a model's file, its folder, or a repository of models (or --model-repository=FOLDER)"
        )
    if what is not None:
        if named:
            raise FlagError(f"'{what}' and --model-repository both name what to serve; remove one of them")
        named = (what if isinstance(what, RemotePlace) or what.is_dir() else what.absolute().parent,)
    cache, own = cache_directory(settings.engines), settings.repository
    # A remote repository is served from its copy.
    places: list[Path | RemotePlace] = [
        replace(one, home=one.home_in(cache)) if isinstance(one, RemotePlace) else one for one in named
    ]
    is_explicit = own.control_mode is ControlMode.EXPLICIT
    repository = replace(
        own,
        roots=tuple(one.root if isinstance(one, RemotePlace) else one for one in places),
        remotes=tuple(one for one in places if isinstance(one, RemotePlace)),
        allow_amd_endpoints=is_explicit if own.allow_amd_endpoints is None else own.allow_amd_endpoints,
        ends_on_failure=settings.exit_on_error,
    )
    return replace(settings, what=what if isinstance(what, Path) else None, repository=repository)


def _check(settings: ServerSettings) -> None:
    repository = settings.repository
    if repository.load_models and repository.control_mode is not ControlMode.EXPLICIT:
        raise FlagError("--load-model needs --model-control-mode=explicit")
    if repository.allow_remote_models and not repository.allow_remote_files:
        raise FlagError("--allow-remote-models needs --allow-remote-files: the files of such a model are the request's")
    if settings.exit_on_error:
        copies = {place.root for place in repository.remotes}
        for folder in repository.roots:
            if folder not in copies and not folder.is_dir():
                raise FlagError(
                    f"--model-repository={folder}: there is no such folder; with --exit-on-error=false the server waits"
                    " for it"
                )
    for folder in repository.worker_load_folders:
        if not folder.is_dir():
            raise FlagError(f"--allow-worker-load={folder}: there is no such folder")
    if (cache := settings.engines.cache_directory) and is_of_triton_caches(Path(cache)):
        raise FlagError(
            f"--cache-directory={cache}: this is tritonserver's folder of response caches, which are not loaded here."
            " Remove the flag, or name a folder for the programs that MIGraphX compiles"
        )
    if not settings.grpc.allow and not settings.http.allow:
        raise FlagError("--allow-grpc=false and --allow-http=false leave nothing to serve; allow one of them")
    _check_unix_sockets(settings)
    _check_restricted("--http-restricted-api", "api", settings.http.restricted)
    _check_restricted("--grpc-restricted-protocol", "protocol", settings.grpc.restricted)
    check_tls(settings)
    try:
        trace_options(settings.trace)
    except ValueError as error:
        raise FlagError(f"--trace-config: {error}") from None


def _check_unix_sockets(settings: ServerSettings) -> None:
    for flag, part in (("grpc", settings.grpc), ("http", settings.http)):
        if unix_place(part.address) is not None and part.reuse_port:
            raise FlagError(f"--{flag}-address={part.address} is a Unix socket, not a port; remove --reuse-{flag}-port")
    places = settings.unix_sockets
    if places and settings.front_ends:
        raise FlagError(
            f"--front-ends={settings.front_ends}: the kernel cannot share {places[0]} among processes; remove the flag,"
            " and the server's process serves all clients"
        )
    metrics = unix_place(settings.metrics.address) if settings.metrics.allow else None
    paths = [place.path for place in (*places, metrics) if place is not None]
    for path, count in Counter(paths).items():
        if count > 1:
            raise FlagError(f"unix:{path} is the address of two of gRPC, HTTP and metrics; give each its own")


def _single_model(settings: ServerSettings) -> SingleModel | None:
    """Return the single model that WHAT names; None = a repository. Raises FlagError."""
    what, repository = settings.what, settings.repository
    of_one_model = {
        "--model-name": repository.model_name,
        "--preprocess": repository.preprocess,
        "--labels": repository.labels,
    }
    flag = next((flag for flag, value in of_one_model.items() if value), "")
    if what is None:
        if flag:
            raise FlagError(f"{flag} is for one model: rocserve serve MODEL {flag}={of_one_model[flag]}")
        return None
    if repository.labels and not repository.labels.is_file():
        raise FlagError(f"--labels={repository.labels}: there is no such file")
    if settings.exit_on_error and not what.exists():
        raise FlagError(f"there is no file or folder '{what}'")
    registry = discover_backends()
    endings = model_endings(registry)
    if not what.is_dir() and not what.name.lower().endswith(endings):
        advice = advice_on_files(what.name)
        raise FlagError(f"'{what}' has no model file's ending; expected {', '.join(endings)}, or a folder{advice}")
    # KServe sets this variable.
    single = find_single_model(what, repository.model_name or os.environ.get("MODEL_NAME", ""), registry)
    if single is None and flag:
        raise FlagError(f"{flag} is for one model; '{what}' is a repository, whose models set it in their folders")
    if single is not None and repository.control_mode is ControlMode.EXPLICIT:
        raise FlagError(
            f"--model-control-mode=explicit is for repositories, but '{what}' is one model; remove the flag"
        )
    return single


def _check_restricted(flag: str, kind: str, groups: Sequence[RestrictedProtocols]) -> None:
    for protocol, count in Counter(protocol for group in groups for protocol in group.protocols).items():
        if count > 1:
            raise FlagError(f"{flag}: restricted {kind} '{protocol}' can not be specified in multiple config groups")
    for group in groups:
        if group.file is not None and not group.file.is_file():
            raise FlagError(f"{flag}: there is no file {group.file} with the value of '{group.header}'")
