"""Scripts of other origins (--http-cors-origins): which may ask, and read the answers."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.frontends.http.protocol import Request, Response

_PREFLIGHT = {
    "Access-Control-Allow-Methods": "GET, HEAD, POST",
    "Access-Control-Allow-Headers": "*",
    "Access-Control-Max-Age": "600",
}
_EXPOSED = {"Access-Control-Expose-Headers": "Inference-Header-Content-Length", "Vary": "Origin"}


class CrossOrigin:
    """Adds CORS's headers to answers. Cookies and passwords that a browser has of the server are not asked for."""

    def __init__(self, origins: Sequence[str]) -> None:
        self._origins = frozenset(origins)

    def answer(self, request: Request) -> bool:
        """Whether the request was a browser's question what it may ask, which is answered then."""
        origin = request.headers.get("origin")
        if origin is None or not self._origins.intersection((origin, "*")):
            return False
        request.answer_headers = {"Access-Control-Allow-Origin": origin, **_EXPOSED}
        if request.method != "OPTIONS" or "access-control-request-method" not in request.headers:
            return False
        request.respond(Response(200, b"", "text/plain", _PREFLIGHT))
        return True
