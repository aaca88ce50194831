"""Compiles the programs of further sizes while a model serves."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rocserve.core.errors import ServeError
from rocserve.core.printable import listed

THREAD_NAME = "batch sizes"


@dataclass(eq=False)
class BackgroundSizes:
    """Compiles the programs of the remaining sizes one by one and puts them into service. A failed size does not stop
    the others. They need a separate thread because a compile takes minutes, while the worker's main thread listens to
    the server and its second thread answers batches."""

    _sizes: Sequence[str]
    """As users read them; a tuned program that replaces another counts as a size."""
    _prepare: Callable[[str, Callable[[str], None]], None]
    """Compiles a size, loads it and puts it into service. The second argument reports progress."""
    _cancel: Callable[[], None]
    """Makes the running `_prepare` and all later ones raise. May be called on any thread."""
    _report: Callable[[str], None]
    """Sends the state to the server; "" = done."""
    _log: logging.Logger
    _one: str = "batch size"
    """The noun for a size."""
    _many: str = "batch sizes"
    _stopping: threading.Event = field(default_factory=threading.Event, init=False)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)

    def start(self) -> None:
        if self._sizes:
            self._thread.start()

    def stop(self) -> None:
        """Cancel the compiles, and wait for the thread to end."""
        self._stopping.set()
        self._cancel()
        self.wait()

    def wait(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        failures: dict[str, str] = {}
        for index, size in enumerate(self._sizes):
            if self._stopping.is_set():
                return
            missing = f"serving; {self._many} still to compile: {listed(self._sizes[index:])}"

            def report(text: str, missing: str = missing) -> None:
                self._report(f"{missing}; {text}" if text else missing)

            report("")
            try:
                self._prepare(size, report)
            except Exception as error:
                # Any error is caught, because the sizes in service continue to serve.
                if self._stopping.is_set():
                    return
                if isinstance(error, ServeError):
                    failures[size] = error.text
                    self._log.warning("%s %s is not in service: %s", self._one, size, error.text)
                else:
                    failures[size] = str(error) or type(error).__name__
                    self._log.error("%s %s is not in service", self._one, size, exc_info=error)
        if not self._stopping.is_set():
            # All failed sizes come before the first reason because readers cut long texts.
            text = "; ".join(f"{self._one} {size}: {reason}" for size, reason in failures.items())
            if failures:
                sizes = f"{self._many} {listed([*failures])}: " if len(failures) > 1 else ""
                text = f"serving without {sizes}{text}"
            self._report(text)
