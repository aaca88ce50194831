"""libmigraphx_c.so.3 in this process: calls with their errors, and handles that are destroyed once."""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from rocserve.backends.migraphx.binding.c_api.prototypes import MADE_ONCE, declare
from rocserve.backends.migraphx.binding.interface import MigraphxError
from rocserve.backends.migraphx.binding.messages import Messages
from rocserve.backends.standard_error import StandardErrorCapture


class Library:
    """Safe on several threads; each call releases the GIL."""

    def __init__(self, path: str) -> None:
        """
        Raises:
            MigraphxError: the library cannot be loaded into this process.
        """
        try:
            self._functions = declare(ctypes.CDLL(path))
        except OSError as error:
            raise MigraphxError(f"MIGraphX's C library cannot be loaded: {error}") from None
        self._errors = StandardErrorCapture()
        self._messages = Messages()
        # MIGraphX writes an error in pieces: those of calls that overlap could not be told apart.
        self._speaking = threading.RLock()

    def function(self, name: str) -> Any:
        """The bare function, for calls that cannot fail.

        Raises:
            MigraphxError: this MIGraphX does not have it.
        """
        try:
            return self._functions[name]
        except KeyError:
            raise MigraphxError(f"this version of MIGraphX cannot do it: its C API has no migraphx_{name}") from None

    def call(self, name: str, *arguments: Any) -> None:
        """Standard error is only taken during calls that are made once.

        So what is written before the process dies of a run (by a GPU's driver, say) reaches the log. Other calls that
        fail are made again to have MIGraphX's words; should one succeed then, that is its result. Calls during which
        standard error is taken wait for each other.

        Raises:
            MigraphxError: in MIGraphX's own words, which it writes to standard error.
        """
        function = self.function(name)
        if name not in MADE_ONCE and function(*arguments) == 0:
            return
        with self._speaking:
            start = self._errors.begin()
            status = -1
            try:
                status = function(*arguments)
            finally:
                text = self._errors.end(start)
        if status:
            raise self._error(name, status, text)
        if text:
            self._messages.add(text)

    def new(self, name: str, destroy: str, *arguments: Any) -> Handle:
        """Calls a function that gives out a handle of the caller's, with the handle first."""
        pointer = ctypes.c_void_p()
        self.call(name, ctypes.byref(pointer), *arguments)
        return Handle(self, pointer.value or 0, destroy)

    def borrowed(self, name: str, *arguments: Any) -> int:
        """Calls a function that gives out a handle which belongs to what it is got from."""
        pointer = ctypes.c_void_p()
        self.call(name, ctypes.byref(pointer), *arguments)
        return pointer.value or 0

    def size(self, name: str, *arguments: Any) -> int:
        """Calls a function that gives a number."""
        number = ctypes.c_size_t()
        self.call(name, ctypes.byref(number), *arguments)
        return number.value

    def take_messages(self) -> Sequence[str]:
        return self._messages.take()

    def _error(self, name: str, status: int, text: str) -> MigraphxError:
        """What MIGraphX wrote before the error is kept as messages, the error is told without the function's name."""
        before, *messages = text.split(f"migraphx_{name}: Error: ")
        if not messages:
            # Compilers differ in how they name the function.
            before, *messages = re.split(r"^[^\n]*?: Error: ", text, flags=re.MULTILINE)
        if not messages:
            before, messages = "", [text]
        # The error of a run on another thread may have just begun.
        words = next((words.strip() for words in reversed(messages) if words.strip()), "")
        self._messages.add(before)
        return MigraphxError(words or f"MIGraphX gave up without a word (migraphx_{name}, status {status})")


class Handle:
    """An object of MIGraphX's that is ours: destroyed once, when nothing refers to it any more.

    At the end of the process it is left alone: what it belongs to may be gone by then.
    """

    def __init__(self, library: Library, pointer: int, destroy: str) -> None:
        self._as_parameter_ = pointer
        self._finalizer = weakref.finalize(self, library.function(destroy), pointer)
        self._finalizer.atexit = False

    @property
    def pointer(self) -> int:
        return self._as_parameter_

    def destroy(self) -> None:
        """Now; nothing may use it afterwards."""
        self._finalizer()
        self._as_parameter_ = 0
