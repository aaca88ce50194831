#!/usr/bin/env bash
# lightgbm 4.7.0 through onnxmltools 1.16.0: a classifier that is exported with an open number of rows ([None, 4]) declares its
# output "label" with shape [1], while it returns one label for each row. ONNX Runtime only warns at each run. A server
# that reads the file expects one label for each request. scikit-learn's exporter declares the same output with an open dimension.
# Seen on 2026-11-28:
#   declared [1], for five rows (5,)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  lightgbm==4.7.0 onnxmltools==1.16.0 skl2onnx==1.20.0 scikit-learn==1.9.1 onnxruntime==1.32.0 onnx==1.23.2
cat >"$folder/labels.py" <<'PYTHON'
import lightgbm
import numpy
import onnxruntime
from onnxmltools import convert_lightgbm
from onnxmltools.convert.common.data_types import FloatTensorType

x = numpy.random.default_rng(0).standard_normal((60, 4)).astype(numpy.float32)
classifier = lightgbm.LGBMClassifier(n_estimators=3, verbose=-1).fit(x, (x[:, 0] > 0).astype(int))
model = convert_lightgbm(classifier, initial_types=[("x", FloatTensorType([None, 4]))], target_opset=15)
session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
(label,) = session.run(["label"], {"x": x[:5]})
print(f"declared {session.get_outputs()[0].shape}, for five rows {label.shape}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/labels.py" 2>/dev/null) - <<'SEEN'
declared [1], for five rows (5,)
SEEN
