"""What the demo serves and how it judges; the demo itself is run as a whole by `make demo`."""

from __future__ import annotations

from pathlib import Path

import pytest

WEIGHTS = ("resnet50/1/model.onnx", "yolov4/1/model.onnx")


@pytest.fixture
def sample(tmp_path):
    """A repository without weights, in which one model's file is a link to another's."""
    folder = tmp_path / "sample"
    for name in ("first", "second"):
        (folder / name / "1").mkdir(parents=True)
    (folder / "first" / "1" / "model.py").write_text("one")
    (folder / "second" / "1" / "model.py").symlink_to("../../first/1/model.py")
    return folder


def put_weights(folder: Path, producer: bytes = b"pytorch") -> None:
    for weights in WEIGHTS:
        (folder / weights).parent.mkdir(parents=True)
        (folder / weights).write_bytes(bytes([0x08, 8, 0x12, len(producer)]) + producer)


def test_a_sample_with_weights_is_served_itself(sample, tmp_path):
    from demo_repository import complete_repository

    put_weights(sample)
    repository = complete_repository(sample, tmp_path / "copy")
    assert (repository.folder, repository.is_untrained) == (sample, False)
    assert not (tmp_path / "copy").exists()


def test_untrained_weights_in_the_sample_are_said_to_be(sample, tmp_path):
    from demo_repository import complete_repository

    put_weights(sample, b"rocserve untrained")
    assert complete_repository(sample, tmp_path / "copy").is_untrained


def test_without_weights_a_copy_is_served_that_keeps_what_it_has(sample, tmp_path):
    from demo_repository import complete_repository

    copy = tmp_path / "copy"
    put_weights(copy, b"rocserve untrained")
    repository = complete_repository(sample, copy)
    assert (repository.folder, repository.is_untrained) == (copy, True)
    assert (copy / "second" / "1" / "model.py").read_text() == "one"
    assert not (copy / "second" / "1" / "model.py").is_symlink()
    (sample / "first" / "1" / "model.py").write_text("two")
    complete_repository(sample, copy)
    assert (copy / "second" / "1" / "model.py").read_text() == "two"
    assert not any((sample / weights).exists() for weights in WEIGHTS)


def test_findings_are_measured_by_picture_and_label():
    from demo_shapes import measure
    from detect import Finding
    from detection_drawing import Detection
    from shapes import Shape

    truth = {"a.jpg": (Shape("circle", (0, 0, 10, 10)),), "b.jpg": (Shape("square", (0, 0, 10, 10)),)}
    found = Detection("circle", 0, 0.9, (0, 1, 10, 10))
    findings = [Finding(Path("x/a.jpg"), (found,)), Finding(Path("x/b.jpg"), (found,))]
    assert measure(findings, truth) == 0.5
