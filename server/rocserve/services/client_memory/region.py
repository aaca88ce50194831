"""One registered region: a part of a file of POSIX shared memory, or memory of a GPU (`device_memory.py`).

A file is mapped, and its client may cut the file at any time, by mistake or not: see `plane/guarded_mapping.py`. What a
request has read or written is therefore checked afterwards.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator

from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument
from rocserve.plane.guarded_mapping import FaultGuard, GuardedFile, GuardedMapping
from rocserve.plane.heap import copy_in_steps

FOLDER = "/dev/shm"
"""Where Linux keeps POSIX shared memory."""
RESERVED_PREFIX = "triton_python_backend_shm_region_"


class Region:
    """What regions have in common."""

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
        most = (1 << 64) - 1
        if nbytes > most - offset:
            raise invalid_argument(
                f"Integer overflow detected: byte_size ({nbytes}) + offset ({offset}) exceeds maximum value ({most})"
                f" for region '{self.name}'"
            )
        if offset + nbytes > self.nbytes:
            raise invalid_argument(f"Invalid offset + byte size for shared memory region: '{self.name}'")


class ClientRegion(Region):
    """Safe on any thread. The file is closed with the last reference to it."""

    def __init__(self, name: str, key: str, offset: int, nbytes: int, guard: FaultGuard) -> None:
        """Open the file; `offset` and `nbytes` say which part of it the region is.

        Raises:
            ServeError: there is no such file, it is smaller than that, or cannot be mapped; codes and texts are
                Triton's.
        """
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
        stays valid when the region goes.

        Raises:
            ServeError: INVALID_ARGUMENT, the client has cut the file.
        """
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
        """A copy of a part that is within bounds; raises as `check_whole` does."""
        view, mapping = self.view(offset, nbytes)
        data = bytes(view)
        self.check_whole(mapping, offset + nbytes)
        return data

    def read_into(self, data: memoryview, offset: int) -> Generator[None, None, None]:
        """As `read`, into memory that a part fills, some bytes a step."""
        view, mapping = self.view(offset, len(data))
        yield from copy_in_steps(data, 0, view)
        self.check_whole(mapping, offset + len(data))

    def write(self, offset: int, data: memoryview) -> Generator[None, None, None]:
        """Fill a part that is within bounds, some bytes a step; raises as `check_whole` does."""
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
