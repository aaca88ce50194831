"""Moves clients between the server's process and front end processes, as the demand changes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from rocserve.frontends.demand import Demand
from rocserve.frontends.shared_ports import SharedPorts
from rocserve.frontends.transports import Transports
from rocserve.plane.loop import PlaneLoop

if TYPE_CHECKING:
    # Imported when front ends are first wanted: it takes memory.
    from rocserve.frontends.processes.supervisor import FrontEndProcesses


class Moves:
    """Moves only new connections, and lets HTTP's clients connect again after their next answer. gRPC's connections are
    renewed at the age of `Pace.renewal_seconds`. On the event loop."""

    def __init__(
        self,
        demand: Demand,
        plane: PlaneLoop,
        own: Transports,
        ports: SharedPorts,
        has_filters: bool,
        processes: Callable[[], FrontEndProcesses],
        log: logging.Logger,
    ) -> None:
        """`own` listens already. `has_filters`: see `kernel_has_filters`; without filters, front ends stay once they
        have started, because they would get new clients again and again. `processes` returns the front ends, not
        started yet."""
        self._demand = demand
        self._plane = plane
        self._own = own
        self._ports = ports
        self._has_filters = has_filters
        self._make_processes = processes
        self._processes: FrontEndProcesses | None = None
        self._log = log

    async def run(self) -> None:
        """Watch the demand, until cancelled, or until front ends have started that stay."""
        loop, demand = asyncio.get_running_loop(), self._demand
        while self._has_filters or not demand.has_front_ends:
            await asyncio.sleep(demand.pace.sample_seconds)
            worked, in_flight = self._plane.worked_seconds, self._own.in_flight
            if self._processes is not None:
                worked += self._processes.worked_seconds
                in_flight += self._processes.in_flight
            if demand.note(loop.time(), worked, in_flight):
                if demand.has_front_ends:
                    await self._to_processes()
                else:
                    self._to_server()

    async def _to_processes(self) -> None:
        processes = self._processes = self._processes or self._make_processes()
        self._log.info("the data plane is busy: %d front ends take the ports", processes.count)
        try:
            if self._has_filters:
                # Front ends that have just begun to listen connect to themselves.
                self._ports.give_to_all()
            await processes.start()
            if self._has_filters:
                self._ports.give_to_others(processes.count)
        except (OSError, RuntimeError) as error:
            self._log.error("front ends cannot be started, so the server's process serves all clients: %s", error)
            if self._has_filters:
                self._ports.give_to_this_process()
            self._demand.forget(has_front_ends=False)
        else:
            self._own.close_after_answers()

    def _to_server(self) -> None:
        assert self._processes is not None
        minutes = self._demand.pace.quiet_seconds / 60
        self._log.info("the data plane has been quiet for %g minutes: the front ends leave the ports", minutes)
        self._own.close_after_answers(False)
        self._ports.give_to_this_process()
        self._processes.retire()
