"""Runs `rocserve cache list` and `rocserve cache prune`, which work on the compiled programs in the cache folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from rich.console import Console

from rocserve.backends.migraphx.compiling.program_cache import CacheEntry, LoadTrial, ProgramCache, open_cache
from rocserve.cache.folders import cache_directory
from rocserve.core.errors import ServeError
from rocserve.core.printable import readable_size as size
from rocserve.load_check.verdict_cache import VerdictCache
from rocserve.settings import EngineSettings
from rocserve.settings.flag import ABSOLUTE_FOLDER, SWITCH, Kind, byte_size, flag, positional, text
from rocserve.verbs.printing import console_on, counted, say, show, table
from rocserve.verbs.verb import Verb

_KEY_DIGITS = 12
_UNKNOWN = "-"


_DIRECTORY_HELP = "the cache's folder (default rocserve/ in $XDG_CACHE_HOME or ~/.cache)"


@dataclass(frozen=True, slots=True)
class ListOptions:
    cache_directory: str = flag("", ABSOLUTE_FOLDER, _DIRECTORY_HELP)


@dataclass(frozen=True, slots=True)
class PruneOptions:
    cache_directory: str = flag("", ABSOLUTE_FOLDER, _DIRECTORY_HELP)
    size: int | None = flag(
        None,
        Kind("BYTES", partial(byte_size, least=0, expected="a number of bytes such as 500M or 10G")),
        "how much the remaining programs may take, e.g. 500M or 10G (default 20G)",
        exclusive=True,
    )
    all: bool = flag(
        False,
        SWITCH,
        "remove all of these programs, and forget which files crashed and what load checks found",
        exclusive=True,
    )
    models: tuple[str, ...] = positional(
        (), text("MODEL"), "remove the programs of these models, and no others", nargs="*", exclusive=True
    )


def list_programs(options: ListOptions) -> None:
    """Print the cached programs, and the files that are not loaded again because they crashed. Raises ServeError."""
    console, settings = console_on(), EngineSettings(options.cache_directory)
    if (cache := _open_cache(settings, console)) is None:
        return
    now = time.time()
    entries = list(reversed(cache.entries()))
    if entries:
        columns = ("program", "model", "precision", "target", "MIGraphX", "batch", "size", "last used")
        show(console, table("", columns, [_row(entry, now) for entry in entries], left=5))
    for _, trial in cache.load_trials.entries():
        if trial.crash:
            age, crash = _age(now - trial.time), " ".join(trial.crash.split())
            say(
                console,
                f"not tried again until it changes: {trial.file} of model {trial.model}, which crashed {age}"
                f" (MIGraphX {trial.migraphx_version}): {crash}",
            )
    say(console, _summary(cache, entries))
    if verdicts := VerdictCache(cache_directory(settings)).count:
        say(console, f"{counted(verdicts, 'verdict')} of load checks")


def prune_programs(options: PruneOptions) -> None:
    """Remove programs: those of the named models, or all, or the least recently used ones until the rest fits the limit
    (default: the setting's). For the named models, or with `all`, crashed load trials are forgotten too, so that their
    files are tried again. Raises ServeError or OSError if a folder cannot be used, after the removable programs have
    been removed and reported."""
    console, settings = console_on(), EngineSettings(options.cache_directory)
    models = options.models
    if (cache := _open_cache(settings, console)) is None:
        return
    before = cache.entries()
    limit = 0 if options.all else settings.cache_bytes if options.size is None else options.size
    failure: ServeError | None = None
    named = [partial(cache.remove, entry.key) for entry in before if _model(entry) in models]
    for remove in named if models else [partial(cache.prune, limit)]:
        try:
            remove()
        except ServeError as error:
            failure = failure or error
    removed, left = [entry for entry in before if not entry.path.exists()], cache.entries()
    # After a failure it is not known which of the rest are merely in use.
    in_use = [entry for entry in left if _model(entry) in models] if models else _over(left, limit)
    forgotten: list[LoadTrial] = []
    for key, trial in cache.load_trials.entries():
        if options.all or trial.model in models:
            try:
                cache.load_trials.forget(key)
            except OSError:
                if failure is None:
                    raise
                # The folder is not writable. The error about the programs came first and says so.
                continue
            if trial.crash:
                forgotten.append(trial)
    verdicts = VerdictCache(cache_directory(settings)).forget_all() if options.all else 0
    for entry in removed:
        say(console, f"removed {_named(entry)}, {size(entry.size_bytes)}")
    for entry in () if failure else in_use:
        say(console, f"kept {_named(entry)}: a process is using it")
    for trial in forgotten:
        say(console, f"forgot that {trial.file} of model {trial.model} crashed: it is tried again")
    if verdicts:
        say(console, f"forgot {counted(verdicts, 'verdict')} of load checks: models are checked again")
    known = {*map(_model, before), *(trial.model for trial in forgotten)}
    for name in models:
        if name not in known:
            say(console, f"the cache has nothing of model {name}")
    total = sum(entry.size_bytes for entry in removed)
    count = counted(len(removed), "program")
    say(console, f"{count} removed, {size(total)}; {_summary(cache, cache.entries())}")
    if failure is not None:
        raise failure


def _over(entries: Sequence[CacheEntry], limit: int) -> list[CacheEntry]:
    """Return the least recently used programs without which the others fit the limit."""
    excess = sum(entry.size_bytes for entry in entries) - limit
    before = accumulate((entry.size_bytes for entry in entries), initial=0)
    return [entry for entry, size in zip(entries, before, strict=False) if size < excess]


def _open_cache(settings: EngineSettings, console: Console) -> ProgramCache | None:
    """Return the cache. If its folder does not exist, say so and return None. Raises ServeError."""
    directory = cache_directory(settings)
    if directory.exists():
        return open_cache(settings)
    say(console, f"no programs in {directory}: the folder does not exist")
    return None


def _row(entry: CacheEntry, now: float) -> tuple[str, ...]:
    used = _age(now - entry.used_at) if entry.used_at else _UNKNOWN
    if entry.about is None:
        return (entry.key[:_KEY_DIGITS], "(cannot be read)", *[_UNKNOWN] * 4, size(entry.size_bytes), used)
    recipe = entry.about.recipe
    return (
        entry.key[:_KEY_DIGITS],
        entry.about.model,
        recipe.options.precision.value,
        " ".join(filter(None, (recipe.options.target.value, recipe.environment.gpu_architecture))),
        recipe.environment.migraphx_version,
        _batch(entry),
        size(entry.size_bytes),
        used,
    )


def _batch(entry: CacheEntry) -> str:
    recipe = entry.about.recipe if entry.about else None
    if recipe is None:
        return _UNKNOWN
    return str(recipe.batch_size or _UNKNOWN)


def _summary(cache: ProgramCache, entries: Sequence[CacheEntry]) -> str:
    total = sum(entry.size_bytes for entry in entries)
    compiling = len(cache.compiling())
    # Folders outside the cache that hold programs because the cache's own folder could not take them.
    others = {str(entry.path.parents[1]) for entry in entries} - {str(cache.directory)}
    return (
        f"{counted(len(entries), 'program')}, {size(total)} in {cache.directory}"
        + "".join(f" and {place}" for place in sorted(others))
        + (f"; {counted(compiling, 'program')} being compiled" if compiling else "")
    )


def _model(entry: CacheEntry) -> str | None:
    return entry.about.model if entry.about else None


def _named(entry: CacheEntry) -> str:
    batch, model = _batch(entry), _model(entry)
    return (
        f"{entry.key[:_KEY_DIGITS]}"
        + (f" of model {model}" if model else "")
        + (f", batch {batch}" if batch != _UNKNOWN else "")
    )


def _age(seconds: float) -> str:
    """Return an age in the largest unit of which at least two have passed: "119 s ago", "2 min ago"."""
    amount, unit = max(seconds, 0.0), "s"
    for factor, larger in ((60, "min"), (60, "h"), (24, "d")):
        if amount < 2 * factor:
            break
        amount, unit = amount / factor, larger
    return f"{amount:.0f} {unit} ago"


VERB = Verb(
    "List or remove MIGraphX's programs that are not in use. Folders of ONNX Runtime and PyTorch may be deleted.",
    actions={
        "list": Verb(
            "Show the programs in the cache, and the files that are not loaded again because they crashed.",
            ListOptions(),
            list_programs,
        ),
        "prune": Verb(
            "Remove programs, the least recently used ones first, until the rest takes no more than the limit.",
            PruneOptions(),
            prune_programs,
        ),
    },
)
