"""Registers clients' regions of shared memory by name, lists and unregisters them. A region is a part of a file of
POSIX shared memory, or memory of a GPU (`device_memory.py`). Clients may truncate a mapped file at any time, by mistake
or on purpose: see `plane/guarded_mapping.py`. Data that a request has read or written is therefore checked
afterwards."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from rocserve.backends.installed import has_file
from rocserve.backends.pytorch.engine_choice import GPU_LIBRARIES
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument, not_found, unimplemented
from rocserve.core.parameters import Parameters
from rocserve.core.requests import SHARED_BYTE_SIZE, SHARED_OFFSET, SHARED_REGION
from rocserve.core.steps import Steps
from rocserve.plane.guarded_mapping import FaultGuard, GuardedFile, GuardedMapping
from rocserve.plane.heap import copy_in_steps
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.client_memory.device_memory import COPIED_AT_ONCE, HANDLE_BYTES, DeviceProcess
from rocserve.services.methods import Method

FOLDER = "/dev/shm"
"""The folder of POSIX shared memory in Linux."""
RESERVED_PREFIX = "triton_python_backend_shm_region_"
_UNSIGNED = (1 << 64) - 1


class Region:
    """The base of regions. Safe on any thread."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.users = 0
        """Requests in flight that write to the region; counted by ClientRegions."""
        self.is_unregistered = False
        """The region is removed after its last user."""

    def check_bounds(self, offset: int, nbytes: int) -> None:
        """Raise ServeError (INVALID_ARGUMENT, Triton's texts) if the part is not within the region."""
        if offset >= self.nbytes:
            raise invalid_argument(f"Invalid offset for shared memory region: '{self.name}'")
        if nbytes > _UNSIGNED - offset:
            raise invalid_argument(
                f"Integer overflow detected: byte_size ({nbytes}) + offset ({offset}) exceeds maximum value"
                f" ({_UNSIGNED}) for region '{self.name}'"
            )
        if offset + nbytes > self.nbytes:
            raise invalid_argument(f"Invalid offset + byte size for shared memory region: '{self.name}'")


class ClientRegion(Region):
    """A part of a file, which is closed with the last reference."""

    def __init__(self, name: str, key: str, offset: int, nbytes: int, guard: FaultGuard) -> None:
        """Open the file and map `nbytes` of it from `offset`. Raises ServeError, with Triton's codes and texts, if
        there is no such file, it is too small, or it cannot be mapped."""
        super().__init__(name, nbytes)
        self.key = key
        self.offset = offset
        descriptor = _open(name, key)
        try:
            if offset + nbytes > os.fstat(descriptor).st_size:
                raise _refused(name, "invalid args")
            if not nbytes:
                raise OSError(errno.EINVAL, "nothing to map")
            self.file = GuardedFile(guard, descriptor, offset + nbytes, to_write=True)
        except (OSError, ServeError) as error:
            os.close(descriptor)
            if isinstance(error, OSError):
                raise _refused(name, f"unable to process address space{os.strerror(error.errno or 0)}") from None
            raise

    def view(self, offset: int, nbytes: int) -> tuple[memoryview, GuardedMapping]:
        """Return a view of a part, which must be within bounds, and the mapping, for `check_whole` after the access.
        Both outlive the region. Raises ServeError (INVALID_ARGUMENT) if the client has cut the file."""
        self._check_present(offset + nbytes)
        return self.file.view(self.offset + offset, nbytes), self.file.mapping

    def check_whole(self, mapping: GuardedMapping, end: int) -> None:
        """Raise ServeError if part of the region before byte `end` was missing: INVALID_ARGUMENT if the client has cut
        the file; RESOURCE_EXHAUSTED if there is no room for its pages."""
        self._check_present(end)
        if mapping.is_torn:
            text = f"shared memory region '{self.name}' lacks pages: is {FOLDER} large enough?"
            raise ServeError(StatusCode.RESOURCE_EXHAUSTED, text)

    def read(self, offset: int, nbytes: int) -> bytes:
        view, mapping = self.view(offset, nbytes)
        data = bytes(view)
        self.check_whole(mapping, offset + nbytes)
        return data

    def read_into(self, data: memoryview, offset: int) -> Steps[None]:
        view, mapping = self.view(offset, len(data))
        yield from copy_in_steps(data, 0, view)
        self.check_whole(mapping, offset + len(data))

    def write(self, offset: int, data: memoryview) -> Steps[None]:
        view, mapping = self.view(offset, len(data))
        yield from copy_in_steps(view, 0, data)
        self.check_whole(mapping, offset + len(data))

    def _check_present(self, end: int) -> None:
        size = self.file.current_size
        if size < self.offset + end:
            raise invalid_argument(
                f"shared memory region '{self.name}' has been cut: byte {self.offset + end} of '{self.key}' is needed,"
                f" which has {size} now; register it again"
            )


