"""Puts listening Unix sockets in their places, removes them, and names their clients by their users.

A socket is bound in a folder that only this process's user can enter, gets its mode and owner, and is moved to its
place once it listens. So no client connects too early, and the place never has a socket that does not answer, except
that of a server that has died. A lock lets only one server at a time check the place and move its socket.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import grp
import os
import pwd
import shutil
import socket
import stat
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rocserve.settings.server import USER
from rocserve.settings.unix_place import UnixPlace


@dataclass(frozen=True, slots=True)
class PublishedSocket:
    """A Unix socket that clients find at its path."""

    place: UnixPlace
    file: tuple[int, int]
    """Device and inode, because another server may replace the socket."""

    def withdraw(self) -> None:
        """Refuse new connections; existing ones are not affected. A second call does nothing."""
        with contextlib.suppress(OSError), _locked(self.place):
            if _identity(self.place.path) == self.file:
                Path(self.place.path).unlink()


@contextlib.contextmanager
def private_path(place: UnixPlace) -> Iterator[str]:
    """Yield a path next to the place, in a folder that is removed with what is still in it. Raises OSError."""
    folder = tempfile.mkdtemp(prefix=".r-", dir=Path(place.path).parent)
    try:
        yield f"{folder}/s"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def publish(place: UnixPlace, private: str) -> PublishedSocket:
    """Move a socket that listens to its place. Raises OSError if another server has it, or something else is there."""
    os.chown(private, _user(place.user), _group(place.group))
    Path(private).chmod(place.mode)
    with _locked(place):
        _check_free(place.path)
        Path(private).rename(place.path)
        return PublishedSocket(place, _identity(place.path))


def listen(place: UnixPlace, backlog: int) -> tuple[socket.socket, PublishedSocket]:
    """Return a listening socket, in its place. Raises OSError."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        with private_path(place) as private:
            listening.bind(private)
            listening.listen(backlog)
            return listening, publish(place, private)
    except OSError:
        listening.close()
        raise


def client_of(connection: socket.socket) -> str:
    """Return the address of a client: its user, as the kernel noted it when the client connected."""
    # struct ucred: process, user, group.
    credentials = struct.Struct("iII")
    octets = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size)
    return f"{USER}{credentials.unpack(octets)[1]}"


def _user(name: str) -> int:
    """Return the number of a user; -1 = no other user. Raises OSError."""
    try:
        return int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid if name else -1
    except KeyError:
        raise OSError(errno.EINVAL, f"there is no user '{name}'") from None


def _group(name: str) -> int:
    try:
        return int(name) if name.isdecimal() else grp.getgrnam(name).gr_gid if name else -1
    except KeyError:
        raise OSError(errno.EINVAL, f"there is no group '{name}'") from None


def _check_free(path: str) -> None:
    """Raise OSError unless the path is free, or has the socket of a server that has ended."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError(errno.EEXIST, "a file exists there that is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        # Any other error, also a missing right to connect, may come from a living server.
        if probe.connect_ex(path) != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _identity(path: str) -> tuple[int, int]:
    found = os.lstat(path)
    return found.st_dev, found.st_ino


@contextlib.contextmanager
def _locked(place: UnixPlace) -> Iterator[None]:
    """Hold the lock of the place's folder. Raises OSError if another program keeps it."""
    folder = os.open(Path(place.path).parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # Another server has the folder for less than a millisecond.
    end = time.monotonic() + 5.0
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)
        yield
    finally:
        os.close(folder)
