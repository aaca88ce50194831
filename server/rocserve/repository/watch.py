"""Wakes the scan loop when files in the repositories change, and names the changed folders. Notifications (inotify,
through watchdog) only start a scan. They miss network file systems and other mounts, so polling goes on."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import threading
import warnings
from collections.abc import Iterable
from pathlib import Path

from watchdog import events
from watchdog.events import FileSystemEvent, FileSystemEventHandler
from watchdog.observers import Observer
from watchdog.observers.api import BaseObserver, ObservedWatch

UNWATCHED_POLL_SECONDS = 2.0
"""Longest pause between scans of repositories without notifications."""

# Reading a model must not wake the scan loop, so opened and closed files are not requested.
_CHANGES: list[type[FileSystemEvent]] = [
    getattr(events, f"{kind}{change}Event")
    for kind in ("Dir", "File")
    for change in ("Created", "Deleted", "Modified", "Moved")
]


class RepositoryWatch(FileSystemEventHandler):
    """Watches folders, which may vanish and come back."""

    def __init__(self, roots: Iterable[Path], log: logging.Logger, *, recursive: bool = True) -> None:
        """`recursive`: watch all subfolders too."""
        self._roots = tuple(roots)
        self._recursive = recursive
        self._log = log
        self._changed = asyncio.Event()
        self._folders: set[Path] | None = None
        """Changed folders since the last `take_changed`; None = any folder may have changed."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._observer: BaseObserver | None = None
        self._watches: dict[Path, tuple[tuple[int, int], ObservedWatch]] = {}
        self._lacks_watches = False
        """The system's limit of watches is reached, so some folders may be unwatched."""
        self._failures: set[str] = set()
        self._lock = threading.Lock()
        """Held by the thread that renews or closes the watches. That thread runs on if its caller is cancelled."""
        self._is_closed = False

    async def renew(self) -> None:
        """Watch every folder that exists and is not watched yet, or was replaced since."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._renew)

    async def wait(self, timeout: float) -> bool:
        """Wait for a change since the last call, at most `timeout` seconds. Returns whether there was one."""
        if not self._watches_all:
            timeout = min(timeout, UNWATCHED_POLL_SECONDS)
        with contextlib.suppress(TimeoutError):
            # Not wait_for, which may lose a cancellation that comes together with a change.
            async with asyncio.timeout(timeout):
                await self._changed.wait()
        woken = self._changed.is_set()
        self._changed.clear()
        return woken

    def take_changed(self) -> set[Path] | None:
        """Return the folders that changed since the last call; None = any folder may have changed."""
        folders, self._folders = self._folders, set()
        return folders if self._watches_all else None

    def wake(self, folder: Path | None = None) -> None:
        """Let the current or next `wait` return immediately. `folder`: the changed folder; None = perhaps any."""
        if folder is None:
            self._folders = None
        elif self._folders is not None:
            self._folders.add(folder)
        self._changed.set()

    @property
    def _watches_all(self) -> bool:
        return len(self._watches) == len(self._roots) and not self._lacks_watches

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _renew(self) -> None:
        """Renew the watches. Blocks, because watching a tree walks it."""
        with self._lock:
            if self._is_closed:
                return
            try:
                if self._observer is None:
                    # watchdog 7 writes to standard error about folders that it sees twice while they fill, and when it
                    # ends. Polling finds the changes that it misses.
                    warnings.filterwarnings("ignore", message="Callback with id", category=RuntimeWarning)
                    logging.getLogger("watchdog").addHandler(logging.NullHandler())
                    observer = Observer()
                    observer.start()
                    self._observer = observer
            except OSError as error:
                self._fail(f"no notifications of changed files: {error}; polling instead")
                return
            if self._lacks_watches and has_watches_left():
                for root in self._roots:
                    self._forget(root, self._observer)
            for root in self._roots:
                self._renew_root(root, self._observer)
            # watchdog 7 does not report folders below a root that it could not watch.
            self._lacks_watches = bool(self._watches) and not has_watches_left()
            if self._lacks_watches:
                self._fail(
                    "no notifications of changed files in all folders: inotify watch limit reached"
                    " (fs.inotify.max_user_watches); polling instead"
                )

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            observer, self._observer = self._observer, None
            if observer is not None:
                try:
                    observer.stop()
                    observer.join(timeout=5.0)
                except Exception as error:
                    # watchdog may fail on folders that are renamed meanwhile. Its threads end with the process.
                    self._log.debug("the notifications of changed files did not stop properly: %r", error)

    def _renew_root(self, root: Path, observer: BaseObserver) -> None:
        try:
            status = root.stat()
        except OSError:
            self._forget(root, observer)
            return
        identity = (status.st_dev, status.st_ino)
        watched = self._watches.get(root)
        alive = any(emitter.is_alive() for emitter in observer.emitters if watched and emitter.watch == watched[1])
        if watched is not None and watched[0] == identity and alive:
            return
        self._forget(root, observer)
        try:
            watch = observer.schedule(self, str(root.resolve()), recursive=self._recursive, event_filter=_CHANGES)
        except OSError as error:
            self._fail(f"no notifications of changed files in '{root}': {error}; polling instead")
            return
        self._watches[root] = (identity, watch)
        # Only a scan finds changes from before the watch.
        self._wake_soon(None)

    def _forget(self, root: Path, observer: BaseObserver) -> None:
        watched = self._watches.pop(root, None)
        if watched is not None:
            # watchdog may fail here as in _close. The folder is gone, or will be watched again.
            with contextlib.suppress(Exception):
                observer.unschedule(watched[1])

    def _fail(self, text: str) -> None:
        if text not in self._failures:
            self._failures.add(text)
            self._log.warning(text)

    def on_any_event(self, event: FileSystemEvent) -> None:
        """Wake the scan loop. Called in watchdog's thread."""
        for path in map(os.fsdecode, (event.src_path, event.dest_path) if event.dest_path else (event.src_path,)):
            for root, (_, watch) in self._watches.copy().items():
                if f"{path}{os.sep}".startswith(watch.path + os.sep):
                    name = path[len(watch.path) + 1 :].split(os.sep, 1)[0]
                    # Mounted volumes are swapped by changing a hidden link that all folders lead through.
                    self._wake_soon(None if name.startswith(".") else root / name)

    def _wake_soon(self, folder: Path | None) -> None:
        """Wake the scan loop. Called from any thread."""
        # The loop may be closed while the observer ends.
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self.wake, folder)


def has_watches_left() -> bool:
    """Whether the system allows one more watch."""
    libc = ctypes.CDLL(None, use_errno=True)
    instance = libc.inotify_init1(os.O_CLOEXEC)
    if instance < 0:
        return True  # Unknown; but the observer already has its inotify instance.
    try:
        # 1 = IN_ACCESS: any event will do.
        return libc.inotify_add_watch(instance, b"/", 1) >= 0 or ctypes.get_errno() != errno.ENOSPC
    finally:
        os.close(instance)
