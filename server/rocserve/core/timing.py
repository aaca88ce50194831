"""The times of a request, for a client that asks for them with the request parameter `timing`."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rocserve.core.load_check import LoadCheckReport
from rocserve.core.parameters import TIMING, Parameters
from rocserve.core.statistics import PhaseTotals

_PREFIX = f"{TIMING}_"
TOTAL = f"{_PREFIX}total_ns"
"""The parameter that all answers with times have."""
MOST_STEPS = 64
"""Reported steps of an ensemble. Decoupled ones may run endlessly, and each response reports all steps."""
_DURATIONS = ("total", "queue", "compute_input", "compute_infer", "compute_output")


@dataclass(slots=True, eq=False)
class RequestTiming:
    """The times of one request so far. Only requests whose clients ask for it have one. On the data plane's thread."""

    model_name: str
    started_ns: int
    version: int = 0
    load_check: LoadCheckReport | None = None
    """None until a version has the request."""
    is_ensemble: bool = False
    is_cached: bool = False
    """The response cache has answered."""
    instance: str = ""
    """"" = no instance has run the request (yet)."""
    batch_size: int = 0
    """Rows of the execution, of all its requests together."""
    queue_ns: int = 0
    phases: PhaseTotals | None = None
    """None until the execution has ended."""
    ended_ns: int = 0
    steps: deque[RequestTiming] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    """The steps that an ensemble has begun last, in their order."""

    def note_version(self, version: int, load_check: LoadCheckReport, is_ensemble: bool) -> None:
        self.version, self.load_check, self.is_ensemble = version, load_check, is_ensemble

    def note_start(self, queue_start_ns: int, compute_start_ns: int, instance: str, batch_size: int) -> None:
        """Note that an instance runs the request. Of a request that runs again, the last execution counts."""
        self.queue_ns = compute_start_ns - queue_start_ns
        self.instance, self.batch_size = instance, batch_size

    def note_run(self, times: tuple[int, int, int, int]) -> None:
        """`times`: see PhaseTotals.add_run."""
        self.phases = PhaseTotals()
        self.phases.add_run(times)

    def begin_step(self, model_name: str) -> RequestTiming:
        step = RequestTiming(model_name, time.monotonic_ns())
        self.steps.append(step)
        return step

    def report(self) -> dict[str, Any]:
        """Return the report for the client, with durations in nanoseconds. The parts of an ensemble's time are the sums
        over its steps, some of which may run at the same time."""
        found: dict[str, Any] = {"total_ns": (self.ended_ns or time.monotonic_ns()) - self.started_ns}
        if self.is_cached:
            found["cached"] = True
        elif self.is_ensemble:
            steps = [step.report() for step in self.steps]
            for name in _DURATIONS[1:]:
                found[f"{name}_ns"] = sum(step.get(f"{name}_ns", 0) for step in steps)
            found["steps"] = steps
        elif self.instance:
            found["queue_ns"] = self.queue_ns
            if self.phases is not None:
                found["compute_input_ns"] = self.phases.compute_input
                found["compute_infer_ns"] = self.phases.compute_infer
                found["compute_output_ns"] = self.phases.compute_output
            found |= {"batch_size": self.batch_size, "instance": self.instance}
        checked = self.load_check.text if self.load_check is not None else ""
        return {"model": self.model_name, "version": str(self.version), **found, "load_check": checked or "not checked"}

    def parameters(self) -> Parameters:
        """Return the report as parameters of the response; the steps are one text, in JSON."""
        report = self.report()
        del report["model"]
        if "steps" in report:
            report["steps"] = json.dumps(report["steps"], separators=(",", ":"))
        return {f"{_PREFIX}{name}": value for name, value in report.items()}


def server_timing(parameters: Parameters) -> Mapping[str, str]:
    """Return the header `Server-Timing` (W3C) for a response's parameters; none for a response without times, or with
    parameters of these names that a model has set."""
    try:
        return {"Server-Timing": _header(parameters)} if TOTAL in parameters else {}
    except (ValueError, TypeError, LookupError, AttributeError):
        return {}


def _header(parameters: Parameters) -> str:
    report = {name.removeprefix(_PREFIX): value for name, value in parameters.items() if name.startswith(_PREFIX)}
    header = ", ".join(_metrics(report))
    for index, step in enumerate(json.loads(str(report.get("steps", "[]")))):
        more = ", ".join(_durations(step, f"step{index}_", str(step["model"])))
        # Some proxies refuse more than 4 KiB of headers, so further steps are left out.
        if len(header) + len(more) > 2048:
            break
        header += f", {more}"
    return header


def _metrics(report: Mapping[str, Any]) -> Iterator[str]:
    yield from _durations(report)
    if report.get("cached"):
        yield "cached"
    for name in ("batch_size", "version", "instance", "load_check"):
        if name in report:
            yield f"{name};desc={_quoted(str(report[name]))}"


def _durations(report: Mapping[str, Any], prefix: str = "", model: str = "") -> Iterator[str]:
    """`model`: the description of the first; "" = none."""
    for name in _DURATIONS:
        if (nanoseconds := report.get(f"{name}_ns")) is not None:
            about = f";desc={_quoted(model)}" if model and name == "total" else ""
            yield f"{prefix}{name};dur={nanoseconds / 1e6:.3f}{about}"


def _quoted(text: str) -> str:
    """Return a text as a header's quoted string, cut, and in ASCII: other characters become question marks."""
    plain = "".join(letter if " " <= letter <= "~" else "?" for letter in text[:256])
    return '"' + plain.replace("\\", "\\\\").replace('"', '\\"') + '"'
