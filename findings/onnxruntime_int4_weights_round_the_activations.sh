#!/usr/bin/env bash
# onnxruntime 1.32.0, CPU provider: MatMul of float32 by an INT4 weight behind DequantizeLinear is not computed in float32.
# The optimiser fuses the two nodes into MatMulNBits with accuracy level 4, which rounds the *activations* to int8: the
# answer is some 0.3 % of its size off, although the graph says float32 and the weight's values are exact in it.
# Session option session.qdq_matmulnbits_accuracy_level = 1 makes the same file exact.
# Seen on 2026-11-28:
#   default: off by more than 0.1 %: True
#   accuracy level 1: off by more than 0.1 %: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2
cat >"$folder/weights.py" <<'PYTHON'
import numpy
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

random = numpy.random.default_rng(0)
numbers = random.integers(-8, 8, 64 * 64)
halves = (numbers & 15).astype(numpy.uint8)
weight = helper.make_tensor("w", TensorProto.INT4, [64, 64], (halves[0::2] | halves[1::2] << 4).tobytes(), raw=True)
scale = numpy.float32(0.05)
x = random.standard_normal((4, 64)).astype(numpy.float32)
expected = x @ (numbers.reshape(64, 64) * scale)
nodes = [helper.make_node("DequantizeLinear", ["w", "s"], ["d"]), helper.make_node("MatMul", ["x", "d"], ["y"])]
ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 64]) for name in "xy"]
graph = helper.make_graph(nodes, "int4", ends[:1], ends[1:], [weight, numpy_helper.from_array(scale, "s")])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
for name, entries in (("default", {}), ("accuracy level 1", {"session.qdq_matmulnbits_accuracy_level": "1"})):
    options = onnxruntime.SessionOptions()
    for entry in entries.items():
        options.add_session_config_entry(*entry)
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    difference = numpy.abs(session.run(None, {"x": x})[0] - expected).max() / numpy.abs(expected).max()
    print(f"{name}: off by more than 0.1 %: {difference > 0.001}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/weights.py") - <<'SEEN'
default: off by more than 0.1 %: True
accuracy level 1: off by more than 0.1 %: False
SEEN
