"""MIGraphX's C API as a binding."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from rocserve.backends.migraphx.binding.c_api.library import Handle, Library
from rocserve.backends.migraphx.binding.c_api.program import CProgram
from rocserve.backends.migraphx.binding.c_api.shapes import Shapes, size_array
from rocserve.backends.migraphx.binding.interface import DimensionRange, OnnxOptions, TensorflowOptions
from rocserve.backends.migraphx.binding.loaded_library import loaded_core


class CBinding:
    """`bare.BareBinding`. Safe on several threads; every call releases the GIL."""

    name = "c_api"
    releases_gil = True

    def __init__(self, path: str) -> None:
        """
        Raises:
            MigraphxError: the library cannot be loaded into this process.
        """
        self._library = Library(path)
        self._shapes = Shapes(self._library)
        self.library = path
        _, self.migraphx_version = loaded_core()

    def check_target(self, target: str) -> None:
        self._library.new("target_create", "target_destroy", target.encode())

    def parse_onnx(self, path: Path, options: OnnxOptions) -> CProgram:
        handle = self._library.new("onnx_options_create", "onnx_options_destroy")
        self._library.call("onnx_options_set_default_dim_value", handle, options.default_dimension)
        self._set_onnx_shapes(handle, options.input_shapes)
        return self._program("parse_onnx", path, handle)

    def parse_tensorflow(self, path: Path, options: TensorflowOptions) -> CProgram:
        handle = self._library.new("tf_options_create", "tf_options_destroy")
        self._library.call("tf_options_set_nhwc", handle, options.nhwc)
        self._library.call("tf_options_set_default_dim_value", handle, options.batch_size)
        for name, shape in options.input_shapes.items():
            sizes = size_array(shape)
            self._library.call("tf_options_set_input_parameter_shape", handle, name.encode(), sizes, len(shape))
        if options.output_names:
            names = (ctypes.c_char_p * len(options.output_names))(*(name.encode() for name in options.output_names))
            self._library.call("tf_options_set_output_names", handle, names, len(names))
        return self._program("parse_tf", path, handle)

    def load(self, path: Path) -> CProgram:
        return self._program("load", path, self._library.new("file_options_create", "file_options_destroy"))

    def take_messages(self) -> Sequence[str]:
        return self._library.take_messages()

    def _program(self, function: str, path: Path, options: Handle) -> CProgram:
        handle = self._library.new(function, "program_destroy", os.fsencode(path), options)
        return CProgram(self._library, self._shapes, handle)

    def _set_onnx_shapes(self, options: Handle, shapes: Mapping[str, Sequence[int | DimensionRange]]) -> None:
        """MIGraphX takes either fixed shapes or such that vary: with one that varies, all are given as varying."""
        fixed = {name: [size for size in shape if isinstance(size, int)] for name, shape in shapes.items()}
        if all(len(fixed[name]) == len(shape) for name, shape in shapes.items()):
            for name, sizes in fixed.items():
                self._library.call(
                    "onnx_options_set_input_parameter_shape", options, name.encode(), size_array(sizes), len(sizes)
                )
            return
        for name, shape in shapes.items():
            dimensions = self._shapes.create_dynamic(shape)
            self._library.call("onnx_options_set_dyn_input_parameter_shape", options, name.encode(), dimensions)
