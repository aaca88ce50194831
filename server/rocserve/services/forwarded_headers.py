"""Headers of a client that become parameters of its inference request, on both front ends."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from rocserve.core.errors import invalid_argument
from rocserve.core.memo import Memo
from rocserve.core.requests import RequestHead

_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "headers", "binary_data_output")
)
_RESERVED_PREFIX = "triton_"

_Pairs = tuple[tuple[str, str], ...]


class HeaderForwarding:
    """Callable from several threads."""

    def __init__(self, pattern: str) -> None:
        """`pattern`: a regular expression; a header whose name it matches anywhere is forwarded. Raises: re.error: it
        is no regular expression."""
        self._pattern = re.compile(pattern)
        # Plans are remembered by the head's identity, so equal requests must go on having one head. The dict's own
        # operations are atomic; two threads may both make a head that is new.
        self._heads = Memo[tuple[RequestHead, _Pairs], RequestHead]()

    def forward(self, head: RequestHead, headers: Iterable[tuple[str, str | bytes]]) -> RequestHead:
        """The head with the headers among its parameters; a header goes before a parameter of its name. Raises:
        ServeError: INVALID_ARGUMENT for a header whose name has a meaning of its own among the parameters."""
        search = self._pattern.search
        pairs = tuple(
            (name, value if isinstance(value, str) else value.decode(errors="replace"))
            for name, value in headers
            if search(name)
        )
        if not pairs:
            return head
        forwarded = self._heads.get((head, pairs))
        if forwarded is None:
            for name, _ in pairs:
                if name in _RESERVED or name.startswith(_RESERVED_PREFIX):
                    raise invalid_argument(f"Header '{name}' is reserved for Triton usage and cannot be forwarded.")
            parameters = {**head.parameters, **dict(pairs)}
            forwarded = self._heads.keep((head, pairs), replace(head, parameters=parameters))
        return forwarded


def header_forwarding(pattern: str) -> HeaderForwarding | None:
    """None where no header is forwarded; see `HeaderForwarding`."""
    return HeaderForwarding(pattern) if pattern else None
