#!/usr/bin/env bash
# MIGraphX 7.1.1 (Debian sid's 7.1.1-8, target ref): LogSoftmax is computed as the logarithm of the softmax. Classes that are
# some 104 below the largest one have a softmax of 0 in float32, and their answer is -inf where -150 or -200 is right.
# Softplus is the logarithm of 1 + exp(x), which overflows: it gives inf from 88.8 on, where x itself is right.
# Takes MIGraphX from Debian sid by docker/migraphx-root.sh (needs apt and Debian's keys), and runs this system's Python on it.
# Seen on 2026-11-29:
#   LogSoftmax of [0.0, 50.0, 200.0]: [-inf, -inf, 0.0]
#   Softplus of [0.0, 50.0, 200.0]: [0.6931, 50.0, inf]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$(dirname "$0")/../docker/migraphx-root.sh" "$folder/root" >/dev/null
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2
cat >"$folder/models.py" <<'PYTHON'
import sys

import onnx
from onnx import TensorProto, helper

ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in "xy"]
for operator in ("LogSoftmax", "Softplus"):
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"])], "model", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, f"{sys.argv[1]}/{operator}.onnx")
PYTHON
cat >"$folder/run.py" <<'PYTHON'
import ctypes
import sys
from ctypes import byref, c_float, c_size_t, c_void_p

library = ctypes.CDLL("libmigraphx_c.so.3")


def make(name: str, *arguments: object) -> c_void_p:
    result = c_void_p()
    assert getattr(library, f"migraphx_{name}")(byref(result), *arguments) == 0, name
    return result


def run(file: str, numbers: list[float]) -> list[float]:
    program = make("parse_onnx", file.encode(), make("onnx_options_create"))
    target, options = make("target_create", b"ref"), make("compile_options_create")
    assert library.migraphx_program_compile(program, target, options) == 0
    shape = make("program_parameter_shapes_get", make("program_get_parameter_shapes", program), b"x")
    memory = (c_float * 3)(*numbers)
    parameters = make("program_parameters_create")
    assert library.migraphx_program_parameters_add(parameters, b"x", make("argument_create", shape, memory)) == 0
    answer = make("arguments_get", make("program_run", program, parameters), c_size_t(0))
    values = ctypes.cast(make("argument_buffer", answer), ctypes.POINTER(c_float))
    return [round(value, 4) for value in values[:3]]


x = [0.0, 50.0, 200.0]
for operator in ("LogSoftmax", "Softplus"):
    print(f"{operator} of {x}: {run(f'{sys.argv[1]}/{operator}.onnx', x)}")
PYTHON
"$folder/venv/bin/python" "$folder/models.py" "$folder"
libraries=$folder/root/usr/lib/x86_64-linux-gnu
python=$("$folder/venv/bin/python" -c 'import os, sys; print(os.path.realpath(sys.executable))')
diff <("$libraries/ld-linux-x86-64.so.2" --library-path "$libraries:$libraries/migraphx/lib" \
  "$python" "$folder/run.py" "$folder") - <<'SEEN'
LogSoftmax of [0.0, 50.0, 200.0]: [-inf, -inf, 0.0]
Softplus of [0.0, 50.0, 200.0]: [0.6931, 50.0, inf]
SEEN
