"""The regions that clients have registered by their names, and the methods that register, list and unregister them. A
region is a part of a file of POSIX shared memory, or memory of a GPU (`device_memory.py`).

A file is mapped, and its client may cut the file at any time, by mistake or not: see `plane/guarded_mapping.py`. What a
request has read or written is therefore checked afterwards.
"""

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
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument, not_found, unimplemented
from rocserve.core.requests import SHARED_BYTE_SIZE, SHARED_OFFSET, SHARED_REGION, Parameters
from rocserve.core.steps import Steps
from rocserve.plane.guarded_mapping import FaultGuard, GuardedFile, GuardedMapping
from rocserve.plane.heap import copy_in_steps
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.services.client_memory.device_memory import COPIED_AT_ONCE, HANDLE_BYTES, DeviceProcess
from rocserve.services.methods import Method

FOLDER = "/dev/shm"
"""Where Linux keeps POSIX shared memory."""
RESERVED_PREFIX = "triton_python_backend_shm_region_"
_UNSIGNED = (1 << 64) - 1
_GPU_LIBRARIES = ("lib/libtorch_hip.so", "lib/libtorch_cuda.so")
"""Of PyTorch's builds for GPUs."""


class Region:
    """What regions have in common. Safe on any thread."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.name = name
        self.nbytes = nbytes
        self.users = 0
        """Requests under way that write to it; counted by the region's owner."""
        self.is_leaving = False
        """It goes when its last user has."""

    def check_bounds(self, offset: int, nbytes: int) -> None:
        """Raises: ServeError: INVALID_ARGUMENT in Triton's words, the part is not within the region."""
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
    """A part of a file, which is closed with the last reference to it."""

    def __init__(self, name: str, key: str, offset: int, nbytes: int, guard: FaultGuard) -> None:
        """Open the file; `offset` and `nbytes` say which part of it the region is. Raises: ServeError: there is no such
        file, it is smaller than that, or cannot be mapped; codes and texts are Triton's."""
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
        """A part that is within bounds where it lies, and what `check_whole` takes when it has been read or written. It
        stays valid when the region goes. Raises: ServeError: INVALID_ARGUMENT, the client has cut the file."""
        self._check_present(offset + nbytes)
        return self.file.view(self.offset + offset, nbytes), self.file.mapping

    def check_whole(self, mapping: GuardedMapping, end: int) -> None:
        """Raises: ServeError: not all before byte `end` of the region was there: INVALID_ARGUMENT, the client has cut
        the file; RESOURCE_EXHAUSTED, there is no room for its pages."""
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
        size = self.file.bytes_left
        if size < self.offset + end:
            raise invalid_argument(
                f"shared memory region '{self.name}' has been cut: byte {self.offset + end} of '{self.key}' is needed,"
                f" which has {size} now; register it again"
            )


def _open(name: str, key: str) -> int:
    """shm_open's rules: slashes at the beginning do not count, and there is no other."""
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
    """Memory on a GPU."""

    def __init__(self, name: str, device: int, nbytes: int, process: DeviceProcess, handle: bytes) -> None:
        """Raises: ServeError: INVALID_ARGUMENT, it cannot be opened."""
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
    """A part of a region."""

    region: str
    offset: int
    """Bytes from the region's beginning. Triton reads both numbers as unsigned ones, so a negative one is huge."""
    nbytes: int


def read_reference(tensor: str, parameters: Parameters) -> RegionReference | None:
    """Where the tensor lies; None = in the request itself. Raises: ServeError: INVALID_ARGUMENT, a parameter is of the
    wrong type, or lacks its fellow."""
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
    """Those of all clients. Safe on any thread: HTTP's register theirs on the event loop. Texts and codes are Triton's;
    "CUDA" is memory on GPUs of any maker, and regions of the system are others.

    A region that a request is to write to stays until that has been done, also when it is unregistered meanwhile: its
    name is taken until then, and requests may still use it.
    """

    _guard: FaultGuard
    allowed: bool = True
    """Whether clients may register any at all."""
    _regions: dict[str, AnyRegion] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    """Guards changes of the dict and the regions' marks."""
    _process: DeviceProcess | None = field(default=None, init=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, init=False)

    def register(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Raises: ServeError: ALREADY_EXISTS, or as ClientRegion does."""
        self._check_free(name)
        self._add(ClientRegion(name, key, offset, nbytes, self._guard))

    def _check_free(self, name: str) -> None:
        """Raises: ServeError: ALREADY_EXISTS."""
        if name in self._regions:
            raise ServeError(StatusCode.ALREADY_EXISTS, f"shared memory region '{name}' already in manager")

    def _add(self, region: AnyRegion) -> None:
        """Raises: ServeError: ALREADY_EXISTS."""
        with self._lock:
            self._check_free(region.name)
            self._regions[region.name] = region

    def unregister(self, name: str, kind: type[Region]) -> None:
        """One of another kind, or that is not known, is passed over; all of the kind where the name is empty."""
        with self._lock:
            for region in [self._regions.get(name)] if name else list(self._regions.values()):
                if isinstance(region, kind):
                    self._leave(region)

    def registered(self, kind: type[RegionKind]) -> list[RegionKind]:
        """In the order of their names."""
        with self._lock:
            found = [region for region in self._regions.values() if isinstance(region, kind)]
        return sorted(found, key=lambda region: region.name)

    def checked(self, reference: RegionReference) -> AnyRegion:
        """The region that a reference names. Raises: ServeError: there is no such region, or no such part of it."""
        region = self._regions.get(reference.region)
        if region is None:
            raise not_found(f"Unable to find shared memory region: '{reference.region}'")
        region.check_bounds(reference.offset, reference.nbytes)
        return region

    def borrow(self, reference: RegionReference) -> AnyRegion:
        """One to write to, which is to be given back; raises as `checked` does."""
        with self._lock:
            region = self.checked(reference)
            region.users += 1
        return region

    def give_back(self, region: AnyRegion) -> None:
        with self._lock:
            region.users -= 1
            if region.is_leaving:
                self._leave(region)

    def _leave(self, region: AnyRegion) -> None:
        region.is_leaving = True
        if not region.users:
            del self._regions[region.name]

    # The methods

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
            each.name: status(name=each.name, key=each.key, offset=each.offset, byte_size=each.nbytes)
            for each in self._shown(request.name, ClientRegion)
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
            each.name: status(name=each.name, device_id=each.device, byte_size=each.nbytes)
            for each in self._shown(request.name, DeviceRegion)
        }
        return pb.CudaSharedMemoryStatusResponse(regions=shown)

    async def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        self._check_allowed()
        self._check_free(request.name)
        # The first has a process started, which takes seconds.
        self._add(await asyncio.to_thread(self._opened, request))
        return pb.CudaSharedMemoryRegisterResponse()

    def cuda_unregister(self, request: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        self._check_allowed()
        self.unregister(request.name, DeviceRegion)
        return pb.CudaSharedMemoryUnregisterResponse()

    def _opened(self, request: pb.CudaSharedMemoryRegisterRequest) -> DeviceRegion:
        """The process starts when a client shares the first memory of a GPU, and another one when it has ended."""
        failure = f"failed to register CUDA shared memory region: '{request.name}'"
        if not has_file("torch", _GPU_LIBRARIES):
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
        """The regions of a kind; with a name that one. Raises: ServeError: NOT_FOUND."""
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
