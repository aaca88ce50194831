"""The command `rocserve`. Each verb imports what it needs when it runs, so that the supervisor stays small and the
zygote starts before gRPC does."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

import rocserve
from rocserve.supervisor import Post, Supervisor

if TYPE_CHECKING:
    import logging

    from rocserve.handover import SupervisorLink
    from rocserve.tools.verbs import Verb
    from rocserve.workers.control_groups import ControlGroups

_ENDED_BY_USER = 130
"""As shells have it: 128 and SIGINT's number."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the result is its exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        if words[:1] == ["serve"]:
            return Supervisor(lambda post: _run(words, post)).run()
        return _run(words)
    except KeyboardInterrupt:
        # While it was still being imported; once they run, the verbs have their own ways.
        print("rocserve: ended by you", file=sys.stderr)
        return _ENDED_BY_USER


def _run(words: Sequence[str], post: Post | None = None) -> int:
    """`post`: of a server's process."""
    parser, model_verbs = _parser()
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(_innermost(parser, options), unknown)
    if options.verb is None:
        parser.print_help()
        return 2
    own_verbs = {
        "serve": lambda options: _serve(options, words[1:], post),
        "config": _config,
        "status": _status,
        "get": _get,
        "cache": _cache,
    }
    return {**own_verbs, **model_verbs}[options.verb](options)


