"""Which models are served, of all that are to be."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.core.serving import IndexEntry
from rocserve.repository.version import UNLOADED, VersionState


def outcomes(rows: Iterable[IndexEntry]) -> dict[str, bool]:
    """Whether each model is served, by name; `rows`: those of the repository index. Models that were not
    asked for are passed over."""
    rows = list(rows)
    served = {row.name for row in rows if row.state == VersionState.READY.value}
    wanted = {row.name for row in rows if row.reason not in ("", UNLOADED)}
    return {name: name in served for name in sorted(served | wanted)}


def summary(rows: Iterable[IndexEntry], status_command: str) -> str:
    """What came of the models that were there at the start, in one line. `status_command`: shows why."""
    found = outcomes(rows)
    count = sum(found.values())
    text = f"{count} model{'' if count == 1 else 's'} served"
    if all(found.values()):
        return text
    return f"{text}, not served: {', '.join(name for name in found if not found[name])}; {status_command} says why"
