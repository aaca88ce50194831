"""Copies from and to GPU memory of clients, in a separate process so that the server's own loads no GPU libraries. The
process runs one command at a time. Only that process imports PyTorch, whose builds for all makers' GPUs open handles by
the same call."""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

from rocserve.core.device_references import UNCOUNTED
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.exit_with_parent import exit_with_parent
from rocserve.plane import anonymous_file

COPIED_AT_ONCE = 4 << 20
"""Bytes that are copied in one step: about a millisecond. The data plane runs one or two steps in each turn."""
HANDLE_BYTES = 64

_REQUEST = struct.Struct("<BIIQQ64s")
"""The command, a region's number, its GPU, an offset, a number of bytes, and a handle."""
_OPEN, _READ, _WRITE, _CLOSE = range(4)
"""The commands. Only _CLOSE has no answer."""
_DONE = b"+"
"""The answer to a command that succeeded. Any other answer is the reason of a failure."""


class DeviceProcess:
    """Starts the separate process and sends commands to it. Safe on any thread."""

    def __init__(self) -> None:
        """Takes seconds. Raises ServeError (UNAVAILABLE) if the process does not start or finds no GPU."""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_given_up = False
        memory = anonymous_file.create("rocserve:devices", COPIED_AT_ONCE)
        try:
            self._memory = anonymous_file.map_file(memory, to_write=True)
            self._connection, peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            parent_pipe, writer = os.pipe2(os.O_CLOEXEC)
            self._parent_pipe = os.fdopen(writer, "wb", 0)
            """Closing it ends the process; it is closed with this object."""
            with peer, os.fdopen(parent_pipe):
                passed = (parent_pipe, peer.fileno(), memory)
                command = [sys.executable, "-m", __name__, *map(str, passed)]
                self._process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, process_group=0)
        finally:
            os.close(memory)
        # The start includes the import of PyTorch and the start of a GPU's driver.
        self._answer(120.0)

    @property
    def has_ended(self) -> bool:
        # A killed process ends late, because the driver takes long; its socket closes long before.
        return self._is_given_up or self._process.poll() is not None

    def open(self, handle: bytes, device: int, nbytes: int) -> int:
        """Open a region and return its number. Raises ServeError (INVALID_ARGUMENT) with the driver's reason."""
        number = next(self._numbers)
        with self._lock:
            self._ask(_OPEN, number, device, 0, nbytes, handle)
        return number

    def read(self, number: int, offset: int, data: memoryview) -> None:
        """Fill `data`, up to 4 MiB. Raises ServeError as `write` does."""
        with self._lock:
            self._ask(_READ, number, 0, offset, len(data))
            data[:] = self._memory[: len(data)]

    def write(self, number: int, offset: int, data: memoryview) -> None:
        """Raises ServeError: INVALID_ARGUMENT with the driver's reason; UNAVAILABLE if the process has ended."""
        with self._lock:
            self._memory[: len(data)] = data
            self._ask(_WRITE, number, 0, offset, len(data))

    def close(self, number: int) -> None:
        """Close a region. Never waits."""
        try:
            self._connection.send(_REQUEST.pack(_CLOSE, number, 0, 0, 0, b""), socket.MSG_DONTWAIT)
        except OSError:
            pass  # The process has ended, or will be killed because it does not read.

    def _ask(self, kind: int, number: int, device: int, offset: int, nbytes: int, handle: bytes = b"") -> None:
        try:
            self._connection.send(_REQUEST.pack(kind, number, device, offset, nbytes, handle))
        except OSError as error:
            raise self._ended(error) from None
        self._answer(5.0)

    def _answer(self, seconds: float) -> None:
        self._connection.settimeout(seconds)
        try:
            answer = self._connection.recv(4096)
        except OSError as error:
            raise self._ended(error) from None
        if not answer:
            raise self._ended("it has closed its socket")
        if answer != _DONE:
            raise invalid_argument(answer.decode(errors="replace"))

    def _ended(self, reason: object) -> ServeError:
        """Kill the process, because its next answer would belong to an earlier command; return the error."""
        self._is_given_up = True
        self._process.kill()
        return unavailable(f"the process that opens the memory of GPUs has ended ({reason}); register the region again")


def main(arguments: list[str]) -> None:
    """Run commands. `arguments`: descriptors of the server's pipe, of the socket, and of the memory through which all
    data is copied."""
    parent_pipe, peer, shared = map(int, arguments)
    exit_with_parent(parent_pipe)
    connection = socket.socket(fileno=peer)
    memory = anonymous_file.map_file(shared, to_write=True)
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        connection.send(f"PyTorch {torch.__version__} finds no usable GPU".encode())
        return
    # Copies are faster if the driver knows the memory, and work if it does not.
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    connection.send(_DONE)
    regions: dict[int, Any] = {}
    while request := connection.recv(_REQUEST.size):
        kind, number, device, offset, nbytes, handle = _REQUEST.unpack(request)
        if kind == _CLOSE:
            regions.pop(number, None)
            continue
        try:
            if kind == _OPEN:
                regions[number] = _open(torch, handle, device, nbytes)
            elif kind == _READ:
                host[:nbytes].copy_(regions[number][offset : offset + nbytes])
            else:
                regions[number][offset : offset + nbytes].copy_(host[:nbytes])
                torch.cuda.synchronize(regions[number].device)
            connection.send(_DONE)
        except Exception as error:
            connection.send(str(error).partition("\n")[0].encode()[:500] or b"it does not say why")


def _open(torch: Any, handle: bytes, device: int, nbytes: int) -> Any:
    if device >= torch.cuda.device_count():
        raise ValueError(f"there is no GPU {device}; this machine has {torch.cuda.device_count()} GPUs")
    storage = torch.UntypedStorage._new_shared_cuda(device, handle, nbytes, 0, UNCOUNTED, 0, b"", False)
    region = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device)).set_(storage)
    # The region's end shows whether it is as large as its client says.
    region[-1:].cpu()
    return region


if __name__ == "__main__":
    main(sys.argv[1:])
    # Skips the driver's useless work at the end of a process.
    os._exit(0)
