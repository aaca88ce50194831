"""Where rocserve means to answer otherwise than Triton. Both sides are asserted, so an entry can become untrue."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from support.parity.exchange import Outcome


@dataclass(frozen=True, slots=True)
class Difference:
    """What Triton says and what rocserve says, as patterns that are searched in the printed outcomes."""

    reason: str
    exchanges: Sequence[str]
    """Names of the exchanges that show it: in at least one step of each, outcomes differ in this way."""
    triton: str | None
    """None: Triton is not asked, because the exchange crashes it or keeps it for good."""
    rocserve: str

    def explains(self, triton: Outcome | None, rocserve: Outcome) -> bool:
        """Whether a pair of outcomes differs in this way."""
        if re.search(self.rocserve, str(rocserve)) is None:
            return False
        if self.triton is None or triton is None:
            return self.triton is None and triton is None
        return re.search(self.triton, str(triton)) is not None


DELIBERATE_DIFFERENCES: tuple[Difference, ...] = ()
