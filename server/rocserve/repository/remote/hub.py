"""Hugging Face's repositories of models, by the hub's HTTP API. A listing is that of a commit, and so are the files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urljoin

from rocserve.core.remote_places import RemotePlace
from rocserve.repository.remote.object_store import CHUNK_BYTES, http_store, with_store_errors
from rocserve.repository.remote.objects import Note, ObjectChanged, RemoteObject, in_thread

_ANSWER_SECONDS = 20.0
_SHA256_DIGITS = 64


class HubSource:
    """Implements source.Source."""

    def __init__(self, place: RemotePlace, environment: Mapping[str, str]) -> None:
        """Raises: StoreError."""
        self._place = place
        self._endpoint = environment.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        self._token = environment.get("HF_TOKEN", "")
        if not self._token:
            # What `hf auth login` has stored.
            home = environment.get("HF_HOME") or Path(environment.get("HOME", "/")) / ".cache/huggingface"
            with contextlib.suppress(OSError):
                self._token = (Path(home) / "token").read_text().strip()
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
        """See source.Source. The hub lists large files with their SHA-256, others with git's name of their content."""
        import obstore

        path = f"{self._place.bucket}/resolve/{self._commit}/{self._prefix}{item.key}"
        digest = hashlib.sha256()
        if len(item.tag) != _SHA256_DIGITS:
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
            raise ObjectChanged(f"expected '{item.key}' with the digest {item.tag}, came {digest.hexdigest()}")

    async def is_gone(self, key: str) -> bool:
        """See source.Source. The tree of a commit is whole."""
        return True

    def _list(self) -> tuple[str, list[RemoteObject]]:
        """Raises: OSError, ValueError."""
        api = f"{self._endpoint}/api/models/{self._place.bucket}"
        answer, _ = self._ask(f"{api}/revision/{quote(self._place.revision, safe='')}")
        commit = answer["sha"]
        if commit == self._commit:
            return commit, self._objects
        entries: list[Any] = []
        page = f"{api}/tree/{commit}/{quote(self._place.prefix)}".rstrip("/") + "?recursive=true"
        while page:
            answer, page = self._ask(page)
            entries += answer
        files = [entry for entry in entries if entry["type"] == "file"]
        return commit, [
            RemoteObject(entry["path"].removeprefix(self._prefix), entry["size"], entry.get("lfs", entry)["oid"], 1.0)
            for entry in files
        ]

    def _ask(self, url: str) -> tuple[Any, str]:
        """The answer, and where it goes on."""
        request = urllib.request.Request(url)
        if self._token:
            # Not where the answer may redirect to.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            next_page, _, relation = answer.headers.get("Link", "").partition(";")
            is_more = 'rel="next"' in relation
            return json.load(answer), urljoin(url, next_page.strip("<> ")) if is_more else ""
