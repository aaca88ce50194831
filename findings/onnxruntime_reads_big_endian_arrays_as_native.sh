#!/usr/bin/env bash
# onnxruntime 1.32.0, numpy 2.4.6 on a little-endian machine: an input array of big-endian numbers (">i4", as numpy reads them
# from IDX files, FITS images or the network) is taken without an error or a warning, and its bytes are read in the machine's
# order: the model gets other numbers. numpy itself computes with such arrays rightly, and PyTorch refuses them.
# Seen on 2026-11-29:
#   numpy: [1, 2, 3] plus 1 is [2, 3, 4]
#   onnxruntime: [1, 2, 3] plus 1 is [16777217, 33554433, 50331649]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat >"$folder/order.py" <<'PYTHON'
import numpy
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

x = numpy.array([1, 2, 3], dtype=">i4")
ends = [helper.make_tensor_value_info(name, TensorProto.INT32, [3]) for name in "xy"]
one = numpy_helper.from_array(numpy.int32([1]), "one")
graph = helper.make_graph([helper.make_node("Add", ["x", "one"], ["y"])], "plus", ends[:1], ends[1:], [one])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
print(f"numpy: {x.tolist()} plus 1 is {(x + 1).tolist()}")
print(f"onnxruntime: {x.tolist()} plus 1 is {session.run(None, {'x': x})[0].tolist()}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/order.py") - <<'SEEN'
numpy: [1, 2, 3] plus 1 is [2, 3, 4]
onnxruntime: [1, 2, 3] plus 1 is [16777217, 33554433, 50331649]
SEEN
