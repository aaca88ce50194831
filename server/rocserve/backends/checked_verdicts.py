"""Checks a model before it is served, unless the cache has the verdict."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from rocserve.backends.base import ModelSource
from rocserve.backends.written_sizes import written_values
from rocserve.cache.folders import cache_directory
from rocserve.core.padding import Padding
from rocserve.load_check.padding_verdict import PaddingVerdict, undecided
from rocserve.load_check.rows import Independence, RowsVerdict
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key

Verdict = TypeVar("Verdict", RowsVerdict, PaddingVerdict)


def checked_rows(
    model: ModelSource, key: str, seconds: float, check: Callable[[], RowsVerdict]
) -> tuple[RowsVerdict, float]:
    """Return whether rows depend on each other, and the seconds that the check took; 0 = it was known. `seconds`: the
    time for the check. Never raises the check's errors."""
    return _checked(
        model,
        key,
        RowsVerdict,
        "running batches of different rows",
        seconds,
        check,
        lambda why: RowsVerdict(Independence.UNDECIDED, f"not checked: {why}", is_lasting=False),
    )


def checked_padding(
    model: ModelSource,
    padding: Padding,
    seconds: float,
    parts: Sequence[str],
    check: Callable[[], PaddingVerdict],
) -> tuple[PaddingVerdict, float]:
    """Return whether the dimensions may be padded; the rest as `checked_rows`. `parts`: further facts that the verdict
    depends on, beside the padding and its written values."""
    key = verdict_key("padding", repr(padding), repr(sorted(written_values(model.config))), *parts)
    what = "padding short inputs"
    return _checked(model, key, PaddingVerdict, what, seconds, check, lambda why: undecided(padding, why))


def _checked(
    model: ModelSource,
    key: str,
    kind: type[Verdict],
    what: str,
    seconds: float,
    check: Callable[[], Verdict],
    unknown: Callable[[str], Verdict],
) -> tuple[Verdict, float]:
    def checked() -> Verdict:
        with model.checking(what):
            try:
                return check()
            except Exception as error:
                # A fault of the check must not keep a model from being served, one request after the other.
                logging.getLogger(__name__).warning("model '%s': the load check failed", model.name, exc_info=True)
                return unknown(str(error))

    # Five seconds beyond the check's own limit, a worker no longer waits for another's verdict.
    return VerdictCache(cache_directory(model.settings)).find_or_check(
        key, kind, checked, lambda verdict: verdict.is_lasting, seconds + 5.0
    )
