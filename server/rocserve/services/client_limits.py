"""Limits what one client may ask for: requests in flight, and requests a second. A client is an address: all that come
through a proxy are one."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.serving import EndingResponder, Responder

MOST_CLIENTS = 65_536
"""Addresses that are counted apart, some 20 MB; further ones count as one client."""
_IPV6_NETWORK_BITS = 64
"""What one machine or household has: its addresses are one client's."""
_SECONDS_BETWEEN_CLEANINGS = 1.0
_OTHERS = "others"


@dataclass(slots=True, eq=False)
class _Client:
    tokens: float
    tokens_at: float
    in_flight: int = 0


class ClientLimits:
    """Admits requests by the address that they come from; a token bucket a client, which holds a second's worth."""

    def __init__(
        self, most_in_flight: int, most_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """0 = no limit."""
        self._most_in_flight = most_in_flight
        self._rate = most_per_second
        self._capacity = max(1.0, most_per_second)
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._cleaned_at = clock()

    def __len__(self) -> int:
        """How many clients are known just now."""
        return len(self._clients)

    def admit(self, address: str, responder: Responder) -> Responder:
        """Count a request until it has been answered: by the responder that this gives. Raises: ServeError:
        RESOURCE_EXHAUSTED, its client has asked for too much; nothing has been counted."""
        name, client = self._find(_client_of(address))
        if self._most_in_flight and client.in_flight >= self._most_in_flight:
            raise _too_much(
                f"the client {name} has {client.in_flight} requests in flight, as many as one client may have"
                " (--max-requests-per-client); wait for answers, and try again"
            )
        if self._rate and client.tokens < 1.0:
            raise _too_much(
                f"the client {name} sends more than the {self._rate:g} requests a second that one client may send"
                " (--max-request-rate-per-client); send fewer, and try again"
            )
        client.tokens -= 1.0
        client.in_flight += 1
        return EndingResponder(responder, lambda: self._ended(name, client))

    def _find(self, name: str) -> tuple[str, _Client]:
        now = self._clock()
        client = self._clients.get(name)
        if client is None and len(self._clients) >= MOST_CLIENTS:
            self._clean(now)
            if len(self._clients) >= MOST_CLIENTS:
                name = _OTHERS
                client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = _Client(self._capacity, now)
        client.tokens = min(self._capacity, client.tokens + (now - client.tokens_at) * self._rate)
        client.tokens_at = now
        return name, client

    def _clean(self, now: float) -> None:
        """Forget clients of whom nothing need be known."""
        if now - self._cleaned_at < _SECONDS_BETWEEN_CLEANINGS:
            return
        self._cleaned_at = now
        self._clients = {
            name: client for name, client in self._clients.items() if client.in_flight or not self._is_full(client, now)
        }

    def _is_full(self, client: _Client, now: float) -> bool:
        return client.tokens + (now - client.tokens_at) * self._rate >= self._capacity

    def _ended(self, name: str, client: _Client) -> None:
        client.in_flight -= 1
        if not client.in_flight and (not self._rate or self._is_full(client, self._clock())):
            self._clients.pop(name, None)


def _client_of(address: str) -> str:
    """Of an IPv6 address its network; of what is no address, a socket in the file system say, itself."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.IPv6Network((parsed, _IPV6_NETWORK_BITS), strict=False))


def _too_much(text: str) -> ServeError:
    return ServeError(StatusCode.RESOURCE_EXHAUSTED, text)
