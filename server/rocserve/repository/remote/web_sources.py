"""Remote repositories on web servers: the Hugging Face hub through its HTTP API, and tar archives."""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

from rocserve.core.printable import printable_name
from rocserve.core.remote_places import RemotePlace
from rocserve.repository.remote.copy import CopyRoom
from rocserve.repository.remote.object_store import CHUNK_BYTES, http_store, with_store_errors
from rocserve.repository.remote.objects import (
    Note,
    ObjectChanged,
    RemoteObject,
    Source,
    StoreError,
    in_thread,
    path_refusal,
)
from rocserve.repository.scan import is_temporary


class HubSource(Source):
    """Fetches a model of the Hugging Face hub. The files come from the commit of the last listing."""

    def __init__(self, place: RemotePlace, environment: Mapping[str, str]) -> None:
        self._place = place
        self._endpoint = environment.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        # A secret made from a file often ends in a newline.
        self._token = environment.get("HF_TOKEN", "").strip()
        if not self._token:
            # The file that `hf auth login` writes.
            home = environment.get("HF_HOME") or Path(environment.get("HOME", "/")) / ".cache/huggingface"
            file = Path(home) / "token"
            try:
                self._token = file.read_text().strip()
            except OSError:
                pass  # The file is optional.
            except UnicodeDecodeError as error:
                raise StoreError(f"expected a token in {file}, got: {error}; log in again, or set HF_TOKEN") from None
        self._prefix = f"{place.prefix}/" if place.prefix else ""
        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        self._store = http_store(place, self._endpoint, headers)
        self._commit = ""
        self._objects: list[RemoteObject] = []

    async def listing(self, folder: str = "") -> Sequence[RemoteObject]:
        commit, objects = await with_store_errors(self._place, "a listing", in_thread(self._list))
        self._commit, self._objects = commit, objects
        return [item for item in objects if not folder or item.key.startswith(f"{folder}/")]

    async def fetch(self, item: RemoteObject, file: Path, note: Note) -> None:
        """Fetch and check a file: the hub lists large files with their SHA-256, others with git's blob digest."""
        import obstore

        path = f"{self._place.bucket}/resolve/{self._commit}/{self._prefix}{item.key}"
        digest = hashlib.sha256()
        if len(item.tag) != 64:
            digest = hashlib.sha1(f"blob {item.size}\0".encode(), usedforsecurity=False)

        async def get() -> None:
            result = await obstore.get_async(self._store, path)
            with file.open("wb") as opened:
                async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                    digest.update(chunk)
                    opened.write(chunk)
                    note(len(chunk))

        await with_store_errors(self._place, f"'{item.key}'", get())
        if digest.hexdigest() != item.tag:
            raise ObjectChanged(f"expected '{item.key}' with digest {item.tag}, got {digest.hexdigest()}")

    def _list(self) -> tuple[str, list[RemoteObject]]:
        """List the files of the revision's commit. A malformed response may raise any error."""
        api = f"{self._endpoint}/api/models/{self._place.bucket}"
        answer, _ = self._ask(f"{api}/revision/{quote(self._place.revision, safe='')}")
        commit = answer["sha"]
        if commit == self._commit:
            return commit, self._objects
        entries: list[Any] = []
        page = f"{api}/tree/{commit}/{quote(self._place.prefix)}".rstrip("/") + "?recursive=true"
        read = set[str]()
        while page and page not in read:
            read.add(page)
            answer, page = self._ask(page)
            entries += answer
        if page:
            raise StoreError(
                f"expected a listing with an end, got a page that leads back to an earlier one; check {self._endpoint}"
            )
        files = [entry for entry in entries if entry["type"] == "file"]
        return commit, [
            RemoteObject(
                entry["path"].removeprefix(self._prefix), int(entry["size"]), str(entry.get("lfs", entry)["oid"]), 1.0
            )
            for entry in files
        ]

    def _ask(self, url: str) -> tuple[Any, str]:
        """Return the response and the URL of the next page; "" = no more pages."""
        import urllib.request  # Here: only hubs need it, and its import takes time of each start.

        request = urllib.request.Request(url)
        if self._token:
            # The token must not go to the target of a redirect.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=20.0) as answer:
            # A link header may hold several links, separated by commas: <URL>; rel="first", <URL>; rel="next".
            found = re.search(r'<([^>]*)>[^<]*;\s*rel="?next\b', ", ".join(answer.headers.get_all("Link", [])))
            return json.load(answer), urljoin(url, found[1]) if found else ""


