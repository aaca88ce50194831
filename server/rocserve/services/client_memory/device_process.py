"""Process that opens the memory of GPUs which clients share, and copies from and to it: `device_memory.py` asks it, one
thing at a time. It alone has PyTorch, whose builds for all makers' GPUs open their handles by one call.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import socket
import struct
import sys
from typing import Any

from rocserve.plane import anonymous_file

REQUEST = struct.Struct("<BIIQQ64s")
"""The kind of request, a region's number, its GPU, an offset, a number of bytes, and a handle."""
OPEN, READ, WRITE, CLOSE = range(4)
"""CLOSE alone is not answered."""
DONE = b"+"
"""An answer; else it is the reason why not."""
_LONGEST_REASON = 500
_GONE = b"/gone"
"""In the place of PyTorch's own count of who uses the memory, which other programs do not keep."""


def main(arguments: list[str]) -> None:
    """Descriptors: the socket, and the memory through which all is copied."""
    connection = socket.socket(fileno=int(arguments[0]))
    memory = anonymous_file.map_to_write(int(arguments[1]))
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        connection.send(f"PyTorch {torch.__version__} finds no GPU here that it can use".encode())
        return
    # Copies are faster where the driver knows the memory, and work where it does not.
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    connection.send(DONE)
    regions: dict[int, Any] = {}
    while request := connection.recv(REQUEST.size):
        kind, number, device, offset, nbytes, handle = REQUEST.unpack(request)
        if kind == CLOSE:
            regions.pop(number, None)
            continue
        try:
            if kind == OPEN:
                regions[number] = _open(torch, handle, device, nbytes)
            elif kind == READ:
                host[:nbytes].copy_(regions[number][offset : offset + nbytes])
            else:
                regions[number][offset : offset + nbytes].copy_(host[:nbytes])
                torch.cuda.synchronize(regions[number].device)
            connection.send(DONE)
        except Exception as error:
            connection.send(str(error).partition("\n")[0].encode()[:_LONGEST_REASON] or b"it does not say why")


def _open(torch: Any, handle: bytes, device: int, nbytes: int) -> Any:
    """The region's bytes."""
    if device >= torch.cuda.device_count():
        raise ValueError(f"there is no GPU {device}, only {torch.cuda.device_count()}")
    storage = torch.UntypedStorage._new_shared_cuda(device, handle, nbytes, 0, _GONE, 0, b"", False)
    region = torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", device)).set_(storage)
    # That it is as large as its client says shows only at its end.
    region[-1:].cpu()
    return region


if __name__ == "__main__":
    main(sys.argv[1:])
    # What the driver does at the end of a process is for nobody.
    os._exit(0)
