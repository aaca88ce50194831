"""Canaries: files outside of the repositories that the servers must neither open nor change, and never reveal to
clients."""

from __future__ import annotations

import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from support.models import add_constant
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer

from campaign.findings import Findings


class Canaries(FileSystemEventHandler):
    """Writes canary files into a folder, and watches by inotify whether anybody opens or changes them."""

    def __init__(self, folder: Path, findings: Findings) -> None:
        self.folder = folder
        self.secret = f"canary-{secrets.token_hex(16)}"
        self._findings = findings
        self._observer = Observer()
        self._sizes: dict[Path, tuple[int, int]] = {}

    def __enter__(self) -> Self:
        self.text.write_text(self.secret)
        self.model.mkdir()
        (self.model / "1").mkdir()
        (self.model / "1" / "model.onnx").write_bytes(add_constant(1.0))
        (self.model / "config.pbtxt").write_text(f'# {self.secret}\nbackend: "onnxruntime"\n')
        self.program.write_text(f"#!/bin/sh\ntouch {self.ran}\n")
        self.program.chmod(0o755)
        self._sizes = self._look()
        self._observer.schedule(self, str(self.folder), recursive=True)
        self._observer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._observer.stop()
        self._observer.join(10)

    @property
    def text(self) -> Path:
        return self.folder / "secret.txt"

    @property
    def model(self) -> Path:
        return self.folder / "hidden_model"

    @property
    def program(self) -> Path:
        return self.folder / "program.sh"

    @property
    def ran(self) -> Path:
        """The file that exists if the program has run."""
        return self.folder / "ran"

    def on_any_event(self, event: FileSystemEvent) -> None:
        # Opening or reading the folder itself is harmless.
        if not event.is_directory:
            self._findings.add("canary touched", f"{event.event_type}: {event.src_path!r}")

    def search(self, where: str, answer: bytes) -> None:
        """Report a finding if the secret is in what a client has received."""
        if self.secret.encode() in answer:
            self._findings.add("secret told", f"{where} answered with what {self.text} holds")

    def check(self) -> None:
        """Check that the files are unchanged, whatever inotify has reported."""
        if (now := self._look()) != self._sizes:
            self._findings.add("canary touched", f"{self._sizes} became {now}")

    def _look(self) -> dict[Path, tuple[int, int]]:
        """Path -> size, time of the last change."""
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {path: (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
