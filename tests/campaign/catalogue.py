"""Lists all kinds of actions."""

from __future__ import annotations

from collections.abc import Sequence

from campaign.action import Kind
from campaign.actions import (
    attacks,
    checks,
    drops,
    floods,
    frames,
    fuzz_grpc,
    fuzz_http,
    hangs,
    kills,
    overload,
    own_servers,
    swaps,
    texts,
    versions,
)

KINDS: tuple[Kind, ...] = (
    *swaps.KINDS,
    *drops.KINDS,
    *kills.KINDS,
    *hangs.KINDS,
    *fuzz_grpc.KINDS,
    *fuzz_http.KINDS,
    *frames.KINDS,
    *floods.KINDS,
    *overload.KINDS,
    *attacks.KINDS,
    *checks.KINDS,
    *texts.KINDS,
    *versions.KINDS,
    *own_servers.KINDS,
)


def chosen(names: Sequence[str]) -> tuple[Kind, ...]:
    """The kinds with these subjects or names; all kinds if none are given."""
    kinds = tuple(kind for kind in KINDS if not names or {kind.name, kind.name.partition(".")[0]} & set(names))
    if unknown := [name for name in names if not any(f"{kind.name}.".startswith(f"{name}.") for kind in KINDS)]:
        raise ValueError(f"no actions are called {', '.join(unknown)}; there are {', '.join(k.name for k in KINDS)}")
    return kinds
