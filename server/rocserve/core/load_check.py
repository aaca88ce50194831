"""The load check's modes, and its findings about a version: each version is tried before it is served."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from rocserve.core.errors import ServeError, StatusCode

ROWS, PADDING, REFERENCE, RECORDED_ANSWERS = KINDS = ("rows", "padding", "reference", "recorded answers")
"""The kinds of failures; label `kind` of the metric."""
RECORDED_FILE = "check.npz"
"""The file of recorded answers, in a version's folder, or in the model's folder for all versions."""


class LoadCheckMode(enum.Enum):
    """The values of --load-check and of the parameter `load_check`."""

    ON = "on"
    WARN = "warn"
    """An engine whose results differ from the reference's serves, with a warning."""
    STRICT = "strict"
    """A configuration that batches rows that depend on each other is refused."""
    OFF = "off"


@dataclass(frozen=True, slots=True)
class LoadCheckReport:
    """The load check's findings about a version."""

    parts: tuple[str, ...] = ()
    """Clauses in their order, such as "rows are independent"; empty = nothing was checked."""
    warning: str = ""
    """For the index, the page and the log; "" = nothing to warn of."""
    failures: tuple[str, ...] = ()
    """The kinds of checks that failed."""
    seconds: float = 0.0
    """0 = all verdicts came from the cache, or the model's file alone gives them."""

    @property
    def text(self) -> str:
        """All findings in one line; "" = nothing was checked."""
        return "; ".join(self.parts)

    def then(self, later: LoadCheckReport) -> LoadCheckReport:
        """Return this report with that of a later check of the same worker."""
        return LoadCheckReport(
            self.parts + later.parts,
            "; ".join(filter(None, (self.warning, later.warning))),
            self.failures + later.failures,
            self.seconds + later.seconds,
        )


NOT_CHECKED = LoadCheckReport()


def merged(reports: Iterable[LoadCheckReport]) -> LoadCheckReport:
    """Return one report for the workers of a version, which check at the same time: each finding once."""
    found = [*reports]
    return LoadCheckReport(
        tuple(dict.fromkeys(part for report in found for part in report.parts)),
        "; ".join(dict.fromkeys(report.warning for report in found if report.warning)),
        tuple(dict.fromkeys(kind for report in found for kind in report.failures)),
        max((report.seconds for report in found), default=0.0),
    )


class LoadCheckFailed(ServeError):
    """The load check refuses a version, or an engine for it: with engine "auto", the next engine is tried."""

    def __init__(self, kind: str, text: str, code: StatusCode = StatusCode.INVALID_ARGUMENT) -> None:
        """`kind`: one of KINDS. The text names the output and the difference."""
        super().__init__(code, text)
        self.kind = kind

    def with_text(self, text: str) -> LoadCheckFailed:
        error = LoadCheckFailed(self.kind, text, self.code)
        error.can_pass = self.can_pass
        return error
