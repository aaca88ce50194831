#!/usr/bin/env bash
# skl2onnx 1.20.0 on scikit-learn 1.9.1: classifiers that were fitted on several labels at once (y of shape [rows, 2]) convert
# without a warning, and with the default options ONNX Runtime cannot use the files. The trees' and neighbours' file gives ZipMap
# a tensor [labels, rows, classes], which it does not take: the session does not open. The network's file opens, and each
# run fails, since the probabilities have four columns for two labels. With zipmap=False both run, but the network's
# four columns stay: each label's 1 - p, then each label's p, where predict_proba gives p alone.
# Seen on 2026-11-29:
#   RandomForestClassifier: default: no session; zipmap=False: [labels, rows, classes] (2, 5, 2)
#   MLPClassifier: default: no run; zipmap=False: (5, 4), predict_proba (5, 2), [1 - p, p]: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  skl2onnx==1.20.0 scikit-learn==1.9.1 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat >"$folder/labels.py" <<'PYTHON'
import numpy
import onnxruntime
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument
from skl2onnx import to_onnx
from sklearn.ensemble import RandomForestClassifier
from sklearn.neural_network import MLPClassifier

x = numpy.random.default_rng(0).standard_normal((60, 4)).astype(numpy.float32)
y = (x[:, :2] > 0).astype(int)


def probabilities(classifier, **options):
    model = to_onnx(classifier, x[:1], options={id(classifier): options} if options else None)
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Fail:
        return "no session"
    try:
        return session.run(["probabilities" if options else "output_probability"], {"X": x[:5]})[0]
    except InvalidArgument:
        return "no run"


forest = RandomForestClassifier(3, random_state=0).fit(x, y)
shape = probabilities(forest, zipmap=False).shape
print(f"RandomForestClassifier: default: {probabilities(forest)}; zipmap=False: [labels, rows, classes] {shape}")
network = MLPClassifier(random_state=0, max_iter=50).fit(x, y)
columns = probabilities(network, zipmap=False)
expected = network.predict_proba(x[:5])
equal = numpy.allclose(columns, numpy.hstack([1 - expected, expected]), atol=1e-4)
print(
    f"MLPClassifier: default: {probabilities(network)}; zipmap=False: {columns.shape},"
    f" predict_proba {expected.shape}, [1 - p, p]: {equal}"
)
PYTHON
diff <("$folder/venv/bin/python" "$folder/labels.py" 2>/dev/null) - <<'SEEN'
RandomForestClassifier: default: no session; zipmap=False: [labels, rows, classes] (2, 5, 2)
MLPClassifier: default: no run; zipmap=False: (5, 4), predict_proba (5, 2), [1 - p, p]: True
SEEN
