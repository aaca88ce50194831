"""The methods that register, list and unregister the shared memory of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rocserve.core.errors import not_found, unimplemented
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.client_memory.device_memory import DeviceRegion, Devices
from rocserve.services.client_memory.region import ClientRegion
from rocserve.services.client_memory.regions import ClientRegions, RegionKind, taken


class ClientMemoryService:
    """Each method takes a request and gives its answer; safe on any thread.

    "CUDA" is memory on GPUs of any maker; regions of the system are others.

    Raises:
        ServeError: with Triton's codes and words.
    """

    def __init__(self, regions: ClientRegions, allowed: bool) -> None:
        """`allowed`: whether clients may register any at all."""
        self._regions = regions
        self._devices = Devices()
        self._allowed = allowed

    def system_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._shown(request.name, ClientRegion):
            status = response.regions[region.name]
            status.name = region.name
            status.key = region.key
            status.offset = region.offset
            status.byte_size = region.nbytes
        return response

    def system_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> pb.SystemSharedMemoryRegisterResponse:
        self._check_allowed()
        self._regions.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._check_allowed()
        self._regions.unregister(request.name, ClientRegion)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        response = pb.CudaSharedMemoryStatusResponse()
        for region in self._shown(request.name, DeviceRegion):
            status = response.regions[region.name]
            status.name = region.name
            status.device_id = region.device
            status.byte_size = region.nbytes
        return response

    async def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        self._check_allowed()
        if self._regions.find(request.name) is not None:
            raise taken(request.name)
        # The first has a process started, which takes seconds.
        region = await asyncio.to_thread(
            self._devices.open, request.name, request.raw_handle, request.device_id, request.byte_size
        )
        self._regions.add(region)
        return pb.CudaSharedMemoryRegisterResponse()

    def cuda_unregister(self, request: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        self._check_allowed()
        self._regions.unregister(request.name, DeviceRegion)
        return pb.CudaSharedMemoryUnregisterResponse()

    def _shown(self, name: str, kind: type[RegionKind]) -> Sequence[RegionKind]:
        """The regions of a kind; with a name that one. Raises: ServeError: NOT_FOUND."""
        if not name:
            return self._regions.registered(kind)
        region = self._regions.find(name)
        if isinstance(region, kind):
            return [region]
        asked, other = ("system", "CUDA") if kind is ClientRegion else ("CUDA", "system")
        if region is None:
            raise not_found(f"Unable to find {asked.lower()} shared memory region: '{name}'")
        raise not_found(f"The region named '{name}' is registered as {other} shared memory, not {asked} shared memory")

    def _check_allowed(self) -> None:
        if not self._allowed:
            raise unimplemented(
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            )
