"""What came of the models that were there at the start, in one line."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.core.serving import IndexEntry
from rocserve.repository.managed_version import VersionState

_UNLOADED = "unloaded"


def summary(rows: Iterable[IndexEntry]) -> str:
    """`rows`: those of the repository index. Models that nobody has asked for are passed over."""
    rows = list(rows)
    served = {row.name for row in rows if row.state == VersionState.READY.value}
    missing = sorted({row.name for row in rows if row.reason not in ("", _UNLOADED)} - served)
    text = f"{len(served)} model{'' if len(served) == 1 else 's'} served"
    if not missing:
        return text
    return f"{text}, not served: {', '.join(missing)}; `rocserve status` says why"
