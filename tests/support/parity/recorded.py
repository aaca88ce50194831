"""Triton's outcomes as files of tests/data/triton hold them, so that rocserve can be compared without a Triton."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from support.parity.contrast import contrast
from support.parity.exchange import Exchange, Outcome, digest_of

ANSWERS = Path(__file__).parents[2] / "data" / "triton"
AGAIN = "record again: make record-triton"
_FOLDER = "<folder>"
"""Stands for the folder of the servers' models, which is another in each run."""
_BYTES = "base64"
_DIGEST_DIGITS = 16


class RecordedTriton:
    """Plays Triton in the exchanges of one test module, with outcomes that a running Triton once had. An outcome is
    recorded together with a digest of all that it depends on, and is refused when that has changed."""

    def __init__(self, file: Path, folder: Path, records: bool = False) -> None:
        """`folder`: the folder of the servers' models in this run. `records`: record confirmed outcomes, and replace
        all that the file held."""
        self._file = file
        self._folder = json.dumps(str(folder))[1:-1]
        self.is_recording = records
        self._depends_on: list[str] = []
        self._before = self._read(file.read_text()) if file.exists() else {}
        self._entries = {} if records else self._before

    def depend_on(self, digest: str) -> None:
        """Make all outcomes depend on the content that has this digest. Called before the first exchange."""
        self._depends_on.append(digest)

    def take(self, exchange: Exchange) -> list[Outcome]:
        """The recorded outcomes of the exchange's steps. Raises AssertionError if there are none."""
        entry = self._entries.get(exchange.name)
        assert entry, f"{exchange.name!r} is not in {self._file}; {AGAIN}"
        assert entry["digest"] == self._digest(exchange), (
            f"{exchange.name!r} was recorded for other requests, models or flags; {AGAIN}"
        )
        return [Outcome(**outcome) for outcome in entry["outcomes"]]

    def confirm(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        """Record Triton's outcomes of an exchange, or assert that they equal the recorded ones."""
        if self.is_recording:
            self._keep(exchange, outcomes)
            return
        for index, (recorded, found) in enumerate(zip(self.take(exchange), outcomes, strict=True)):
            assert recorded == found, (
                f"{exchange.name}, step {index}: Triton answers otherwise than recorded; {AGAIN}\n"
                f"{contrast(recorded, found, ('recorded', 'triton'))}"
            )

    def write(self) -> None:
        """Write each outcome on a line, exchanges sorted by name."""
        entries = [self._written(name) for name in sorted(self._entries)]
        self._file.parent.mkdir(exist_ok=True)
        self._file.write_text("{\n" + ",\n".join(entries) + "\n}\n")

    def _keep(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> None:
        name = exchange.name
        assert name not in self._entries, f"there are two exchanges {name!r} in {self._file.stem}"
        kept = [{key: value for key, value in asdict(entry).items() if value not in ("", None)} for entry in outcomes]
        entry = {"digest": self._digest(exchange), "outcomes": kept}
        # The order of Triton's maps is undefined. An unchanged outcome keeps its old text, so that a diff shows real
        # changes only.
        self._entries[name] = self._before[name] if self._before.get(name) == entry else entry
        back = self._read("{" + self._written(name) + "}")[name]["outcomes"]
        assert [Outcome(**entry) for entry in back] == list(outcomes), (
            f"{name!r} has an outcome that cannot be recorded"
        )

    def _digest(self, exchange: Exchange) -> str:
        return digest_of(*(part.encode() for part in (*self._depends_on, exchange.digest())))[:_DIGEST_DIGITS]

    def _written(self, name: str) -> str:
        entry = self._entries[name]
        outcomes = ",\n".join(
            json.dumps(outcome, ensure_ascii=False, default=_from_bytes) for outcome in entry["outcomes"]
        )
        text = (
            f'{json.dumps(name, ensure_ascii=False)}: {{"digest": "{entry["digest"]}", "outcomes": [\n{outcomes}\n]}}'
        )
        return text.replace(self._folder, _FOLDER)

    def _read(self, text: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(text.replace(_FOLDER, self._folder), object_hook=_to_bytes)
        return found


def folder_digest(folder: Path) -> str:
    """A digest of the paths and contents of all files below a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return digest_of(*(part for path in files for part in (str(path.relative_to(folder)).encode(), path.read_bytes())))


def _from_bytes(value: bytes) -> dict[str, str]:
    return {_BYTES: base64.b64encode(value).decode()}


def _to_bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if value.keys() == {_BYTES} else value
