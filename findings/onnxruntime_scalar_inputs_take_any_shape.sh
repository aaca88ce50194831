#!/usr/bin/env bash
# onnxruntime 1.32.0: an input that the model declares as a scalar (a shape without dimensions) takes an array of any rank and
# size, and the model runs on it. Where [1] is declared, the same array is refused. Python's get_inputs() shows [] for a
# scalar and also for an input without any declared shape, so a program cannot make up for the missing check.
# Seen on 2026-11-29:
#   declared as [1]: (2, 3) is refused
#   declared as a scalar: (2, 3) gives (2, 3), get_inputs() shows []
#   declared without a shape: (2, 3) gives (2, 3), get_inputs() shows []
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat >"$folder/scalars.py" <<'PYTHON'
import numpy
import onnxruntime
from onnx import TensorProto, helper
from onnxruntime.capi.onnxruntime_pybind11_state import InvalidArgument

for name, shape in (("as [1]", [1]), ("as a scalar", []), ("without a shape", None)):
    x, y = (helper.make_tensor_value_info(end, TensorProto.FLOAT, shape) for end in "xy")
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["y"])], "negative", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    try:
        answer = session.run(None, {"x": numpy.ones((2, 3), numpy.float32)})[0]
        print(f"declared {name}: (2, 3) gives {answer.shape}, get_inputs() shows {session.get_inputs()[0].shape}")
    except InvalidArgument:
        print(f"declared {name}: (2, 3) is refused")
PYTHON
diff <("$folder/venv/bin/python" "$folder/scalars.py" 2>/dev/null) - <<'SEEN'
declared as [1]: (2, 3) is refused
declared as a scalar: (2, 3) gives (2, 3), get_inputs() shows []
declared without a shape: (2, 3) gives (2, 3), get_inputs() shows []
SEEN
