"""Reads the address of a Unix socket in a flag: unix:/run/rocserve.sock,mode=0660,owner=rocserve:users."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

SCHEME = "unix:"
_MODE = 0o600
"""By default only the server's own user, and root, may connect."""


@dataclass(frozen=True, slots=True)
class UnixPlace:
    """The path of a Unix socket, and who may connect."""

    path: str
    mode: int = _MODE
    """Who may connect: the socket file's permission to write."""
    user: str = ""
    """Owner of the socket file, by name or number; "" = the server's user."""
    group: str = ""

    def __str__(self) -> str:
        return f"{SCHEME}{self.path}"


def unix_place(address: str) -> UnixPlace | None:
    """Parse an address; None if it is not that of a Unix socket. Raises ValueError."""
    expected = "expected unix:/FOLDER/NAME[,mode=0660][,owner=USER:GROUP]"
    if not address.startswith(SCHEME):
        if address.startswith("unix-abstract:"):
            raise ValueError(f"{expected}, got '{address}': anybody on the machine may connect to an abstract socket")
        return None
    path, *settings = address.removeprefix(SCHEME).split(",")
    if not path.startswith("/") or path.endswith("/") or "\0" in path:
        raise ValueError(f"{expected}, got '{address}'")
    # gRPC's clients also write unix:///run/rocserve.sock.
    path = re.sub("^/+", "/", path)
    longest_path = 107  # Bytes that the kernel accepts (unix(7)).
    # Until clients may connect, the socket has such a name in the folder.
    longest = longest_path - len("/.r-12345678/s")
    if len(path.encode()) > longest_path or len(str(Path(path).parent).encode()) > longest:
        raise ValueError(
            f"expected a path of at most {longest_path} bytes in a folder of at most {longest}, got '{path}'"
        )
    mode, user, group = _MODE, "", ""
    for setting in settings:
        name, _, value = setting.partition("=")
        if name == "mode" and re.fullmatch("0?[0-7]{3}", value):
            mode = int(value, 8)
        elif name == "owner" and re.fullmatch("[^:]+(:[^:]+)?|:[^:]+", value):
            user, _, group = value.partition(":")
        else:
            raise ValueError(f"{expected}, got '{setting}' in '{address}'")
    return UnixPlace(path, mode, user, group)


def listening_address(address: str) -> str:
    """Check an address of a flag, and return it. Raises ValueError."""
    unix_place(address)
    return address
