"""The command `rocserve`. Imports only the verb's module, and starts a server's zygote before it imports gRPC."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING

import rocserve
from rocserve.signals import Signals

if TYPE_CHECKING:
    import logging

    from rocserve.verbs.verb import Verb
    from rocserve.workers.control_groups import ControlGroups

_QUIET_GRPC = ("GRPC_VERBOSITY", "ERROR")
"""Hides gRPC's messages about ended connections from the log and the table; its errors remain."""
TOOLS = "rocserve.verbs"
"""The group of entry points by which a package adds verbs: each is a mapping like `_VERBS`."""
_VERBS: Mapping[str, tuple[str, str]] = {
    "serve": ("", "serve a model, or the models of a repository"),
    "config": ("rocserve.verbs.config", "print the effective config.pbtxt of a model"),
    "status": ("rocserve.verbs.status", "show the models of a running server, live"),
    "cache": ("rocserve.verbs.cache", "list or remove the compiled programs that are kept on disk"),
    "check": ("rocserve.verbs.check.verb", "check that an engine computes a model, and find what differs"),
    "compile": ("rocserve.verbs.compile", "compile a model in advance with MIGraphX"),
    "inspect": ("rocserve.verbs.inspect", "show what MIGraphX makes of a model"),
    "doctor": ("rocserve.verbs.doctor.verb", "check what is installed here and what works"),
}
"""Verb -> module with its `VERB`, and the help text."""