def _innermost(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.ArgumentParser:
    """The parser of the verb, and of its action, that the options name."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and getattr(options, action.dest) is not None:
            return _innermost(action.choices[getattr(options, action.dest)], options)
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """End as argparse does, with the flag that was probably meant."""
    flags = [flag for action in parser._actions for flag in action.option_strings if flag != "--help"]
    word = unknown[0].partition("=")[0]
    begun = [flag for flag in flags if flag.startswith(word)]
    meant = (begun or get_close_matches(word, flags, n=1)) if word.startswith("--") else []
    hint = f"; did you mean {meant[0]}?" if meant else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, Verb]]:
    """The parser, and what runs the verbs that tools/verbs.py adds."""
    from rocserve.flags import add_serve_flags
    from rocserve.flags.arguments import at_least, for_argparse
    from rocserve.settings.flag import setting
    from rocserve.tools.images.command import add_image_verbs
    from rocserve.tools.quantise.command import add_quantise_verb
    from rocserve.tools.verbs import add_model_verbs

    parser = argparse.ArgumentParser(
        prog="rocserve",
        description="Serve a repository of models over KServe v2, by gRPC and HTTP.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rocserve {rocserve.__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB")

    serve = verbs.add_parser(
        "serve",
        help="serve a model, or the models of a repository",
        usage="rocserve serve [WHAT] [FLAG ...]",
        description="Serve a model's file, the folder that holds it, a model folder, or a repository of models, until"
        " SIGTERM or SIGINT. The flags are tritonserver's.",
        allow_abbrev=False,
    )
    add_serve_flags(serve)

    config = verbs.add_parser(
        "config",
        help="print the effective config.pbtxt of a model",
        description="Load a model, without a server, and print its configuration as the server would complete it.",
        allow_abbrev=False,
    )
    config.add_argument("model_folder", type=Path, metavar="MODEL_DIR", help="the model's folder")
    config.add_argument(
        "--model-config-name", default="", metavar="NAME", help="read configs/NAME.pbtxt instead, where it exists"
    )
    config.add_argument("--strict", action="store_true", help="complete nothing from the model's file")
    config.add_argument(
        "--save", type=Path, metavar="DIR", help="write the models that `preprocess` makes beside it into this folder"
    )

    status = verbs.add_parser(
        "status",
        help="a live table of a server's models",
        description="Show the models of a running server: state, requests, times, and why one is not served."
        " Follows until Ctrl-C; into a pipe the table is printed once.",
        allow_abbrev=False,
    )
    status.add_argument("--url", default="localhost:8001", help="the server's gRPC address (default localhost:8001)")
    status.add_argument(
        "--interval", type=at_least(0.1, float), default=1.0, metavar="SECONDS", help="between two polls (default 1)"
    )
    status.add_argument("--once", action="store_true", help="print the table once and end")
    status.add_argument(
        "--header",
        action="append",
        default=[],
        type=for_argparse(setting),
        metavar="NAME=VALUE",
        help="sent with each call, for servers with --grpc-restricted-protocol; repeatable",
    )
    status.add_argument("--tls", action="store_true", help="the server speaks TLS; implied by the files below")
    status.add_argument(
        "--root-cert", type=Path, metavar="FILE", help="what the server's certificate is checked against"
    )
    status.add_argument("--client-cert", type=Path, metavar="FILE", help="the client's own certificate, for mutual TLS")
    status.add_argument("--client-key", type=Path, metavar="FILE", help="its key")

    get = verbs.add_parser(
        "get",
        help="fetch published models, with all that serves them",
        description="Download published models into a repository, which is made where there is none, check them,"
        " and go on where an earlier download stopped. Configurations, labels, pipelines and ensembles come along. A"
        " running server takes them up.",
        allow_abbrev=False,
    )
    known = ("efficientnet_lite0", "resnet50", "yolov4")
    get.add_argument("models", nargs="+", choices=known, metavar="MODEL", help=", ".join(known))
    get.add_argument(
        "--untrained",
        action="store_true",
        help="build the same networks with seeded weights, without a download; good for measuring, not for answers",
    )
    get.add_argument(
        "--model-repository",
        type=Path,
        default=Path("model_repository"),
        metavar="DIR",
        help="the repository (default model_repository)",
    )
    get.add_argument("--force", action="store_true", help="replace a file that is there")
    get.add_argument(
        "--source",
        metavar="URL",
        help="a folder that has the files under their published names (also $ROCSERVE_GET_SOURCE)",
    )
    _add_cache_verb(verbs)
    return parser, {**add_model_verbs(verbs), **add_quantise_verb(verbs), **add_image_verbs(verbs)}


def _add_cache_verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    cache = verbs.add_parser(
        "cache",
        help="list or remove the compiled programs that are kept on disk",
        description="Look after the programs that MIGraphX has compiled. Those that a process is using stay.",
        allow_abbrev=False,
    )
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True)
    shown = actions.add_parser(
        "list", help="show what is kept, and which files are not tried again", allow_abbrev=False
    )
    prune = actions.add_parser(
        "prune",
        help="remove what was used least lately",
        description="Remove programs, those used least lately first, until the rest takes no more than the limit.",
        allow_abbrev=False,
    )
    for action in (shown, prune):
        action.add_argument(
            "--cache-directory",
            default="",
            metavar="DIR",
            help="the cache (default rocserve/ in $XDG_CACHE_HOME or ~/.cache)",
        )
    what = prune.add_mutually_exclusive_group()
    what.add_argument("--size", type=_byte_count, metavar="BYTES", help="the limit, e.g. 500M or 10G (default 20G)")
    what.add_argument("--all", action="store_true", help="remove all, also what is known of files not tried again")
    what.add_argument("models", nargs="*", default=[], metavar="MODEL", help="remove all of these models, and no other")


def _byte_count(text: str) -> int:
    """Bytes, or with K, M, G or T that many times 1024, 1024 times 1024, ..."""
    amount, factor = text, 1
    if text and text[-1].upper() in "KMGT":
        amount, factor = text[:-1], 1 << 10 * ("KMGT".index(text[-1].upper()) + 1)
    if not amount.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number of bytes such as 500M or 10G, got '{text}'")
    return int(amount) * factor


def _serve(options: argparse.Namespace, command: Sequence[str], post: Post | None) -> int:
    """`command`: what stands behind the verb, from which the options come."""
    assert post is not None, "a server has a supervisor"
    from rocserve.flags import FlagError, settings_from
    from rocserve.handover import SupervisorLink

    supervisor = SupervisorLink(post)
    try:
        settings = supervisor.settings(settings_from(options))
    except FlagError as error:
        print(f"rocserve serve: {error}", file=sys.stderr)
        return 2

    from rocserve.observability.logs import ServerLog

    try:
        log = ServerLog(settings.log)
    except OSError as error:
        print(f"rocserve serve: --log-file={settings.log.file}: {error.strerror or error}", file=sys.stderr)
        return 2

    from rocserve.backends.registry import discover_backends
    from rocserve.workers.launcher import WorkerLauncher

    if supervisor.takes_place_of:
        log.logger.error(
            "the server's process %s, and its clients' connections with it; this one takes its place",
            supervisor.takes_place_of,
        )
    registry = discover_backends()
    # Before there are children, which would be left behind.
    groups = _control_groups(supervisor, log.logger.getChild("workers")) if settings.workers.control_groups else None
    try:
        launcher = WorkerLauncher(
            registry.preload,
            log.logger.getChild("workers"),
            settings.workers,
            groups,
            lifeline=supervisor.lifeline,
            zygote=supervisor.zygote,
            on_zygote=supervisor.keep_zygote,
        )
    except ValueError as error:
        print(f"rocserve serve: --worker-user={settings.workers.user}: {error}", file=sys.stderr)
        return 2
    launcher.start()

    # Only now: this imports gRPC.
    _quieten_grpc()
    _let_the_plane_poll()
    from rocserve.server import run_server

    return run_server(settings, command, launcher, supervisor, log)


def _control_groups(supervisor: SupervisorLink, log: logging.Logger) -> ControlGroups | None:
    from rocserve.workers.control_groups import ControlGroups, NotDelegated, take_delegation

    if supervisor.control_groups:
        return ControlGroups(Path(supervisor.control_groups))
    try:
        groups = take_delegation()
    except NotDelegated as reason:
        log.info("bounds of models' memory and tasks are kept by looking at their processes: %s", reason)
        return None
    log.info("bounds of models' memory and tasks are kept by the kernel, in cgroups below %s", groups.folder)
    return groups


def _let_the_plane_poll() -> None:
    """Have gRPC's core read and write sockets on the thread that polls its completion queue, not on threads of its own:
    each call then saves the way from one to the other. Has to be said before grpc is imported; the user's word goes."""
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")


def _config(options: argparse.Namespace) -> int:
    from rocserve.backends.registry import discover_backends
    from rocserve.tools.config import run
    from rocserve.tools.running import guarded
    from rocserve.tools.signature import describe

    return guarded(
        "config",
        "",
        lambda: run(
            options.model_folder,
            registry=discover_backends(),
            describe=describe,
            config_name=options.model_config_name,
            strict=options.strict,
            save=options.save,
        ),
    )


def _status(options: argparse.Namespace) -> int:
    _quieten_grpc()
    from rocserve.tools.running import guarded
    from rocserve.tools.status import run
    from rocserve_client import Tls

    files = (options.root_cert, options.client_key, options.client_cert)
    tls = Tls(*files) if options.tls or any(files) else None
    headers = dict(options.header)
    return guarded(
        "status",
        "",
        lambda: run(url=options.url, interval=options.interval, once=options.once, tls=tls, headers=headers),
    )


def _get(options: argparse.Namespace) -> int:
    from rocserve.tools.get.verb import run

    return run(
        options.models,
        options.model_repository,
        untrained=options.untrained,
        force=options.force,
        source=options.source,
    )


def _cache(options: argparse.Namespace) -> int:
    from rocserve.settings import EngineSettings
    from rocserve.tools.cache import list_programs, prune_programs
    from rocserve.tools.running import guarded

    settings = EngineSettings(cache_directory=options.cache_directory)
    if options.action == "list":
        return guarded("cache", "", lambda: list_programs(settings))
    return guarded(
        "cache",
        "",
        lambda: prune_programs(settings, limit_bytes=options.size, everything=options.all, models=options.models),
    )


def _quieten_grpc() -> None:
    """Keep gRPC's own messages about connections that end out of the log and the table; its errors stay."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


if __name__ == "__main__":
    sys.exit(main())