class ArchiveSource(Source):
    """Fetches a tar archive and unpacks it next to the copy. The copy gets the files by hard links."""

    def __init__(self, place: RemotePlace, room: CopyRoom) -> None:
        self._place = place
        self._room = room
        base, _, self._name = urlsplit(place.bucket).path.rpartition("/")
        self._store = http_store(place, urlsplit(place.bucket)._replace(path=base).geturl(), {})
        self._archive = place.home / "archive.part"
        self._unpacked = place.home / "unpacked"
        self._record = self._unpacked / "objects.json"
        self._tag, self._objects = self._recorded()

    async def listing(self, folder: str = "") -> Sequence[RemoteObject]:
        """Return the archive's files. Fetches the archive if it has changed."""
        await with_store_errors(self._place, f"'{self._name}'", self._take())
        return [item for item in self._objects if not folder or item.key.startswith(f"{folder}/")]

    async def fetch(self, item: RemoteObject, file: Path, note: Note) -> None:
        try:
            _link(self._unpacked / item.tag, file)
        except FileNotFoundError:
            self._tag = ""
            raise ObjectChanged(
                f"expected '{item.key}' among the unpacked files; the server will download the archive again"
            ) from None
        note(item.size)

    async def _take(self) -> None:
        import obstore

        result = await obstore.get_async(self._store, self._name)
        tag = result.meta["e_tag"] or f"{result.meta['last_modified']} {result.meta['size']}"
        if tag == self._tag:
            return
        size = result.meta["size"]
        self._room.make(size, f"'{self._name}'")
        with self._archive.open("wb") as opened:
            async for chunk in result.stream(min_chunk_size=CHUNK_BYTES):
                opened.write(chunk)
        if (came := self._archive.stat().st_size) != size:
            raise StoreError(f"expected {size} bytes of '{self._name}', got {came}; the server will retry")
        changed = result.meta["last_modified"].timestamp()
        self._objects = await in_thread(lambda: self._unpack(changed, tag))
        self._tag = tag

    def _unpack(self, changed: float, tag: str) -> list[RemoteObject]:
        fresh = self._unpacked.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(mode=0o700)
        objects: dict[str, RemoteObject] = {}
        try:
            with tarfile.open(self._archive) as archive:
                for member in archive:
                    if (item := self._unpack_member(archive, member, fresh, changed)) is not None:
                        objects[item.key] = item
                # Read to the end, which holds the checksums of gzip and similar formats.
                while archive.fileobj is not None and archive.fileobj.read(CHUNK_BYTES):
                    pass
        # Decompressors raise their own errors if the archive is damaged.
        except (tarfile.TarError, zlib.error, lzma.LZMAError, EOFError, ValueError, OSError) as error:
            raise StoreError(f"expected a tar archive in '{self._name}', got: {error}; create it again") from None
        finally:
            self._archive.unlink(missing_ok=True)
        (fresh / self._record.name).write_text(json.dumps([tag, [asdict(item) for item in objects.values()]]))
        shutil.rmtree(self._unpacked, ignore_errors=True)
        fresh.rename(self._unpacked)
        return list(objects.values())

    def _unpack_member(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, folder: Path, changed: float
    ) -> RemoteObject | None:
        """Unpack a file; None = a folder or a temporary name. Files are named by digest, so no name can lead out."""
        key = member.name.removeprefix("./")
        refusal = "" if member.isdir() else path_refusal(key)
        if not member.isdir() and not member.isfile():
            refusal = f"'{printable_name(key)}' is neither a file nor a folder; put the file itself into the archive"
        if refusal:
            raise StoreError(f"expected files and folders in '{self._name}', got: {refusal}")
        source = archive.extractfile(member)
        if source is None or any(is_temporary(part) for part in key.split("/")):
            return None
        self._room.make(member.size, f"'{self._name}'")
        digest = hashlib.sha256()
        part = folder / "part"
        with part.open("wb") as opened:
            while chunk := source.read(CHUNK_BYTES):
                digest.update(chunk)
                opened.write(chunk)
        part.replace(folder / digest.hexdigest())
        return RemoteObject(key, member.size, digest.hexdigest(), changed)

    def _recorded(self) -> tuple[str, list[RemoteObject]]:
        try:
            tag, objects = json.loads(self._record.read_text())
            return tag, [RemoteObject(**one) for one in objects]
        except (OSError, ValueError, TypeError):
            return "", []


def _link(file: Path, name: Path) -> None:
    name.unlink(missing_ok=True)
    os.link(file, name)
