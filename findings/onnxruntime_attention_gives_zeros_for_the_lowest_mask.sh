#!/usr/bin/env bash
# onnxruntime 1.32.0: Attention (opset 23) on the CPU takes a row of the mask that is the lowest number of its type throughout for
# a row of minus infinity, and answers zeros. The operator's text keeps the zeros for minus infinity and adds any other number to
# the scores, which are then equal and give the mean of the values. The reference in onnx 1.23.2 and PyTorch 2.13.0's
# scaled_dot_product_attention give the mean, onnxruntime too for the number above the lowest. Models that mask with the lowest
# number (torch.finfo(dtype).min) differ where a row has no token to attend to.
# Seen on 2026-11-29:
#   float32, number above the lowest: onnxruntime [2.0, 3.0], reference [2.0, 3.0]
#   float32, lowest number: onnxruntime [0.0, 0.0], reference [2.0, 3.0]
#   float32, minus infinity: onnxruntime [0.0, 0.0], reference [0.0, 0.0]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat >"$folder/mask.py" <<'PYTHON'
import numpy
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 2, 2]) for name in "qkv"]
inputs.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, [2, 2]))
output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 2, 2])
graph = helper.make_graph([helper.make_node("Attention", ["q", "k", "v", "mask"], ["y"])], "attention", inputs, [output])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
reference = ReferenceEvaluator(model)

values = numpy.array([[[[1, 2], [3, 4]]]], numpy.float32)
lowest = numpy.finfo(numpy.float32).min
rows = {
    "number above the lowest": numpy.nextafter(lowest, numpy.float32(0)),
    "lowest number": lowest,
    "minus infinity": -numpy.inf,
}
for name, number in rows.items():
    mask = numpy.array([[0, 0], [number, number]], numpy.float32)
    feeds = {"q": values, "k": values, "v": values, "mask": mask}
    own, expected = (runs.run(None, feeds)[0][0, 0, 1].tolist() for runs in (session, reference))
    print(f"float32, {name}: onnxruntime {own}, reference {expected}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/mask.py" 2>/dev/null) - <<'SEEN'
float32, number above the lowest: onnxruntime [2.0, 3.0], reference [2.0, 3.0]
float32, lowest number: onnxruntime [0.0, 0.0], reference [2.0, 3.0]
float32, minus infinity: onnxruntime [0.0, 0.0], reference [0.0, 0.0]
SEEN
