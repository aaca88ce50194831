"""Checks whether a model's open dimensions may be padded, unless the cache has the verdict."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from rocserve.backends.base import ModelSource
from rocserve.backends.written_sizes import written_values
from rocserve.cache.folders import cache_directory
from rocserve.core.padding import Padding
from rocserve.load_check.padding_verdict import PaddingVerdict, undecided
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key

_LOG = logging.getLogger(__name__)
_WAIT_SECONDS = 5.0
"""The time beyond the check's own after which a worker no longer waits for another's verdict."""


def checked_padding(
    model: ModelSource,
    padding: Padding,
    seconds: float,
    parts: Sequence[str],
    check: Callable[[], PaddingVerdict],
) -> tuple[PaddingVerdict, float]:
    """Return the verdict, and the seconds that it took; 0 = it was known. `seconds`: the time for the check. `parts`:
    further facts that the verdict depends on, beside the padding and its written values. Never raises the check's
    errors."""
    key = verdict_key("padding", repr(padding), repr(sorted(written_values(model.config))), *parts)

    def checked() -> PaddingVerdict:
        model.report_check("padding short inputs")
        try:
            return check()
        except Exception as error:
            # A fault of the check must not keep a model from being served.
            _LOG.warning("model '%s': the load check failed", model.name, exc_info=True)
            return undecided(padding, str(error))
        finally:
            model.report_check("")

    started = time.monotonic()
    known = VerdictCache(cache_directory(model.settings)).find_or_check(
        key, PaddingVerdict, checked, lambda verdict: verdict.is_lasting, seconds + _WAIT_SECONDS
    )
    return known.verdict, 0.0 if known.is_from_cache else time.monotonic() - started
