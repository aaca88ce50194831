"""Downloads a file over HTTP: goes on where it stopped, tries its addresses in turn, accepts the right bytes only."""

from __future__ import annotations

import http.client
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rocserve.tools.get.catalogue import RemoteFile
from rocserve.tools.get.errors import GetError, Interrupted, SourceFailed, WrongContent
from rocserve.tools.get.partial_file import PartialFile
from rocserve.tools.get.progress import DownloadProgress

_BLOCK_BYTES = 1 << 18
_ATTEMPTS = 5
"""In a row without a new byte; then the next address has its turn."""
_PASSING_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504})
"""HTTP statuses that may be gone at the next attempt."""
_RANGE_NOT_SATISFIABLE = 416
_PARTIAL_CONTENT = 206


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait for a server, in seconds."""

    silence: float = 30.0
    """Without a byte, before the connection counts as broken."""
    first_pause: float = 1.0
    """Before the second attempt; each further one doubles it."""


def download(
    file: RemoteFile, target: Path, part: Path, progress: DownloadProgress, patience: Patience | None = None
) -> None:
    """Put the file at `target`, whole or not at all; `part` is where it grows, on the same file system.

    Raises:
        GetError: no address gave the right bytes, there is no room, or somebody else is at it. What was downloaded
            rightly so far stays in `part` for the next time.
    """
    with PartialFile(part) as partial:
        try:
            _check_room(file, partial)
            _try_each_address(file, partial, progress, patience or Patience())
            partial.keep_as(target)
        finally:
            if partial.size == 0:
                partial.discard()


def _try_each_address(file: RemoteFile, partial: PartialFile, progress: DownloadProgress, patience: Patience) -> None:
    failures = []
    for address in file.addresses:
        try:
            return _Download(file, address, partial, progress, patience).run()
        except SourceFailed as failure:
            failures.append(f"  {address}: {failure}")
            progress.note(f"{address}: {failure}")
    hint = "without a network: --untrained builds the same network with random weights, --source=URL names a mirror"
    raise GetError("\n".join((f"'{file.name}' could not be downloaded:", *failures, hint)))


class _Download:
    """The attempts at one address."""

    def __init__(
        self, file: RemoteFile, address: str, partial: PartialFile, progress: DownloadProgress, patience: Patience
    ) -> None:
        self._file = file
        self._address = address
        self._partial = partial
        self._progress = progress
        self._patience = patience

    def run(self) -> None:
        """Raises: SourceFailed."""
        has_begun_before = self._partial.size > 0
        try:
            self._complete()
        except WrongContent:
            if not has_begun_before:
                raise
            # The beginning may be of another time or another address.
            self._progress.note("what an earlier download left is not of this file; beginning anew")
            self._complete()

    def _complete(self) -> None:
        attempts = 0
        while self._partial.size < self._file.size:
            before = self._partial.size
            try:
                self._fetch()
            except Interrupted as interruption:
                attempts = 1 if self._partial.size > before else attempts + 1
                if attempts == _ATTEMPTS:
                    raise SourceFailed(f"{interruption}, {_ATTEMPTS} times in a row") from None
                self._progress.note(f"{interruption}; trying again from byte {self._partial.size}")
                time.sleep(self._patience.first_pause * 2 ** (attempts - 1))
        if self._partial.sha256 != self._file.sha256:
            digest = self._partial.sha256
            self._partial.clear()
            raise WrongContent(f"its bytes are not the right ones: SHA-256 {digest}, expected {self._file.sha256}")

    def _fetch(self) -> None:
        """Take what one connection gives.

        Raises:
            Interrupted, SourceFailed.
        """
        headers = {"User-Agent": "rocserve", "Accept-Encoding": "identity"}
        if self._partial.size:
            headers["Range"] = f"bytes={self._partial.size}-"
        request = _request(self._address, headers)
        with _network_faults(self._partial), urlopen(request, timeout=self._patience.silence) as response:
            self._check_head(response)
            self._progress.at(self._partial.size)
            while block := _read(response):
                if self._partial.size + len(block) > self._file.size:
                    self._partial.clear()
                    raise SourceFailed(f"it goes on after the {self._file.size} bytes that were expected")
                self._partial.append(block)
                self._progress.at(self._partial.size)
        if self._partial.size < self._file.size:
            raise Interrupted(f"the connection ended after {self._partial.size} of {self._file.size} bytes")

    def _check_head(self, response: http.client.HTTPResponse) -> None:
        """Whether what follows is the rest of the file; where the whole of it follows, begin anew."""
        first, total = 0, _whole_length(response)
        if response.status == _PARTIAL_CONTENT:
            first, total = _content_range(response)
        if total is not None and total != self._file.size:
            raise SourceFailed(f"the file there has {total} bytes, expected {self._file.size}")
        if first not in (0, self._partial.size):
            raise SourceFailed(f"asked for the bytes from {self._partial.size} on, it sends those from {first} on")
        if first < self._partial.size:
            self._partial.clear()


def _request(address: str, headers: dict[str, str]) -> Request:
    try:
        return Request(address, headers=headers)
    except ValueError as error:
        raise SourceFailed(f"it is no address ({error})") from None


def _whole_length(response: http.client.HTTPResponse) -> int | None:
    text = response.headers.get("Content-Length", "")
    return int(text) if text.isdigit() else None


def _content_range(response: http.client.HTTPResponse) -> tuple[int, int | None]:
    """The first byte and the whole length (None: not told) of `bytes FIRST-LAST/LENGTH`."""
    text = response.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
    if match is None:
        raise SourceFailed(f"it sends a part of the file with the header Content-Range: '{text}'")
    return int(match[1]), None if match[2] == "*" else int(match[2])


def _read(response: http.client.HTTPResponse) -> bytes:
    """The next bytes; those that came before a break are not lost."""
    try:
        return response.read1(_BLOCK_BYTES)
    except http.client.IncompleteRead as error:
        return error.partial


@contextmanager
def _network_faults(partial: PartialFile) -> Iterator[None]:
    """Tells what may pass from what will not. No OSError here is one of the disk: PartialFile has dealt with those."""
    try:
        yield
    except HTTPError as error:
        with error:
            if error.code == _RANGE_NOT_SATISFIABLE and partial.size:
                partial.clear()
                raise Interrupted("the server has no bytes after those that are there already") from None
            text = f"HTTP status {error.code} ({' '.join(str(error.reason).split())})"
        raise (Interrupted if error.code in _PASSING_STATUSES else SourceFailed)(text) from None
    except URLError as error:
        failure = SourceFailed if isinstance(error.reason, socket.gaierror) else Interrupted
        raise failure(f"no connection ({error.reason})") from None
    except OSError as error:
        raise Interrupted(f"the connection broke ({error or type(error).__name__})") from None
    except http.client.InvalidURL as error:
        raise SourceFailed(f"it is no address ({error})") from None
    except http.client.HTTPException as error:
        raise Interrupted(f"the answer is not HTTP ({type(error).__name__}: {error})") from None


def _check_room(file: RemoteFile, partial: PartialFile) -> None:
    free = shutil.disk_usage(partial.path.parent).free
    missing = file.size - partial.size - free
    if missing > 0:
        raise GetError(
            f"'{file.name}' needs {(file.size - partial.size) / 1e6:.0f} MB in '{partial.path.parent}', and"
            f" {free / 1e6:.0f} MB are free there; make room for {missing / 1e6:.0f} MB more"
        )
