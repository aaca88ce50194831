#!/usr/bin/env bash
# catboost 1.2.10: save_model(format="onnx") writes the file for two links only, none for regressors and a softmax for several
# classes, whatever the loss is, and says nothing. Poisson and Tweedie: predict() gives exp of the sum of the trees, the file gives
# the sum, so a count's logarithm. MultiClassOneVsAll and MultiLogloss: predict_proba gives a sigmoid of each class or label,
# the file a softmax over all, and of several labels that are true it names one. RMSE and MultiClass are equal.
# Seen on 2026-11-30, one row:
#   RMSE: CatBoost [6.03], file [6.03]
#   Poisson: CatBoost [5.13], file [1.63]
#   Tweedie:variance_power=1.5: CatBoost [3.82], file [1.34]
#   MultiClass: CatBoost [0.01, 0.05, 0.93] -> [2], file [0.01, 0.05, 0.93] -> [2]
#   MultiClassOneVsAll: CatBoost [0.18, 0.42, 0.58] -> [2], file [0.1, 0.31, 0.6] -> [2]
#   MultiLogloss: CatBoost [0.99, 0.99] -> [1, 1], file [0.49, 0.51] -> [1]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check catboost==1.2.10 onnxruntime==1.32.0 numpy==2.4.6
cat >"$folder/losses.py" <<'PYTHON'
import sys

import numpy
import onnxruntime
from catboost import CatBoostClassifier, CatBoostRegressor

rows = numpy.stack([numpy.linspace(0, 1, 500), numpy.linspace(0, 1, 500) ** 2 % 0.3], axis=1).astype(numpy.float32)
counts, classes = numpy.round(10 * rows[:, 0]), numpy.digitize(rows[:, 0], [0.3, 0.6])
labels = numpy.stack([rows[:, 0] > 0.4, rows[:, 0] > 0.5], axis=1).astype(numpy.int64)
row = rows[300:301]
targets = {
    "RMSE": counts,
    "Poisson": counts,
    "Tweedie:variance_power=1.5": counts,
    "MultiClass": classes,
    "MultiClassOneVsAll": classes,
    "MultiLogloss": labels,
}


def rounded(numbers):
    return [round(float(number), 2) for number in numpy.ravel(numbers)]


for loss, target in targets.items():
    kind = CatBoostClassifier if loss.startswith("Multi") else CatBoostRegressor
    settings = {"iterations": 50, "verbose": False, "allow_writing_files": False, "random_seed": 0, "thread_count": 1}
    model = kind(loss_function=loss, **settings).fit(rows, target)
    model.save_model(sys.argv[1], format="onnx")
    answers = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"]).run(None, {"features": row})
    if kind is CatBoostRegressor:
        print(f"{loss}: CatBoost {rounded(model.predict(row))}, file {rounded(answers[0])}")
        continue
    own, exported = rounded(model.predict_proba(row)), rounded(list(answers[1][0].values()))
    print(f"{loss}: CatBoost {own} -> {numpy.ravel(model.predict(row)).tolist()}, file {exported} -> {answers[0].tolist()}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/losses.py" "$folder/model.onnx" 2>/dev/null) - <<'SEEN'
RMSE: CatBoost [6.03], file [6.03]
Poisson: CatBoost [5.13], file [1.63]
Tweedie:variance_power=1.5: CatBoost [3.82], file [1.34]
MultiClass: CatBoost [0.01, 0.05, 0.93] -> [2], file [0.01, 0.05, 0.93] -> [2]
MultiClassOneVsAll: CatBoost [0.18, 0.42, 0.58] -> [2], file [0.1, 0.31, 0.6] -> [2]
MultiLogloss: CatBoost [0.99, 0.99] -> [1, 1], file [0.49, 0.51] -> [1]
SEEN
