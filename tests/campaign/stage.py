"""The stage: two servers, their repositories, and what the campaign knows of both."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from support.metrics import FLAGS as METRICS
from support.server import RocserveProcess

from campaign import models
from campaign.canaries import Canaries
from campaign.findings import Damage, Findings, Tally
from campaign.truth import Constants

SETTLE_SECONDS = 0.2
COMMON = (
    "--strict-readiness=false",
    # Clients of a server that was killed find their models when they reach the next one.
    "--listen-when-loaded",
    "--allow-client-shm=true",
    "--cache-config=local,size=1048576",
    "--exit-timeout-secs=10",
    "--drain-timeout-secs=10",
    *METRICS,
)
"""A model that is being restarted makes the server unready by default; here it must always be ready."""
FRONT_ENDS = 1
"""Front ends of each protocol for the explicit server; the other server serves its clients itself."""


@dataclass
class Stage:
    folder: Path
    poll: RocserveProcess
    explicit: RocserveProcess
    canaries: Canaries
    findings: Findings
    damage: Damage = field(default_factory=Damage)
    tally: Tally = field(default_factory=Tally)
    ending: threading.Event = field(default_factory=threading.Event)
    """Set: no further action begins."""
    constants: dict[str, Constants] = field(
        default_factory=lambda: {name: Constants(models.FIRST) for name in models.SWAPPED}
    )
    encoders: Constants = field(default_factory=lambda: Constants(0.0))
    """The numbers of the encoders that may answer for a text."""
    locks: defaultdict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))
    """A lock for each thing that only one action at a time may change."""

    @property
    def copied(self) -> Path:
        return self.folder / "copied"

    @property
    def mounted(self) -> Path:
        return self.folder / "mounted"

    @property
    def checked_out(self) -> Path:
        return self.folder / "checked_out"

    @property
    def staging(self) -> Path:
        """A folder on the repositories' file system, outside of all repositories."""
        return self.folder / "staging"

    @property
    def servers(self) -> dict[str, RocserveProcess]:
        return {"poll": self.poll, "explicit": self.explicit}


@contextmanager
def open_stage(folder: Path, findings: Findings) -> Iterator[Stage]:
    """Lay out the repositories and start the servers; at the end kill what is left of them."""
    for name, fill in (
        ("copied", models.fill_copied),
        ("mounted", models.fill_mounted),
        ("checked_out", models.fill_checked_out),
        ("remote", models.fill_explicit),
    ):
        (folder / name).mkdir()
        fill(folder / name)
    for name in ("staging", "outside", "temporary"):
        (folder / name).mkdir()
    # Makes files visible that the servers write to the usual temporary folders.
    environment = {"TMPDIR": str(folder / "temporary"), "HOME": str(folder / "temporary")}
    repositories = [folder / name for name in ("copied", "mounted", "checked_out")]
    settling = ("--log-format=json", f"--repository-settle-secs={SETTLE_SECONDS}", "--repository-poll-secs=1")
    explicit = ("--model-control-mode=explicit", "--load-model=*", f"--front-ends={FRONT_ENDS}")
    with ExitStack() as parts:
        canaries = parts.enter_context(Canaries(folder / "outside", findings))
        poll, remote = (
            parts.enter_context(
                RocserveProcess(
                    folders, *COMMON, *flags, log=folder / f"{name}.log", environment=environment, outlives=False
                )
            )
            for name, folders, flags in (
                ("poll", repositories, settling),
                ("explicit", [folder / "remote"], explicit),
            )
        )
        for server in (poll, remote):
            server.wait_until_ready()
        yield Stage(folder, poll, remote, canaries, findings)
