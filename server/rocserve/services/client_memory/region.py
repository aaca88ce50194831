"""One registered region: a part of a file of POSIX shared memory.

This process never touches its memory, but reads and writes it by system calls. A client may cut its file at any time,
by mistake or not, and a mapping beyond the end of its file ends the process that touches it (SIGBUS), as does one whose
pages the file system has no room for; a call says so instead.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat

from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument
from rocserve.core.tensors import Buffer

FOLDER = "/dev/shm"
"""Where Linux keeps POSIX shared memory."""
RESERVED_PREFIX = "triton_python_backend_shm_region_"

_AT_ONCE = 1 << 30
"""Bytes; a call moves less than 2 GiB."""


class ClientRegion:
    """Safe on any thread. The file is closed with the last reference to it."""

    __slots__ = ("_descriptor", "_mapping", "is_leaving", "key", "name", "nbytes", "offset", "users")

    def __init__(self, name: str, key: str, offset: int, nbytes: int) -> None:
        """Open the file; `offset` and `nbytes` say which part of it the region is.

        Raises:
            ServeError: there is no such file, or it is smaller than that; codes and texts are Triton's.
        """
        self.name = name
        self.key = key
        self.offset = offset
        self.nbytes = nbytes
        self.users = 0
        """Requests under way that write to it; kept by whoever owns the region."""
        self.is_leaving = False
        """It goes when its last user has."""
        self._mapping: mmap.mmap | None = None
        self._descriptor = -1
        self._descriptor = _open(name, key)
        try:
            self._check_size()
        except ServeError:
            self.close()
            raise

    def close(self) -> None:
        """Only when nobody uses it any more."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _check_size(self) -> None:
        if self.offset + self.nbytes > os.fstat(self._descriptor).st_size:
            raise _refused(self.name, "invalid args")
        if not self.nbytes:
            raise _refused(self.name, f"unable to process address space{os.strerror(errno.EINVAL)}")

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

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of a part that is within bounds.

        Raises:
            ServeError: INVALID_ARGUMENT, the client has cut the file meanwhile.
        """
        parts: list[bytes] = []
        position, end = self.offset + offset, self.offset + offset + nbytes
        while position < end:
            part = os.pread(self._descriptor, min(end - position, _AT_ONCE), position)
            if not part:
                raise self._cut(end)
            parts.append(part)
            position += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """A part that is within bounds where it lies, for whoever has the kernel copy it (workers.memory.Arena does).

        It stays valid when the region goes.

        Raises:
            ServeError: INVALID_ARGUMENT, the client has cut the file.
        """
        begin, end = self.offset + offset, self.offset + offset + nbytes
        self.check_present(offset + nbytes)
        mapping = self._mapping
        if mapping is None:
            try:
                mapping = mmap.mmap(self._descriptor, self.offset + self.nbytes, prot=mmap.PROT_READ)
            except (OSError, ValueError):
                # The file has been cut elsewhere, or there is no room for the map.
                return memoryview(self.read(offset, nbytes))
            self._mapping = mapping
        return memoryview(mapping)[begin:end]

    def check_present(self, end: int) -> None:
        """Raises: ServeError: INVALID_ARGUMENT, the client has cut the file before byte `end` of the region."""
        if os.fstat(self._descriptor).st_size < self.offset + end:
            raise self._cut(self.offset + end)

    def write(self, offset: int, data: Buffer) -> None:
        """Fill a part that is within bounds.

        Raises:
            ServeError: INVALID_ARGUMENT, the client has cut the file meanwhile; RESOURCE_EXHAUSTED, there is no room
                for its pages.
        """
        position, view = self.offset + offset, memoryview(data)
        # A write beyond the end would lengthen the file, which does no harm but is not what the client expects.
        self.check_present(offset + len(view))
        while view:
            try:
                written = os.pwrite(self._descriptor, view[:_AT_ONCE], position)
            except OSError as error:
                text = (
                    f"shared memory region '{self.name}' cannot be written: {error.strerror}; is {FOLDER} large enough?"
                )
                raise ServeError(StatusCode.RESOURCE_EXHAUSTED, text) from None
            position += written
            view = view[written:]

    def _cut(self, end: int) -> ServeError:
        size = os.fstat(self._descriptor).st_size
        return invalid_argument(
            f"shared memory region '{self.name}' has been cut: byte {end} of '{self.key}' is needed, which has {size}"
            " now; register it again"
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
