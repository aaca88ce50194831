"""The last model of a classifier as a worker runs it: scores, and the file of labels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.models import drop
from support.python_models import outputs, request, serving

from rocserve.core.errors import ServeError, StatusCode

CONFIG = """
backend: "python"
max_batch_size: %d
input [ { name: "SCORES" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [
  { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [ -1 ]%s },
  { name: "LABEL" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "PROBABILITY" data_type: TYPE_FP32 dims: [ 1 ] }
]
"""
LABELLED = ' label_filename: "labels.txt"'


def classifier(folder: Path, max_batch_size: int, label_filename: str = LABELLED) -> Path:
    source = "from rocserve.presets.classification import TritonPythonModel\n"
    drop(folder, "m", source, CONFIG % (max_batch_size, label_filename))
    (folder / "m" / "labels.txt").write_text("cat\ndog\n")
    return folder / "m"


def test_each_row_has_its_best_class(tmp_path: Path) -> None:
    with serving(classifier(tmp_path, 4)) as model:
        (answer,) = model.execute([request(SCORES=np.array([[0.25, 0.75], [5, 5 - np.log(3)]], np.float32))])
    given = outputs(answer)
    assert given["LABEL"].tolist() == [[b"dog"], [b"cat"]]
    np.testing.assert_allclose(given["PROBABILITIES"], [[0.25, 0.75], [0.75, 0.25]], rtol=1e-6)


@pytest.mark.parametrize(("max_batch_size", "shape"), [(4, (1, 4)), (0, (4,)), (4, (2, 3))])
def test_other_scores_than_labels_fail_their_own_request(
    tmp_path: Path, max_batch_size: int, shape: tuple[int, ...]
) -> None:
    """Four scores with two labels were taken for the answers to two images; three scores failed the other requests of
    the batch."""
    good = request(SCORES=np.full((1, 2) if max_batch_size else (2,), 0.5, np.float32))
    with serving(classifier(tmp_path, max_batch_size)) as model:
        bad, answer = model.execute([request(SCORES=np.zeros(shape, np.float32)), good])
    assert isinstance(bad, ServeError)
    assert bad.code is StatusCode.INVALID_ARGUMENT
    assert bad.text == f"there are 2 labels, but SCORES has shape {list(shape)}"
    assert outputs(answer)["LABEL"].ravel().tolist() == [b"cat"]


def test_a_classifier_without_labels_says_so(tmp_path: Path) -> None:
    fault = "output 'PROBABILITIES' has no label_filename in config.pbtxt; expected the file of the labels"
    with pytest.raises(ServeError, match=fault), serving(classifier(tmp_path, 4, "")):
        pass
