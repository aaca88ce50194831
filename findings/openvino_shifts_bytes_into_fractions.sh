#!/usr/bin/env bash
# openvino 2026.4.1 and onnxruntime-openvino 1.24.1, device CPU: ONNX's BitShift to the right on uint8 depends on whether the
# file fixes the shape of the tensor. With an open dimension, as for batches, 0xf8 >> 4 gives 16, a number of five bits, and 15.5
# if a Cast to float and a multiplication follow; with a fixed shape it gives 15 in both. A graph that unpacks two 4-bit
# numbers of a byte thus reads the upper one too large. The frontend writes the shift as a division by a power of two. Fixed
# shapes go to code that drops the remainder, open ones to a node that divides in float, takes the following operators into
# itself, and rounds where it stores bytes. Numbers of 32 bits are right.
# Seen on 2026-11-30, bytes 18, 17, 2f, f8 shifted by 4 bits (alone; with Cast and Mul):
#   CPUExecutionProvider, fixed: uint8 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
#   CPUExecutionProvider, open: uint8 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
#   openvino, fixed: uint8 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
#   openvino, open: uint8 [2, 1, 3, 16]; [1.5, 1.4375, 2.9375, 15.5], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
#   OpenVINOExecutionProvider, fixed: uint8 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
#   OpenVINOExecutionProvider, open: uint8 [2, 1, 3, 16]; [1.5, 1.4375, 2.9375, 15.5], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime-openvino==1.24.1 openvino==2026.4.1 \
    onnx==1.23.2 numpy==2.4.6
cat >"$folder/shifts.py" <<'PYTHON'
import sys

import numpy
from onnx import TensorProto, checker, helper, numpy_helper


def file_of(kind, rows, has_float):
    number = getattr(TensorProto, kind.upper())
    nodes = [helper.make_node("BitShift", ["x", "bits"], ["upper" if has_float else "y"], direction="RIGHT")]
    if has_float:
        nodes.append(helper.make_node("Cast", ["upper"], ["float"], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", ["float", "one"], ["y"]))
    constants = [numpy_helper.from_array(numpy.array([4], kind), "bits")]
    constants.append(numpy_helper.from_array(numpy.array([1], numpy.float32), "one"))
    x = helper.make_tensor_value_info("x", number, [rows, 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT if has_float else number, [rows, 4])
    graph = helper.make_graph(nodes, "shift", [x], [y], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    checker.check_model(model)
    return model.SerializeToString()


def answer(engine, file, x):
    if engine == "openvino":
        import openvino

        core = openvino.Core()
        return core.compile_model(core.read_model(file), "CPU")({"x": x})[0][0].tolist()
    import onnxruntime

    return onnxruntime.InferenceSession(file, providers=[engine]).run(None, {"x": x})[0][0].tolist()


engine = sys.argv[1]
for name, rows in {"fixed": 1, "open": "rows"}.items():
    answers = []
    for kind in ("uint8", "uint32"):
        x = numpy.array([[0x18, 0x17, 0x2F, 0xF8]], kind)
        alone, with_float = (answer(engine, file_of(kind, rows, has_float), x) for has_float in (False, True))
        answers.append(f"{kind} {alone}; {with_float}")
    print(f"{engine}, {name}: {', '.join(answers)}")
PYTHON
# Both packages bring OpenVINO's libraries, so each engine has its own process.
seen() {
    for engine in CPUExecutionProvider openvino OpenVINOExecutionProvider; do
        "$folder/venv/bin/python" "$folder/shifts.py" "$engine"
    done
}
diff <(seen 2>/dev/null) - <<'SEEN'
CPUExecutionProvider, fixed: uint8 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
CPUExecutionProvider, open: uint8 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
openvino, fixed: uint8 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
openvino, open: uint8 [2, 1, 3, 16]; [1.5, 1.4375, 2.9375, 15.5], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
OpenVINOExecutionProvider, fixed: uint8 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
OpenVINOExecutionProvider, open: uint8 [2, 1, 3, 16]; [1.5, 1.4375, 2.9375, 15.5], uint32 [1, 1, 2, 15]; [1.0, 1.0, 2.0, 15.0]
SEEN
