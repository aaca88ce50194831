"""The functions of libmigraphx_c.so.3 that are used, and what they take. All give a status; 0 is success."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import POINTER, c_bool, c_char_p, c_int, c_size_t, c_void_p
from typing import Any

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


def declare(library: ctypes.CDLL) -> Mapping[str, Any]:
    """The functions by their names without "migraphx_"; an older MIGraphX does not have them all."""
    functions = {}
    for name, takes in PROTOTYPES.items():
        function = getattr(library, f"migraphx_{name}", None)
        if function is not None:
            function.argtypes = takes
            function.restype = c_int
            functions[name] = function
    return functions
