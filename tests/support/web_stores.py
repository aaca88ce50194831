"""Stand-ins for Hugging Face's hub and for a web server, as far as the server asks them: neither can be run here. The
hub's answers have the forms of its documented API."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Self
from urllib.parse import unquote

_LARGE_BYTES = 64
"""From this size on the hub stores a file separately and names it by its SHA-256. A real hub's limit is higher."""
_PAGE = 2
"""Entries of a tree in one answer."""


class WebServer:
    """Serves `files` by their paths, and `hub` as the one model `org/model` of a hub; a context manager."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.hub: dict[str, bytes] = {}
        self.token = ""
        """The hub answers 401 to requests without this token."""
        self.date = "Mon, 01 Jan 2024 00:00:00 GMT"
        """The time of the last change of the files."""
        self.damaged = ""
        """The hub's file whose content differs from its digest."""
        self.pinned = ""
        """The commit, whatever the files hold; "" = derived from the files."""
        self.cut = ""
        """The path whose answer ends before its last byte."""
        self.other_links = ""
        """Links that a page of the hub names before the link to the next one."""
        self.asked: list[str] = []
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                web.asked.append(path)
                if web.token and "org/model" in path and self.headers["Authorization"] != f"Bearer {web.token}":
                    self._answer(401, b"", {})
                    return
                found = web.files.get(path)
                headers = {}
                if "/org/model" in path:
                    found, headers = web.hub_answer(path, query)
                tag = (
                    {"ETag": f'"{hashlib.md5(found).hexdigest()}"', "Last-Modified": web.date}
                    if found is not None
                    else {}
                )
                headers["Content-Length"] = str(len(found or b""))
                body = (found or b"")[: -1 if path == web.cut else None]
                self._answer(200 if found is not None else 404, body, headers | tag)

            def _answer(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
                self.send_response_only(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def commit(self) -> str:
        return self.pinned or hashlib.sha1(repr(sorted(self.hub.items())).encode()).hexdigest()

    def hub_answer(self, path: str, query: str) -> tuple[bytes | None, dict[str, str]]:
        api = "/api/models/org/model"
        if path == f"{api}/revision/main":
            return json.dumps({"sha": self.commit}).encode(), {}
        if path.startswith(f"{api}/tree/{self.commit}"):
            folder = path.removeprefix(f"{api}/tree/{self.commit}").strip("/")
            entries = [_entry(name, data) for name, data in sorted(self.hub.items()) if name.startswith(folder)]
            begin = int(query.partition("cursor=")[2] or 0)
            more = f'{self.other_links}<{self.url}{path}?recursive=true&cursor={begin + _PAGE}>; rel="next"'
            link = {"Link": more} if begin + _PAGE < len(entries) else {}
            return json.dumps(entries[begin : begin + _PAGE]).encode(), link
        name = unquote(path).removeprefix(f"/org/model/resolve/{self.commit}/")
        found = self.hub.get(name)
        return (found[:-1] + b"!" if found and name == self.damaged else found), {}


def _entry(name: str, data: bytes) -> dict[str, object]:
    blob = hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()
    entry: dict[str, object] = {"type": "file", "path": name, "size": len(data), "oid": blob}
    if len(data) >= _LARGE_BYTES:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 128}
    return entry


def tar_of(files: Mapping[str, bytes], *more: tarfile.TarInfo, mode: str = "w:gz") -> bytes:
    """`more`: members without content, such as links."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for member in more:
            archive.addfile(member)
    return data.getvalue()
