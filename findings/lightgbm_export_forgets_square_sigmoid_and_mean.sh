#!/usr/bin/env bash
# lightgbm 4.7.0 through onnxmltools 1.16.0: the converter keeps the trees and drops three settings that shape the answer, without
# a warning. reg_sqrt: LightGBM squares the sum of the trees, the file does not. sigmoid: the file always has a slope of 1.
# boosting_type "rf": LightGBM takes the mean of the trees, the file divides their sum by the constant 100, the default number of
# trees, whatever the number is. With the default settings the answers are equal.
# Seen on 2026-11-30, one row:
#   default settings: LightGBM 130.6, file 130.6
#   reg_sqrt: LightGBM 130.4, file 11.4
#   random forest of 20 trees: LightGBM 131.0, file 26.2
#   random forest of 100 trees: LightGBM 131.4, file 131.4
#   probability: LightGBM 0.93, file 0.93
#   probability with sigmoid 3: LightGBM 0.93, file 0.71
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check lightgbm==4.7.0 onnxmltools==1.16.0 skl2onnx==1.20.0 \
    scikit-learn==1.9.1 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6 packaging==26.4
cat >"$folder/settings.py" <<'PYTHON'
import lightgbm
import numpy
import onnxruntime
from onnxmltools import convert_lightgbm
from onnxmltools.convert.common.data_types import FloatTensorType

rows = numpy.linspace(0, 1, 500, dtype=numpy.float32).reshape(-1, 1)
prices, sold = 100 + 50 * rows[:, 0], (rows[:, 0] > 0.5).astype(numpy.int64)
row = numpy.array([[0.62]], numpy.float32)


def regressor(trees=20, **settings):
    return lightgbm.LGBMRegressor(n_estimators=trees, num_leaves=4, verbose=-1, n_jobs=1, **settings).fit(rows, prices)


def classifier(**settings):
    return lightgbm.LGBMClassifier(n_estimators=20, num_leaves=4, verbose=-1, n_jobs=1, **settings).fit(rows, sold)


def answer(model):
    file = convert_lightgbm(model, initial_types=[("x", FloatTensorType([None, 1]))], zipmap=False)
    session = onnxruntime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": row})[-1].ravel()[-1]


forest = {"boosting_type": "rf", "bagging_freq": 1, "bagging_fraction": 0.5}
regressors = {
    "default settings": regressor(),
    "reg_sqrt": regressor(reg_sqrt=True),
    "random forest of 20 trees": regressor(20, **forest),
    "random forest of 100 trees": regressor(100, **forest),
}
for name, model in regressors.items():
    print(f"{name}: LightGBM {model.predict(row)[0]:.1f}, file {answer(model):.1f}")
for name, model in {"probability": classifier(), "probability with sigmoid 3": classifier(sigmoid=3.0)}.items():
    print(f"{name}: LightGBM {model.predict_proba(row)[0, 1]:.2f}, file {answer(model):.2f}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/settings.py" 2>/dev/null) - <<'SEEN'
default settings: LightGBM 130.6, file 130.6
reg_sqrt: LightGBM 130.4, file 11.4
random forest of 20 trees: LightGBM 131.0, file 26.2
random forest of 100 trees: LightGBM 131.4, file 131.4
probability: LightGBM 0.93, file 0.93
probability with sigmoid 3: LightGBM 0.93, file 0.71
SEEN
