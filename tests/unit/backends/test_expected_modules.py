from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.backends.registry import discover_backends

ONNX = {"onnxruntime", "rocserve.backends.onnx.backend"}
ROCAL = {"cv2", "rocserve.backends.rocal.backend"}
PYTHON = {"rocserve.backends.python.engine"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ((), set()),
        (("a/1/model.onnx",), ONNX),
        (("a/1/resnet.ONNX", "b/2/model.py"), ONNX | PYTHON),
        (("resnet.onnx",), ONNX),
        (("1/pipeline.json",), ROCAL),
        (("a/config.pbtxt", "a/1/labels.json"), set()),
        (("a/1/model.mxr", "b/1/model.pt2"), set()),
        (("a/1/deeper/model.onnx",), set()),
    ],
    ids=["empty", "onnx", "two", "a file", "a model", "other files", "not forked", "too deep"],
)
def test_the_names_of_model_files_tell_what_the_zygote_will_import(
    files: tuple[str, ...], expected: set[str], tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert set(discover_backends().expected_modules([tmp_path, tmp_path / "absent"])) == expected


def test_a_model_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "1").mkdir(parents=True)
    (tmp_path / "elsewhere" / "1" / "model.py").touch()
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "a").symlink_to(tmp_path / "elsewhere")
    assert set(discover_backends().expected_modules([tmp_path / "repository"])) == PYTHON
