#!/usr/bin/env bash
# onnxruntime 1.32.0, quantize_dynamic with its defaults: the weights become int8 and DynamicQuantizeLinear takes one scale and
# one zero point from the whole input tensor. So the answer to one row depends on the other rows of its batch: next to a row
# with values 50 times as large it moves by 18 %, although the float model answers each row alone. A server that joins the
# requests of several clients gives each of them an answer that depends on the others.
# Seen on 2026-11-29 (the quantised answer moved by 0.177 of its size):
#   float: the row's answer moves by more than 5 % next to a large row: False
#   quantised: the row's answer moves by more than 5 % next to a large row: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat >"$folder/neighbours.py" <<'PYTHON'
import sys
from pathlib import Path

import numpy
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import quantize_dynamic

root = Path(sys.argv[1])
random = numpy.random.default_rng(0)
weight = numpy_helper.from_array(random.standard_normal((16, 4)).astype(numpy.float32), "w")
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", size]) for name, size in (("x", 16), ("y", 4)))
graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "linear", [x], [y], [weight])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), root / "float.onnx")
quantize_dynamic(root / "float.onnx", root / "quantised.onnx")
row = random.standard_normal((1, 16)).astype(numpy.float32)
for name in ("float", "quantised"):
    session = onnxruntime.InferenceSession(root / f"{name}.onnx", providers=["CPUExecutionProvider"])
    alone = session.run(None, {"x": row})[0][0]
    joined = session.run(None, {"x": numpy.concatenate([row, 50 * row])})[0][0]
    moved = numpy.abs(joined - alone).max() / numpy.abs(alone).max()
    print(f"{name}: the row's answer moves by more than 5 % next to a large row: {moved > 0.05}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/neighbours.py" "$folder" 2>/dev/null) - <<'SEEN'
float: the row's answer moves by more than 5 % next to a large row: False
quantised: the row's answer moves by more than 5 % next to a large row: True
SEEN
