"""Models of scikit-learn, XGBoost and LightGBM, trained on made-up data and converted to ONNX, as their users do.

usage, in the environment that `provision` makes: python converted_models.py FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PACKAGE = "converted"
NAMES = (
    "gradient_boosting",
    "isolation_forest",
    "lightgbm",
    "logistic_regression",
    "nearest_neighbours",
    "perceptron",
    "random_forest",
    "scaled_svm",
    "text_scores",
    "xgboost",
)
_REQUIREMENTS = (
    "scikit-learn==1.9.1",
    "skl2onnx==1.20.0",
    "xgboost-cpu==3.2.0",
    "lightgbm==4.7.0",
    "onnxmltools==1.16.0",
    "packaging",  # onnxmltools imports it, and does not require it
)
_FEATURES = 12


def convert(folder: Path) -> Mapping[str, Path]:
    """Return the models' files by name, made by a Python that has the converters. Raises PeerUnavailable."""
    from benchmarks.environments import CACHE, Environment

    files = {name: folder / f"{name}.onnx" for name in NAMES}
    if not all(file.is_file() for file in files.values()):
        environment = Environment(CACHE / "converters")
        environment.provision(_REQUIREMENTS)
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(environment.programs / "python"), __file__, str(folder)], check=True)
    return files


def _trained() -> Iterator[tuple[str, Any]]:
    """Yield each model's name and its ONNX model. Features have different scales, as in real tables."""
    import lightgbm
    import numpy as np
    import xgboost
    from onnxmltools import convert_lightgbm, convert_xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import StringTensorType
    from sklearn.ensemble import GradientBoostingRegressor, IsolationForest, RandomForestClassifier
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.neighbors import KNeighborsRegressor
    from sklearn.neural_network import MLPClassifier
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    random = np.random.default_rng(0)
    scales = np.logspace(-1, 3, _FEATURES)
    rows = (random.normal(size=(400, _FEATURES)) * scales).astype(np.float32)
    values = (rows / scales) @ random.normal(size=_FEATURES)
    classes = np.digitize(values, [-2, 2])
    tensors = {
        "gradient_boosting": GradientBoostingRegressor(n_estimators=40).fit(rows, values),
        "isolation_forest": IsolationForest(n_estimators=20, random_state=0).fit(rows),
        "logistic_regression": make_pipeline(StandardScaler(), LogisticRegression()).fit(rows, classes),
        "nearest_neighbours": make_pipeline(StandardScaler(), KNeighborsRegressor()).fit(rows, values),
        "perceptron": make_pipeline(StandardScaler(), MLPClassifier(max_iter=300, random_state=0)).fit(rows, classes),
        "random_forest": RandomForestClassifier(n_estimators=30, random_state=0).fit(rows, classes),
        "scaled_svm": make_pipeline(StandardScaler(), SVC(probability=True, random_state=0)).fit(rows, classes),
    }
    for name, model in tensors.items():
        opsets = {"target_opset": {"": 18, "ai.onnx.ml": 3}} if name == "isolation_forest" else {}
        yield name, to_onnx(model, rows[:1], **opsets)
    words = ("quick", "slow", "bright", "dark", "river", "stone", "cloud", "field")
    texts = [" ".join(random.choice(words, 6)) for _ in range(100)]
    # Lower case would need a locale of the machine.
    scorer = make_pipeline(TfidfVectorizer(lowercase=False), LogisticRegression())
    scorer.fit(texts, ["river" in text for text in texts])
    yield "text_scores", to_onnx(scorer, initial_types=[("text", StringTensorType([None, 1]))])
    form = [("features", FloatTensorType([None, _FEATURES]))]
    yield "xgboost", convert_xgboost(xgboost.XGBClassifier(n_estimators=30).fit(rows, classes), initial_types=form)
    learnt = lightgbm.LGBMClassifier(n_estimators=30, verbose=-1).fit(rows, classes)
    yield "lightgbm", convert_lightgbm(learnt, initial_types=form, zipmap=False)


def main() -> None:
    folder = Path(sys.argv[1])
    for name, model in _trained():
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


if __name__ == "__main__":
    main()
