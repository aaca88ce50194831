"""From a command line to the server's settings."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rocserve.backends.registry import discover_backends
from rocserve.cache.private_folder import cache_directory
from rocserve.core.remote_places import RemotePlace
from rocserve.flags.arguments import add_flags, filled, for_argparse
from rocserve.flags.tls import FlagError, check_tls
from rocserve.flags.unserved import UNSERVED, WITHOUT_EFFECT, refuse_unserved
from rocserve.observability.tracing.options import trace_options
from rocserve.repository.single_model import find_single_model, model_endings
from rocserve.settings import ControlMode, RepositorySettings, RestrictedProtocols, ServerSettings
from rocserve.settings.repository import repository


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        type=for_argparse(repository),
        metavar="WHAT",
        help="a model's file (.onnx, .mxr, .pb, .graphdef, .pt2, .pt, pipeline .json, model.py), the folder that holds"
        " it, a model folder, or a repository of models, also by its URL (s3://, gs://, as://, hf://, https://)",
    )
    add_flags(parser, ServerSettings(), "server")
    for subject in UNSERVED:
        for name in (subject.switch, *subject.flags):
            if name:
                parser.add_argument(f"--{name}", dest=f"unserved.{name}", action="append", help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT:
        parser.add_argument(f"--{name}", dest=f"ignored.{name}", action="append", help=argparse.SUPPRESS)


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
            raise FlagError(f"'{what}' and --model-repository both say what to serve; leave one of them out")
        named = (what if isinstance(what, RemotePlace) or what.is_dir() else what.absolute().parent,)
    return replace(
        settings,
        what=what if isinstance(what, Path) else None,
        repository=_repository_settings(settings, named),
    )


def _repository_settings(settings: ServerSettings, named: Sequence[Path | RemotePlace]) -> RepositorySettings:
    """With copies in the places of the repositories that are elsewhere, and with what follows from other flags."""
    cache = cache_directory(settings.engines)
    places = [replace(one, home=one.home_in(cache)) if isinstance(one, RemotePlace) else one for one in named]
    given = settings.repository
    is_explicit = given.control_mode is ControlMode.EXPLICIT
    return replace(
        given,
        roots=tuple(one.root if isinstance(one, RemotePlace) else one for one in places),
        remotes=tuple(one for one in places if isinstance(one, RemotePlace)),
        allow_endpoints=is_explicit if given.allow_endpoints is None else given.allow_endpoints,
        ends_on_failure=settings.exit_on_error,
    )


def _check(settings: ServerSettings) -> None:
    repository = settings.repository
    if repository.load_models and repository.control_mode is not ControlMode.EXPLICIT:
        raise FlagError("--load-model needs --model-control-mode=explicit")
    if repository.allow_remote_models and not repository.allow_remote_files:
        raise FlagError("--allow-remote-models needs --allow-remote-files: the files of such a model are the request's")
    _check_what(settings)
    if settings.exit_on_error:
        copies = {place.root for place in repository.remotes}
        _check_repositories([folder for folder in repository.roots if folder not in copies])
    for folder in repository.worker_load_folders:
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
        return
    if repository.labels and not repository.labels.is_file():
        raise FlagError(f"--labels={repository.labels}: there is no such file")
    if settings.exit_on_error and not what.exists():
        raise FlagError(f"there is no file or folder '{what}'")
    registry = discover_backends()
    endings = model_endings(registry)
    if not what.is_dir() and not what.name.lower().endswith(endings):
        raise FlagError(f"'{what}' is no model file by its ending; expected {', '.join(endings)}, or a folder")
    try:
        single = find_single_model(what, repository.model_name, registry)
    except OSError as error:
        raise FlagError(f"'{what}' cannot be read: {error.strerror}") from None
    if single is None and flag:
        raise FlagError(f"{flag} is for one model; '{what}' is a repository, whose models say it in their folders")
    if single is not None and repository.control_mode is ControlMode.EXPLICIT:
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