def _open(name: str, key: str) -> int:
    """Open a file by shm_open's rules: leading slashes do not count, and there may be no others."""
    file_name = key.lstrip("/")
    if not file_name:
        raise invalid_argument(f"cannot register shared memory region '{name}' - invalid shm key '{key}'")
    if file_name.startswith(RESERVED_PREFIX):
        raise invalid_argument(
            f"cannot register shared memory region '{name}' with key '{key}' as the key contains the reserved prefix"
            f" '{RESERVED_PREFIX}'"
        )
    unable = internal(f"Unable to open shared memory region: '{key}'")
    if "/" in file_name:
        raise unable
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        descriptor = os.open(f"{FOLDER}/{file_name}", flags)
    except (OSError, ValueError):
        raise unable from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise unable
    return descriptor


def _refused(name: str, why: str) -> ServeError:
    return invalid_argument(f"failed to register shared memory region '{name}': {why}")


class DeviceRegion(Region):
    def __init__(self, name: str, device: int, nbytes: int, process: DeviceProcess, handle: bytes) -> None:
        """Raises ServeError (INVALID_ARGUMENT) if the memory cannot be opened."""
        super().__init__(name, nbytes)
        self.device = device
        self._process = process
        self._number = process.open(handle, device, nbytes)

    def __del__(self) -> None:
        if hasattr(self, "_number"):
            self._process.close(self._number)

    def read(self, offset: int, nbytes: int) -> bytes:
        data = bytearray(nbytes)
        for _ in self.read_into(memoryview(data), offset):
            pass
        return bytes(data)

    def read_into(self, data: memoryview, offset: int) -> Steps[None]:
        for begin in range(0, len(data), COPIED_AT_ONCE):
            self._process.read(self._number, offset + begin, data[begin : begin + COPIED_AT_ONCE])
            yield

    def write(self, offset: int, data: memoryview) -> Steps[None]:
        for begin in range(0, len(data), COPIED_AT_ONCE):
            self._process.write(self._number, offset + begin, data[begin : begin + COPIED_AT_ONCE])
            yield


@dataclass(frozen=True, slots=True)
class RegionReference:
    """A tensor's place in a shared memory region."""

    region: str
    offset: int
    """Bytes from the region's beginning. Triton reads both numbers as unsigned, so a negative one is huge."""
    nbytes: int


def read_reference(tensor: str, parameters: Parameters) -> RegionReference | None:
    """Return the part of a region that holds a tensor; None = the request holds it. Raises ServeError
    (INVALID_ARGUMENT) if a parameter has the wrong type, or a parameter that goes with it is missing."""
    region = parameters.get(SHARED_REGION)
    if region is None:
        for name in (SHARED_OFFSET, SHARED_BYTE_SIZE):
            if name in parameters:
                raise invalid_argument(
                    f"'{name}' can not be specified without '{SHARED_REGION}' parameter for tensor '{tensor}'"
                )
        return None
    wrong_type = "invalid value type for '{}' parameter for tensor '{}', expected {}."
    if not isinstance(region, str):
        raise invalid_argument(wrong_type.format(SHARED_REGION, tensor, "string_param"))
    numbers = []
    for name in (SHARED_OFFSET, SHARED_BYTE_SIZE):
        value = parameters.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            raise invalid_argument(wrong_type.format(name, tensor, "int64_param"))
        numbers.append(value & _UNSIGNED)
    if SHARED_BYTE_SIZE not in parameters:
        raise invalid_argument(
            f"'{SHARED_BYTE_SIZE}' must be specified along with '{SHARED_REGION}' parameter for tensor '{tensor}'"
        )
    return RegionReference(region, *numbers)


AnyRegion = ClientRegion | DeviceRegion
RegionKind = TypeVar("RegionKind", ClientRegion, DeviceRegion)


