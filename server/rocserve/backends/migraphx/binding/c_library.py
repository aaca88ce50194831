"""libmigraphx_c.so.3 in this process: calls with their errors, and handles that are destroyed once."""

from __future__ import annotations

import ctypes
import re
import threading
import weakref
from collections.abc import Callable, Mapping
from ctypes import POINTER, c_bool, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

from rocserve.backends.migraphx.binding.interface import MigraphxError
from rocserve.backends.standard_error import StandardErrorCapture

_HANDLE = c_void_p
_NEW = POINTER(c_void_p)
"""A handle that is given out: the caller's (to be destroyed once) or one that belongs to what it is got from."""
_SIZES = POINTER(c_size_t)

_ONE_HANDLE = (
    "dynamic_dimension_destroy",
    "dynamic_dimensions_destroy",
    "shape_destroy",
    "argument_destroy",
    "target_destroy",
    "program_parameter_shapes_destroy",
    "program_parameters_destroy",
    "arguments_destroy",
    "shapes_destroy",
    "program_destroy",
    "onnx_options_destroy",
    "file_options_destroy",
    "compile_options_destroy",
    "tf_options_destroy",
    "quantize_int8_options_destroy",
    "quantize_fp8_options_destroy",
    "program_print",
    "quantize_fp16",
    "quantize_bf16",
)
_NEW_HANDLE = (
    "program_parameters_create",
    "onnx_options_create",
    "file_options_create",
    "compile_options_create",
    "tf_options_create",
    "quantize_int8_options_create",
    "quantize_fp8_options_create",
)

_OTHERS: Mapping[str, tuple[Any, ...]] = {
    "dynamic_dimension_create_min_max": (_NEW, c_size_t, c_size_t),
    "dynamic_dimension_equal": (POINTER(c_bool), _HANDLE, _HANDLE),
    "dynamic_dimensions_create": (_NEW, POINTER(c_void_p), c_size_t),
    "dynamic_dimensions_size": (_SIZES, _HANDLE),
    "dynamic_dimensions_get": (_NEW, _HANDLE, c_size_t),
    "shape_create": (_NEW, c_int, _SIZES, c_size_t),
    "shape_create_scalar": (_NEW, c_int),
    "shape_lengths": (POINTER(_SIZES), _SIZES, _HANDLE),
    "shape_strides": (POINTER(_SIZES), _SIZES, _HANDLE),
    "shape_dyn_dims": (_NEW, _HANDLE),
    "shape_type": (POINTER(c_int), _HANDLE),
    "shape_bytes": (_SIZES, _HANDLE),
    "shape_dynamic": (POINTER(c_bool), _HANDLE),
    "argument_create": (_NEW, _HANDLE, c_void_p),
    "argument_shape": (_NEW, _HANDLE),
    "argument_buffer": (_NEW, _HANDLE),
    "target_create": (_NEW, c_char_p),
    "program_parameter_shapes_size": (_SIZES, _HANDLE),
    "program_parameter_shapes_get": (_NEW, _HANDLE, c_char_p),
    "program_parameter_shapes_names": (POINTER(c_char_p), _HANDLE),
    "program_parameters_add": (_HANDLE, c_char_p, _HANDLE),
    "arguments_get": (_NEW, _HANDLE, c_size_t),
    "shapes_size": (_SIZES, _HANDLE),
    "shapes_get": (_NEW, _HANDLE, c_size_t),
    "program_compile": (_HANDLE, _HANDLE, _HANDLE),
    "program_get_parameter_shapes": (_NEW, _HANDLE),
    "program_get_output_shapes": (_NEW, _HANDLE),
    "program_run": (_NEW, _HANDLE, _HANDLE),
    "load": (_NEW, c_char_p, _HANDLE),
    "save": (_HANDLE, c_char_p, _HANDLE),
    "parse_onnx": (_NEW, c_char_p, _HANDLE),
    "parse_tf": (_NEW, c_char_p, _HANDLE),
    "onnx_options_set_input_parameter_shape": (_HANDLE, c_char_p, _SIZES, c_size_t),
    "onnx_options_set_dyn_input_parameter_shape": (_HANDLE, c_char_p, _HANDLE),
    "onnx_options_set_default_dim_value": (_HANDLE, c_size_t),
    "tf_options_set_nhwc": (_HANDLE, c_bool),
    "tf_options_set_input_parameter_shape": (_HANDLE, c_char_p, _SIZES, c_size_t),
    "tf_options_set_default_dim_value": (_HANDLE, c_size_t),
    "tf_options_set_output_names": (_HANDLE, POINTER(c_char_p), c_size_t),
    "compile_options_set_offload_copy": (_HANDLE, c_bool),
    "compile_options_set_fast_math": (_HANDLE, c_bool),
    "compile_options_set_exhaustive_tune_flag": (_HANDLE, c_bool),
    "quantize_int8_options_add_calibration_data": (_HANDLE, _HANDLE),
    "quantize_int8": (_HANDLE, _HANDLE, _HANDLE),
    "quantize_fp8_options_add_calibration_data": (_HANDLE, _HANDLE),
    "quantize_fp8": (_HANDLE, _HANDLE, _HANDLE),
}

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

PROTOTYPES: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_ONE_HANDLE, (_HANDLE,)),
    **dict.fromkeys(_NEW_HANDLE, (_NEW,)),
    **_OTHERS,
}
"""What each takes, by its name without "migraphx_"."""


class Library:
    """Safe on several threads; each call releases the GIL."""

    def __init__(self, path: str, add_message: Callable[[str], None] = lambda text: None) -> None:
        """`add_message`: takes what MIGraphX writes that is no error.

        Raises:
            MigraphxError: the library cannot be loaded into this process.
        """
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            raise MigraphxError(f"MIGraphX's C library cannot be loaded: {error}") from None
        self._functions: dict[str, Any] = {}
        for name, takes in PROTOTYPES.items():
            # An older MIGraphX does not have them all.
            function = getattr(library, f"migraphx_{name}", None)
            if function is not None:
                function.argtypes, function.restype = takes, c_int
                self._functions[name] = function
        self._errors = StandardErrorCapture()
        self._add_message = add_message
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
        """What MIGraphX wrote before the error is kept as messages, the error is told without the function's name."""
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
        self._as_parameter_ = pointer
        self._finalizer = weakref.finalize(self, library.function(destroy), pointer)
        self._finalizer.atexit = False

    @property
    def pointer(self) -> int:
        return self._as_parameter_
