"""Limits a client's requests in flight and in a second. A client is an address: one proxy's clients count as one."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable
from dataclasses import dataclass

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.exchange import EndHook, Exchange, HookOrder
from rocserve.observability.failures import Allowance
from rocserve.services.access import ip_address_of

MOST_CLIENTS = 65_536
"""Addresses that are counted separately, some 20 MB. All further addresses count as one client."""


@dataclass(slots=True, eq=False)
class _Client:
    """The requests of one client."""

    allowance: Allowance
    in_flight: int = 0

    @property
    def is_forgettable(self) -> bool:
        return not self.in_flight and self.allowance.is_full


class ClientLimits:
    """Admits requests by client. Each client has a token bucket for the requests of one second."""

    def __init__(
        self, most_in_flight: int, most_per_second: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """0 = no limit."""
        self._most_in_flight = most_in_flight
        self._rate = most_per_second
        self._clock = clock
        self._clients: dict[str, _Client] = {}
        self._cleaned_at = clock()

    def __len__(self) -> int:
        return len(self._clients)

    def admit(self, address: str, exchange: Exchange) -> None:
        """Count a request until it is answered. Raises ServeError (RESOURCE_EXHAUSTED), without counting it, if its
        client has reached a limit."""
        name, client = self._find(_client_of(address))
        if self._most_in_flight and client.in_flight >= self._most_in_flight:
            raise ServeError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"the client {name} has {client.in_flight} requests in flight, the most for one client"
                " (--max-requests-per-client); wait for answers, and try again",
            )
        if self._rate and not client.allowance.take():
            raise ServeError(
                StatusCode.RESOURCE_EXHAUSTED,
                f"the client {name} sends more than {self._rate:g} requests a second, the most for one client"
                " (--max-request-rate-per-client); send fewer, and try again",
            )
        client.in_flight += 1
        exchange.add(EndHook(HookOrder.LIMITS, lambda: self._ended(name, client)))

    def _find(self, name: str) -> tuple[str, _Client]:
        client = self._clients.get(name)
        if client is None and len(self._clients) >= MOST_CLIENTS:
            now = self._clock()
            if now - self._cleaned_at >= 1.0:
                self._cleaned_at = now
                self._clients = {key: one for key, one in self._clients.items() if not one.is_forgettable}
            if len(self._clients) >= MOST_CLIENTS:
                name = "others"
                client = self._clients.get(name)
        if client is None:
            allowance = Allowance(max(1.0, self._rate), self._rate, self._clock)
            client = self._clients[name] = _Client(allowance)
        return name, client

    def _ended(self, name: str, client: _Client) -> None:
        client.in_flight -= 1
        if client.is_forgettable:
            self._clients.pop(name, None)


def _client_of(address: str) -> str:
    """Return the client's name: the network of an IPv6 address, any other text unchanged."""
    parsed = ip_address_of(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        # All IPv6 addresses of a /64 network are one client, because one machine may have them all.
        return str(ipaddress.IPv6Network((parsed, 64), strict=False))
    return address if parsed is None else str(parsed)