def main(arguments: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if arguments is None else arguments
    for descriptor in range(3):
        # A pipe or socket of this process could get a closed descriptor 0, 1 or 2, and others would print into it.
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Imported objects are never freed, but the collector would scan them repeatedly: an eighth of the start's time.
    gc.disable()
    try:
        return _run(words)
    except KeyboardInterrupt:
        # The verb was still being imported; a running verb handles Ctrl-C itself.
        print("rocserve: ended by you", file=sys.stderr)
        # 128 plus SIGINT's number, as in shells.
        return 130
    finally:
        gc.enable()


def _run(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="rocserve",
        description="Serve a repository of models over KServe v2, by gRPC and HTTP.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"rocserve {rocserve.__version__}")
    parsers = parser.add_subparsers(dest="verb", metavar="VERB")
    # The flags before the verb take no values.
    name = next((word for word in words if not word.startswith("-")), "")
    verbs = _VERBS if name in _VERBS else _with_tools()
    if name not in verbs and words and words[0] not in parser._option_string_actions and _is_for_serve(words[0]):
        parser.error(f"the verb is missing, expected: {join(('rocserve', 'serve', *words))}")
    if name and name not in verbs and len(verbs) == len(_VERBS):
        from rocserve.core.extras import install_command

        parser.error(
            f"unknown verb '{name}', expected one of {', '.join(verbs)}; bench, tune, get and others are in the package"
            f" rocserve_tools, which is not installed; run: {install_command('tools')}"
        )
    of_verbs = {name: parsers.add_parser(name, help=text, allow_abbrev=False) for name, (_, text) in verbs.items()}
    verb: Verb | None = None
    signals: Signals | None = None
    if name == "serve":
        signals = Signals()
        from rocserve.flags import add_serve_flags

        of_verbs[name].usage = "rocserve serve [WHAT] [FLAG ...]"
        of_verbs[name].description = (
            "Serve a model's file, the folder that holds it, a model folder, or a repository of models, until SIGTERM"
            " or SIGINT. The flags are tritonserver's."
        )
        add_serve_flags(of_verbs[name])
    elif name in verbs:
        os.environ.setdefault(*_QUIET_GRPC)
        verb = import_module(verbs[name][0]).VERB
        _describe(of_verbs[name], verb)
    options, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse(_innermost(parser, options), unknown)
    if verb is not None:
        return _run_verb(verb, options, _innermost(parser, options))
    if signals is not None:
        return _serve(options, words[1:], signals)
    parser.print_help()
    return 2


def _is_for_serve(word: str) -> bool:
    """Return whether a command line without a verb begins with a flag of `serve`, as tritonserver's does, or a path."""
    if not word.startswith("-"):
        return "/" in word or Path(word).exists()
    from rocserve.flags import add_serve_flags

    parser = argparse.ArgumentParser()
    add_serve_flags(parser)
    return word.partition("=")[0] in parser._option_string_actions


def _with_tools() -> Mapping[str, tuple[str, str]]:
    """Return the verbs, with those of installed packages. Not for `serve`: it reads the metadata of all packages."""
    from importlib.metadata import entry_points  # Here: its import takes 15 ms, which `serve` saves.

    verbs = dict(_VERBS)
    for point in entry_points(group=TOOLS):
        try:
            verbs |= {name: verb for name, verb in point.load().items() if name not in _VERBS}
        except ImportError as error:
            print(f"rocserve: the verbs of {point.name} are missing: {error}", file=sys.stderr)
    return verbs


def _describe(parser: argparse.ArgumentParser, verb: Verb) -> None:
    from rocserve.flags.arguments import add_flags

    parser.description = verb.description
    if not verb.actions:
        add_flags(parser, verb.options)
        return
    parsers = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, action in verb.actions.items():
        _describe(parsers.add_parser(name, help=action.description, allow_abbrev=False), action)


def _run_verb(verb: Verb, given: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from rocserve.flags import FlagError
    from rocserve.flags.arguments import filled
    from rocserve.verbs.verb import guarded

    gc.enable()
    action = verb.actions[given.action] if verb.actions else verb
    options = filled(action.options, given)
    try:
        return guarded(given.verb, str(action.subject(options)), lambda: action.run(options))
    except FlagError as error:
        parser.error(str(error))


def _innermost(parser: argparse.ArgumentParser, options: argparse.Namespace) -> argparse.ArgumentParser:
    """Return the innermost parser that the options select: a verb's, or its action's."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction) and getattr(options, action.dest) is not None:
            return _innermost(action.choices[getattr(options, action.dest)], options)
    return parser


def _refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    """Exit as argparse does, with the flag that was probably meant."""
    from rocserve.flags.spelling import meant_flag

    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    flags = [flag for action in shown for flag in action.option_strings if flag not in ("-h", "--help")]
    word = unknown[0].partition("=")[0]
    meant = meant_flag(word, flags) if word.startswith("--") else ""
    hint = f"; did you mean {meant}?" if meant else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def _serve(options: argparse.Namespace, command: Sequence[str], signals: Signals) -> int:
    """`command`: the words after the verb."""
    from rocserve.flags import FlagError, settings_from
    from rocserve.flags.tritonserver import without_effect

    try:
        settings = settings_from(options)
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

    for line in without_effect(options):
        log.logger.info(line)
    registry = discover_backends()
    # Created before the first child process, which would otherwise remain outside.
    workers_log = log.logger.getChild("workers")
    groups = _control_groups(workers_log) if settings.workers.control_groups else None
    # Also under explicit control, where the first load would wait for them.
    expected = registry.expected_modules(settings.repository.roots)
    try:
        launcher = WorkerLauncher(expected, workers_log, settings.workers, groups)
    except ValueError as error:
        print(f"rocserve serve: --worker-user={settings.workers.user}: {error}", file=sys.stderr)
        return 2
    launcher.start()

    # Imported last, because it imports gRPC.
    if settings.log.format == "json":
        # gRPC's own errors, which clients with wrong headers cause, are not JSON.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    os.environ.setdefault(*_QUIET_GRPC)
    # gRPC must read and write sockets on the thread that polls its completion queue, not on its own threads: that saves
    # each call a switch of threads. The user's own setting takes precedence.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_listener")
    from rocserve.server import run_server

    # The requests of a few batches are thousands of objects, which are freed without the collector. At the default of
    # 700 new objects its scans took up to a tenth of the data plane's time, and one of all imported objects 30 ms.
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()
    return run_server(settings, command, launcher, signals, log)


def _control_groups(log: logging.Logger) -> ControlGroups | None:
    from rocserve.workers.control_groups import NotDelegated, take_delegation

    try:
        groups = take_delegation()
    except NotDelegated as reason:
        log.debug("the server itself checks the memory and tasks of models, without cgroups: %s", reason)
        return None
    log.debug("the kernel bounds the memory and tasks of models, in cgroups below %s", groups.folder)
    return groups


if __name__ == "__main__":
    sys.exit(main())
