"""Gives repositories short, distinct names for people, because the page does not show the server's paths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rocserve.settings import RepositorySettings


def root_labels(settings: RepositorySettings) -> Mapping[Path, str]:
    """Return each repository's label: its URL, or the end of its path. Empty if there is only one."""
    roots = tuple(dict.fromkeys(settings.roots))
    if len(roots) < 2:
        return {}
    labels = {place.root: place.url for place in settings.remotes}
    local = {root: root.absolute().parts for root in roots if root not in labels}
    longest = max(map(len, local.values()), default=0)
    for length in range(1, longest + 1):
        ends = {root: str(Path(*parts[-length:])) for root, parts in local.items() if root not in labels}
        counts = Counter(ends.values())
        labels |= {root: end for root, end in ends.items() if counts[end] == 1 or length == longest}
    return labels
