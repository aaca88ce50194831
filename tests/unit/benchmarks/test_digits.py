from __future__ import annotations

from pathlib import Path

import numpy
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from benchmarks.bare_ensemble import BareEnsemble, image_batch, read_steps, write_steps
from benchmarks.digits import INPUT, OUTPUT, DigitsEnsemble, load_digits
from benchmarks.probe import WrongAnswer
from benchmarks.sample_ensemble import BareContender
from rocserve.core.errors import ServeError


@pytest.fixture(scope="module")
def digits() -> DigitsEnsemble:
    return load_digits()


def test_bare_engine_calls_label_images_like_the_ensemble(digits: DigitsEnsemble, tmp_path: Path) -> None:
    write_steps(digits.steps(), tmp_path / "steps")
    ensemble = BareEnsemble(read_steps(tmp_path / "steps"))
    images = sorted(digits.image.parent.glob("*.jpg"))[:64]
    batch = numpy.array([[image.read_bytes()] for image in images[:32]], dtype=numpy.object_)
    outputs = ensemble.run({INPUT: batch}, [OUTPUT, "PROBABILITIES"])
    assert outputs["PROBABILITIES"].shape == (32, 10)
    labels = [label.decode() for label in outputs[OUTPUT].ravel()]
    right = sum(label == image.stem.rpartition("_")[2] for label, image in zip(labels, images, strict=False))
    assert right >= 30


def test_a_bad_image_is_an_error(digits: DigitsEnsemble) -> None:
    with pytest.raises(ServeError):
        BareEnsemble(digits.steps()).run({INPUT: image_batch(b"no JPEG", 2)}, [OUTPUT])


def test_the_case_knows_its_label(digits: DigitsEnsemble) -> None:
    case = digits.cases()[0]
    case.check({OUTPUT: numpy.array([[digits.label.encode()]], dtype=numpy.object_)})
    with pytest.raises(AssertionError, match="eleven"):
        case.check({OUTPUT: numpy.array([[b"eleven"]], dtype=numpy.object_)})


def test_the_triton_twin_has_the_ensembles_tensors(digits: DigitsEnsemble, tmp_path: Path) -> None:
    digits.write_for_triton(tmp_path)
    text = (tmp_path / "digits" / "config.pbtxt").read_text()
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.backend, config.max_batch_size) == ("python", digits.max_batch_size)
    assert config.HasField("dynamic_batching") and not config.HasField("ensemble_scheduling")
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [(INPUT, [1])]
    assert {tensor.name for tensor in config.output} == {OUTPUT, "PROBABILITIES"}
    compile((tmp_path / "digits" / "1" / "model.py").read_text(), "model.py", "exec")


def test_the_copy_for_rocserve_is_whole(digits: DigitsEnsemble, tmp_path: Path) -> None:
    digits.write_for_rocserve(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"digits", "digits_preprocess", "digits_classifier"}
    assert (tmp_path / "digits" / "1").is_dir()
    assert (tmp_path / "digits_classifier" / "1" / "model.onnx").is_file()


def test_the_bare_loop_counts_images(digits: DigitsEnsemble, tmp_path: Path) -> None:
    with BareContender(digits, tmp_path) as bare:
        measurement = bare.measure(digits.cases()[0], seconds=0.2)
        assert measurement.rate > 0
        assert measurement.p50 is None
        assert bare.cpu_seconds() > 0


def test_a_wrong_label_of_the_bare_loop_is_seen(digits: DigitsEnsemble, tmp_path: Path) -> None:
    wrong = DigitsEnsemble(digits.ensemble, digits.members, tmp_path / "0001_eleven.jpg")
    wrong.image.write_bytes(digits.image.read_bytes())
    with BareContender(wrong, tmp_path) as bare, pytest.raises(WrongAnswer, match="bare loop says"):
        bare.measure(digits.cases()[0], seconds=0.1)
