"""The one way in for inference requests, whatever front end they come from."""

from __future__ import annotations

from collections.abc import Callable

from rocserve.core.dispatch import dispatch
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.requests import InferRequest
from rocserve.core.serving import Responder, ServingTableHolder
from rocserve.plane.loop import PlaneLoop
from rocserve.services.client_limits import ClientLimits
from rocserve.services.client_memory.attachment import ClientMemory
from rocserve.services.observation import ClientResponder, RequestObserver
from rocserve.services.readiness import Readiness


def exiting() -> ServeError:
    """What requests are told that come while the server ends."""
    return ServeError(StatusCode.UNAVAILABLE, "Server exiting")


class InferenceService:
    """On the data plane's thread."""

    def __init__(
        self,
        tables: ServingTableHolder,
        readiness: Readiness,
        client_memory: ClientMemory,
        observer: RequestObserver,
        paths: PrivatePaths,
        plane: PlaneLoop,
        client_limits: ClientLimits | None = None,
    ) -> None:
        """
        Args:
            paths: takes those of the server out of errors.
            plane: the loop on whose thread requests are handed in.
        """
        self._tables = tables
        self._readiness = readiness
        self._client_memory = client_memory
        self._observer = observer
        self.paths = paths
        self.plane = plane
        self._client_limits = client_limits

    @property
    def wants_origins(self) -> bool:
        """Whether it asks responders where their requests come from."""
        return self._observer.is_on or self._client_limits is not None

    def watch_wants(self, callback: Callable[[], object]) -> None:
        """Call back, on any thread, when `wants_origins` may have changed."""
        self._observer.on_switched = callback

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        """A front end could not make a request of what has come; it has told its client why.

        `find_id` looks what id the request was to have, as far as that can be read; it is asked where the log wants it.
        """
        if self._observer.is_on:
            self._observer.note_refusal(error, find_id)

    def infer(self, request: InferRequest, client: ClientResponder) -> None:
        """Schedule a request; never blocks, and every error goes to the responder."""
        responder: Responder = client
        is_observed = self._observer.is_on
        if is_observed:
            responder = self._observer.begin(request, client)
        if self._readiness.is_exiting:
            responder.fail(exiting())
            return
        if self._client_limits is not None:
            try:
                responder = self._client_limits.admit(client.origin().address, responder)
            except ServeError as error:
                responder.fail(error)
                return
        if request.head.uses_shared_memory:
            try:
                responder = self._client_memory.attach(request, responder)
            except ServeError as error:
                responder.fail(error)
                return
        if is_observed:
            responder = self._observer.note_tensors(request, responder)
        dispatch(self._tables, request, responder)
