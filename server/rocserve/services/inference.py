"""The one way in for inference requests, whatever front end they come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from rocserve.core.dispatch import Dispatcher, Steps
from rocserve.core.errors import ServeError
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.requests import InferRequest, RequestHead
from rocserve.core.serving import Responder
from rocserve.plane.heap import SharedHeap
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.residency.resident_models import LazyVersion
from rocserve.scheduling.served_version import ScheduledVersion
from rocserve.services.client_limits import ClientLimits
from rocserve.services.client_memory.attachment import ClientMemory
from rocserve.services.observation import ClientResponder, RequestObserver

NOT_FOR_DECOUPLED: Mapping[str, str] = MappingProxyType(
    {
        "GRPC": "ModelInfer RPC doesn't support models with decoupled transaction policy",
        "HTTP": "HTTP end point doesn't support models with decoupled transaction policy",
    }
)
"""By the protocol of a request that can have one response only."""


class Inference(Protocol):
    """What takes the requests of a front end: the server's own service, or the way to it from another process."""

    paths: PrivatePaths

    @property
    def plane(self) -> PlaneLoop:
        """On whose thread requests are handed in."""

    def infer(self, request: InferRequest, client: ClientResponder) -> None:
        """Schedule a request; never blocks, and every error goes to the responder."""

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        """No request could be made of what has come, and its client has been answered. `find_id` reads its id, as far
        as that can be read; it is called where the log wants it."""


class InferenceService:
    """On the data plane's thread."""

    def __init__(
        self,
        dispatcher: Dispatcher,
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
        self._dispatcher = dispatcher
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

    def heap_for(self, head: RequestHead) -> SharedHeap | None:
        """Where the workers read inputs that would get a request of this head now; None: there is no such place."""
        try:
            version = self._dispatcher.tables.table.find(head.model_name, head.model_version)
        except ServeError:
            return None
        return version.inputs if isinstance(version, ScheduledVersion | LazyVersion) else None

    def refuse(self, error: ServeError, find_id: Callable[[], str]) -> None:
        """See Inference."""
        if self._observer.is_on:
            self._observer.note_refusal(error, find_id)

    def infer(self, request: InferRequest, client: ClientResponder) -> None:
        """See Inference."""
        responder: Responder = client
        is_observed = self._observer.is_on
        if is_observed:
            responder = self._observer.begin(request, client)
        if self._client_limits is not None:
            try:
                responder = self._client_limits.admit(client.origin().address, responder)
            except ServeError as error:
                responder.send(error)
                return
        copying: Sequence[Steps] = ()
        if request.head.uses_shared_memory:
            try:
                responder, copying = self._client_memory.attach(request, responder)
            except ServeError as error:
                responder.send(error)
                return
        if is_observed:
            responder = self._observer.note_tensors(request, responder)
        self._dispatcher.dispatch(request, responder, copying)