@dataclass(eq=False)
class ClientRegions:
    """Keeps the regions of all clients. Safe on any thread: the event loop registers GPU memory. Texts and codes are
    Triton's: "CUDA" is memory on any maker's GPU, "system" a file. A region to which a request writes stays until the
    request has done so, even if unregistered; until then its name is in use."""

    _guard: FaultGuard
    allowed: bool = True
    """Clients may register regions."""
    _regions: dict[str, AnyRegion] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Guards changes of the dict, and the regions' `users` and `is_unregistered`."""
    _process: DeviceProcess | None = field(default=None, init=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Raises ServeError (ALREADY_EXISTS), or as ClientRegion does."""
        self._check_free(name)
        self._add(ClientRegion(name, key, offset, nbytes, self._guard))

    def _check_free(self, name: str) -> None:
        if name in self._regions:
            raise ServeError(StatusCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")

    def _add(self, region: AnyRegion) -> None:
        with self._lock:
            self._check_free(region.name)
            self._regions[region.name] = region

    def unregister(self, name: str, kind: type[Region]) -> None:
        """Remove the named region if it is of the kind, or all of the kind if `name` is empty."""
        with self._lock:
            for region in [self._regions.get(name)] if name else list(self._regions.values()):
                if isinstance(region, kind):
                    self._remove_if_unused(region)

    def registered(self, kind: type[RegionKind]) -> list[RegionKind]:
        with self._lock:
            found = [region for region in self._regions.values() if isinstance(region, kind)]
        return sorted(found, key=lambda region: region.name)

    def checked(self, reference: RegionReference) -> AnyRegion:
        """Return the region that a reference names. Raises ServeError if there is no such region or part."""
        region = self._regions.get(reference.region)
        if region is None:
            raise not_found(f"Unable to find shared memory region: '{reference.region}'")
        region.check_bounds(reference.offset, reference.nbytes)
        return region

    def acquire(self, reference: RegionReference) -> AnyRegion:
        """Return a region to write to, until `release`. Raises as `checked` does."""
        with self._lock:
            region = self.checked(reference)
            region.users += 1
        return region

    def release(self, region: AnyRegion) -> None:
        with self._lock:
            region.users -= 1
            if region.is_unregistered:
                self._remove_if_unused(region)

    def _remove_if_unused(self, region: AnyRegion) -> None:
        region.is_unregistered = True
        if not region.users:
            del self._regions[region.name]

    # Methods

    def methods(self) -> Mapping[str, Method]:
        return {
            "SystemSharedMemoryStatus": Method(pb.SystemSharedMemoryStatusRequest, self.system_status),
            "SystemSharedMemoryRegister": Method(pb.SystemSharedMemoryRegisterRequest, self.system_register),
            "SystemSharedMemoryUnregister": Method(pb.SystemSharedMemoryUnregisterRequest, self.system_unregister),
            "CudaSharedMemoryStatus": Method(pb.CudaSharedMemoryStatusRequest, self.cuda_status),
            "CudaSharedMemoryRegister": Method(pb.CudaSharedMemoryRegisterRequest, self.cuda_register, is_slow=True),
            "CudaSharedMemoryUnregister": Method(pb.CudaSharedMemoryUnregisterRequest, self.cuda_unregister),
        }

    def system_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        status = pb.SystemSharedMemoryStatusResponse.RegionStatus
        shown = {
            one.name: status(name=one.name, key=one.key, offset=one.offset, byte_size=one.nbytes)
            for one in self._shown(request.name, ClientRegion)
        }
        return pb.SystemSharedMemoryStatusResponse(regions=shown)

    def system_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> pb.SystemSharedMemoryRegisterResponse:
        self._check_allowed()
        self.register(request.name, request.key, request.offset, request.byte_size)
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        self._check_allowed()
        self.unregister(request.name, ClientRegion)
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        status = pb.CudaSharedMemoryStatusResponse.RegionStatus
        shown = {
            one.name: status(name=one.name, device_id=one.device, byte_size=one.nbytes)
            for one in self._shown(request.name, DeviceRegion)
        }
        return pb.CudaSharedMemoryStatusResponse(regions=shown)

    async def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        self._check_allowed()
        self._check_free(request.name)
        # The first call starts a process, which takes seconds.
        self._add(await asyncio.to_thread(self._open_region, request))
        return pb.CudaSharedMemoryRegisterResponse()

    def cuda_unregister(self, request: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        self._check_allowed()
        self.unregister(request.name, DeviceRegion)
        return pb.CudaSharedMemoryUnregisterResponse()

    def _open_region(self, request: pb.CudaSharedMemoryRegisterRequest) -> DeviceRegion:
        """Open a region. The process starts with the first region, and again if it has ended."""
        failure = f"failed to register CUDA shared memory region: '{request.name}'"
        if not has_file("torch", GPU_LIBRARIES):
            raise invalid_argument(f"{failure}, GPUs not supported")
        try:
            if len(request.raw_handle) != HANDLE_BYTES or not request.byte_size or request.device_id < 0:
                raise invalid_argument(f"expected a handle of {HANDLE_BYTES} bytes, a device_id and a byte_size")
            with self._starting:
                if self._process is None or self._process.has_ended:
                    self._process = DeviceProcess()
            return DeviceRegion(request.name, request.device_id, request.byte_size, self._process, request.raw_handle)
        except ServeError as error:
            text = f"{failure}: failed to open CUDA IPC handle: {error.text}"
            raise ServeError(error.code, text) from None

    def _shown(self, name: str, kind: type[RegionKind]) -> Sequence[RegionKind]:
        """Return the regions of the kind, or only the named one. Raises ServeError (NOT_FOUND)."""
        if not name:
            return self.registered(kind)
        region = self._regions.get(name)
        if isinstance(region, kind):
            return [region]
        asked, other = ("system", "CUDA") if kind is ClientRegion else ("CUDA", "system")
        if region is None:
            raise not_found(f"Unable to find {asked.lower()} shared memory region: '{name}'")
        raise not_found(f"The region named '{name}' is registered as {other} shared memory, not {asked} shared memory")

    def _check_allowed(self) -> None:
        if not self.allowed:
            raise unimplemented(
                "Client shared memory is disabled. Start the server with '--allow-client-shm=true' to enable."
            )
