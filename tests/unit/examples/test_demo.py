"""What the demo serves and how it judges answers; `make demo` runs the whole demo."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

WEIGHTS = Path("efficientnet_lite0", "1", "model.onnx")


def with_weights(folder: Path) -> Path:
    (folder / WEIGHTS).parent.mkdir(parents=True)
    (folder / WEIGHTS).write_bytes(b"weights")
    return folder


def test_a_sample_with_weights_is_served_itself(tmp_path):
    import demo_photos

    sample = with_weights(tmp_path / "sample")
    assert demo_photos.with_weights(sample, tmp_path / "copy", Console()) == (sample, True)
    assert not (tmp_path / "copy").exists()


def test_weights_that_were_fetched_are_kept_in_a_copy(tmp_path):
    import demo_photos

    (tmp_path / "sample" / "digits").mkdir(parents=True)
    copy = with_weights(tmp_path / "copy")
    assert demo_photos.with_weights(tmp_path / "sample", copy, Console()) == (copy, True)
    assert (copy / "digits").is_dir()
    assert (copy / WEIGHTS).read_bytes() == b"weights"


def test_where_the_weights_cannot_be_fetched_it_is_said(tmp_path, monkeypatch, capsys):
    import demo_photos

    (tmp_path / "sample").mkdir()
    monkeypatch.setenv("ROCSERVE_GET_SOURCE", "no address")
    monkeypatch.setattr(demo_photos, "NETWORK", "resnet50")
    assert demo_photos.with_weights(tmp_path / "sample", tmp_path / "copy", Console()) == (tmp_path / "copy", False)
    assert "resnet50 could not be fetched: no photographs this time" in capsys.readouterr().out


def test_findings_are_measured_by_picture_and_label():
    from demo_shapes import measure
    from shapes import Shape

    from rocserve_tools.images.detect import Detection, Finding

    truth = {"a.jpg": (Shape("circle", (0, 0, 10, 10)),), "b.jpg": (Shape("square", (0, 0, 10, 10)),)}
    found = Detection("circle", 0, 0.9, (0, 1, 10, 10))
    findings = [Finding(Path("x/a.jpg"), (found,)), Finding(Path("x/b.jpg"), (found,))]
    assert measure(findings, truth) == 0.5
