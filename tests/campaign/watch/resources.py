"""Watches resources: memory and descriptors of the servers, sampled during the whole run and bounded."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS, wait_until

from campaign.stage import Stage

PAUSE_SECONDS = 2.0
MIB = 1 << 20
MOST_PROCESSES = 120
"""Bound for the processes of one server; about thirty serve the models and their swaps."""
MOST_DESCRIPTORS = 4000
"""Bound for a server process: it has some hundreds, and one for each connection of a flood."""
QUIET_SECONDS = PATIENCE_SECONDS
"""Seconds within which the servers have released what the last action took."""

GROWTH = 0.15
MEMORY_SLACK_MIB = 48.0
"""Memory that a server process may have gained since settling: glibc keeps an arena for each thread."""
WORKERS_SLACK_MIB = 96.0
"""Workers share what their zygote has imported; workers of a later zygote do not share it with them."""
DESCRIPTOR_SLACK = 8
"""Connections of clients that are about to close."""
WORKER_DESCRIPTORS = 8
"""Descriptors of a worker's memory (before Python 3.13), once all the worker's batches have been under way together."""
TREND_SAMPLES = 60
"""Fewer samples (two minutes) show no trend."""


@dataclass(frozen=True, slots=True)
class Sample:
    moment: float
    server_mib: float
    """Memory that only the server process has."""
    all_mib: float
    """Memory of all the server's processes, shared memory counted once."""
    descriptors: int
    processes: int


def look(server: RocserveProcess) -> Sample:
    process = server.server_process()
    family = server.family()
    memory = process.memory_full_info()
    return Sample(
        time.monotonic(), memory.uss / MIB, sum(map(_proportional, family)) / MIB, process.num_fds(), len(family)
    )


def _proportional(process: psutil.Process) -> int:
    """Bytes, with the process's share of shared pages; 0 for a process that has ended."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))


def _descriptor_slack(sample: Sample) -> int:
    return DESCRIPTOR_SLACK + WORKER_DESCRIPTORS * sample.processes


class ResourceWatch:
    """Samples one server. Reports a finding, and ends the campaign, if the server takes more than the machine may
    give."""

    def __init__(self, name: str, server: RocserveProcess, stage: Stage, most_mib: float) -> None:
        self.name = name
        self.samples: list[Sample] = []
        self.settled: Sample | None = None
        self.final: Sample | None = None
        self.family: set[psutil.Process] = set()
        """All processes of the server that were ever seen."""
        self._server = server
        self._stage = stage
        self._most_mib = most_mib
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"resources of {name}")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        while not self._stopping.wait(PAUSE_SECONDS):
            begun = time.monotonic()
            try:
                self._sample()
            except (psutil.Error, AssertionError) as error:
                if self._stage.damage.was_out(self.name, begun, time.monotonic()):
                    continue
                self._stage.findings.add("server ended", f"{self.name}: {error}; see its log")
                self._stage.ending.set()
                return

    def _sample(self) -> None:
        self.family.update((self._server.server_process(), *self._server.family()))
        sample = look(self._server)
        self.samples.append(sample)
        taken = (sample.all_mib, sample.processes, sample.descriptors)
        bounds = (self._most_mib, MOST_PROCESSES, MOST_DESCRIPTORS)
        if any(value > bound for value, bound in zip(taken, bounds, strict=True)):
            text = "{:.0f} MiB, {} processes, {} descriptors"
            self._stage.findings.add(
                "too much taken", f"{self.name}: {text.format(*taken)}; bounds {text.format(*bounds)}"
            )
            self._stage.ending.set()

    def compare(self) -> None:
        """Compare the resources after settling with those after the last action."""
        settled = self.settled
        assert settled is not None
        bound = settled.server_mib * (1 + GROWTH) + MEMORY_SLACK_MIB
        most_descriptors = settled.descriptors + _descriptor_slack(settled)

        def is_back() -> bool:
            self.final = look(self._server)
            return (
                self.final.server_mib <= bound
                and self.final.descriptors <= most_descriptors
                and self.final.processes <= settled.processes
            )

        try:
            wait_until(is_back, seconds=QUIET_SECONDS)
        except AssertionError:
            assert self.final is not None
            self._stage.findings.add(
                "resources kept",
                f"{self.name}: {settled.server_mib:.0f} MiB, {settled.descriptors} descriptors and"
                f" {settled.processes} processes became {self.final.server_mib:.0f} MiB, {self.final.descriptors} and"
                f" {self.final.processes} after the last action",
            )

    def check_trend(self) -> None:
        """Compare the medians of the second and the last quarter: a slow leak grows between them."""
        if len(self.samples) < TREND_SAMPLES:
            return
        quarter = len(self.samples) // 4
        early, late = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        for what, value, slack in (
            ("the server's own MiB", lambda sample: sample.server_mib, MEMORY_SLACK_MIB),
            ("MiB with workers", lambda sample: sample.all_mib, WORKERS_SLACK_MIB),
            ("descriptors", lambda sample: sample.descriptors, _descriptor_slack(self.samples[0])),
        ):
            before, after = (statistics.median(map(value, part)) for part in (early, late))
            if after > before * (1 + GROWTH) + slack:
                self._stage.findings.add("grows", f"{self.name}: {what}, from {before:.0f} to {after:.0f}")
