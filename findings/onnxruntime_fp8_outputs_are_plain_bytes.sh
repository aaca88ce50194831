#!/usr/bin/env bash
# onnxruntime 1.32.0, CPU provider: an output of type FLOAT8E4M3FN arrives in Python as a uint8 array that holds the bits,
# without an error or a warning. BFLOAT16 and INT4 outputs of the same session raise an error instead. A program that looks
# at dtype and shape alone takes 1.0 for the number 56.
# Seen on 2026-11-28:
#   FP8: uint8 [56, 64, 184]
#   BF16: RuntimeError
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2
cat >"$folder/casts.py" <<'PYTHON'
import numpy
import onnxruntime
from onnx import TensorProto, helper


def cast(datatype: int) -> numpy.ndarray:
    node = helper.make_node("Cast", ["x"], ["y"], to=datatype)
    ends = [helper.make_tensor_value_info(name, type_, [3]) for name, type_ in (("x", TensorProto.FLOAT), ("y", datatype))]
    graph = helper.make_graph([node], "casts", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": numpy.float32([1, 2, -1])})[0]


answer = cast(TensorProto.FLOAT8E4M3FN)
print("FP8:", answer.dtype, answer.tolist())
try:
    print("BF16:", cast(TensorProto.BFLOAT16).dtype)
except RuntimeError as error:
    print("BF16:", type(error).__name__)
PYTHON
diff <("$folder/venv/bin/python" "$folder/casts.py") - <<'SEEN'
FP8: uint8 [56, 64, 184]
BF16: RuntimeError
SEEN
