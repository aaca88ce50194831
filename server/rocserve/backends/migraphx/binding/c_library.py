"""libmigraphx_c.so.3 in this process: calls with their errors, and handles that are destroyed once.

Its functions take pointers, and numbers that each go as 64 bits, whatever their width: ctypes needs no prototypes. All
return a status. Names are given here without "migraphx_".
"""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

from rocserve.backends.migraphx.binding.interface import MigraphxError
from rocserve.backends.standard_error import StandardErrorCapture

MADE_ONCE = frozenset(
    {
        "load",
        "save",
        "parse_onnx",
        "parse_tf",
        "target_create",
        "program_compile",
        "program_print",
        "quantize_fp16",
        "quantize_bf16",
        "quantize_int8",
        "quantize_fp8",
    }
)
"""Those that write messages beside their errors, or change what they are given. The others may be called again."""


class Library:
    """Safe on several threads; each call releases the GIL."""

    def __init__(self, path: str, add_message: Callable[[str], None] = lambda text: None) -> None:
        """`add_message`: takes MIGraphX's output that is no error.

        Raises:
            MigraphxError: the library cannot be loaded into this process.
        """
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise MigraphxError(f"MIGraphX's C library cannot be loaded: {error}") from None
        self._errors = StandardErrorCapture()
        self._add_message = add_message
        # MIGraphX writes an error in pieces: those of overlapping calls would be mixed.
        self._speaking = threading.RLock()

    def function(self, name: str) -> Any:
        """The bare function, for calls that cannot fail; it takes numbers as c_size_t or c_void_p.

        Raises:
            MigraphxError: this MIGraphX, an older one, does not have it.
        """
        try:
            return getattr(self._library, f"migraphx_{name}")
        except AttributeError:
            raise MigraphxError(f"this version of MIGraphX cannot do it: its C API has no migraphx_{name}") from None

    def call(self, name: str, *arguments: Any) -> None:
        """Standard error is only taken during calls that are made once.

        So the last output of a process that dies of a run (a GPU driver's, say) reaches the log. Other calls that
        fail are made again to have MIGraphX's words; should one succeed then, that is its result. Calls during which
        standard error is taken wait for each other.

        Raises:
            MigraphxError: in MIGraphX's own words, which it writes to standard error.
        """
        function = self.function(name)
        passed = [ctypes.c_size_t(each) if isinstance(each, int) else each for each in arguments]
        if name not in MADE_ONCE and function(*passed) == 0:
            return
        with self._speaking:
            start = self._errors.begin()
            status = -1
            try:
                status = function(*passed)
            finally:
                text = self._errors.end(start)
        if status:
            raise self._error(name, status, text)
        if text:
            self._add_message(text)

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

    def _error(self, name: str, status: int, text: str) -> MigraphxError:
        """What MIGraphX wrote before the error is kept as messages; the error is without the function's name."""
        before, *messages = text.split(f"migraphx_{name}: Error: ")
        if not messages:
            # Compilers differ in how they name the function.
            before, *messages = re.split(r"^[^\n]*?: Error: ", text, flags=re.MULTILINE)
        if not messages:
            before, messages = "", [text]
        # The error of a run on another thread may have just begun.
        words = next((words.strip() for words in reversed(messages) if words.strip()), "")
        self._add_message(before)
        return MigraphxError(words or f"MIGraphX gave up without a word (migraphx_{name}, status {status})")


class Handle:
    """An object of MIGraphX's that is ours: destroyed once, when nothing refers to it any more.

    At the end of the process it is left alone: what it belongs to may be gone by then.
    """

    def __init__(self, library: Library, pointer: int, destroy: str) -> None:
        self.pointer = pointer
        self._as_parameter_ = ctypes.c_void_p(pointer)
        self._finalizer = weakref.finalize(self, library.function(destroy), self._as_parameter_)
        self._finalizer.atexit = False
