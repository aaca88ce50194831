"""Programs of torch.export that need other packages, or are named otherwise."""

from __future__ import annotations

import importlib.util
import logging
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import support
from support.pytorch import TorchFiles

from rocserve.backends.base import Batch, LoadedModel, ModelSource
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig
from rocserve.core.tensors import tensor_from_numpy

# Importing PyTorch takes seconds.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here; `make pytorch` installs it"),
]

Loader = Callable[..., LoadedModel]


@pytest.fixture
def load(model_source: Callable[..., ModelSource], torch_files: TorchFiles) -> Loader:
    """Load a file of `torch_files`, with its text replaced."""

    def load(name: str, replaced: bytes = b"", by: bytes = b"") -> LoadedModel:
        from rocserve.backends.pytorch import eager

        path = torch_files.path(name)
        inputs = [InputConfig("x", DataType.FP32, (4,))] if path.suffix == ".pt" else []
        source = model_source(f"model{path.suffix}", b"", inputs=inputs, max_batch_size=8)
        with zipfile.ZipFile(path) as read, zipfile.ZipFile(source.model_file, "w") as written:
            for member in read.namelist():
                written.writestr(member, read.read(member).replace(replaced, by))
        return eager.load(source)

    return load


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package torch_outputs importable."""
    monkeypatch.syspath_prepend(str(Path(support.__path__[0])))


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", ["of_class", "own_operator", "own_operator_script"])
def test_the_package_that_a_program_needs_is_imported(load: Loader, torch_files: TorchFiles, name: str) -> None:
    model = load(name)
    inputs, expected = torch_files.values("own_operator" if "own" in name else name)
    names = tuple(spec.name for spec in model.signature.outputs)
    assert names == tuple(expected)
    tensor = tensor_from_numpy("x", inputs["x"], DataType.FP32)
    outputs = model.execute(Batch({"x": tensor}, names, (5,))).outputs
    for output, value in expected.items():
        np.testing.assert_allclose(np.asarray(outputs[output]), value)


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        (
            "transformers",
            "install transformers where rocserve is (pip install transformers), or export the program with"
            " return_dict=False",
        ),
        ("ownoutputs", "install ownoutputs where rocserve is, or export the program with a forward that takes and"),
    ],
)
def test_a_class_of_a_missing_package(
    load: Loader, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, package: str, remedy: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ServeError) as raised, caplog.at_level(logging.WARNING):
        load("of_class", b"torch_outputs.Answer", f"{package}.modeling_outputs.Answer".encode())
    assert raised.value.code is StatusCode.UNAVAILABLE
    begin = f"model.pt2 takes or returns Answer, a class of the package '{package}', which cannot be imported here ("
    assert raised.value.text.startswith(begin) and remedy in raised.value.text
    assert "Traceback" not in caplog.text, "PyTorch's own log of it"


def test_a_class_that_its_package_does_not_register(load: Loader) -> None:
    with pytest.raises(ServeError, match="'collections', which is imported, but does not register the class"):
        load("of_class", b"torch_outputs.Answer", b"collections.ChainMap")


@pytest.mark.parametrize("name", ["own_operator", "own_operator_script"])
def test_an_operator_of_a_missing_package(load: Loader, name: str) -> None:
    with pytest.raises(ServeError) as raised:
        load(name, b"torch_outputs.twice", b"other_outputs.twice")
    assert raised.value.code is StatusCode.UNAVAILABLE
    assert "calls the operator other_outputs::twice, which PyTorch" in raised.value.text
    assert "no package 'other_outputs' that would register it can be imported here" in raised.value.text


def test_a_program_of_another_name(load: Loader) -> None:
    assert load("named_otherwise").signature.max_batch_size == 8
    with pytest.raises(ServeError, match="it holds the programs one, other, expected one, or one named 'model'"):
        load("two_programs")


def test_a_program_exported_in_training_mode_warns(load: Loader, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        load("in_inference")
        assert not caplog.records
        load("in_training")
    assert "model.pt2 was exported in training mode (it computes batch_norm and dropout as in training)" in caplog.text
    assert "export it after model.eval()" in caplog.text


def test_a_fixed_size_is_written_for_migraphx(torch_files: TorchFiles, tmp_path: Path) -> None:
    """MIGraphX refuses the attribute that PyTorch writes, which has its default value."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript", reason="no onnxscript here; `make pytorch` installs it")
    from rocserve.backends.pytorch.onnx_export import OnnxJob

    OnnxJob("m", str(torch_files.path("larger")), str(tmp_path), ("x",), ()).perform(lambda text: None)
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    (resize,) = (node for node in nodes if node.op_type == "Resize")
    assert "keep_aspect_ratio_policy" not in {attribute.name for attribute in resize.attribute}
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    inputs, expected = torch_files.values("larger")
    np.testing.assert_allclose(session.run(None, inputs)[0], expected["OUTPUT__0"], atol=1e-6)


def test_reasons_have_no_terminal_codes(tmp_path: Path) -> None:
    from rocserve.backends.pytorch.exported_file import read_fault

    text = read_fault(tmp_path / "model.pt2", RuntimeError("\x1b[1mfault\x1b[0m")).text
    assert text.endswith("cannot read model.pt2: fault")


@pytest.mark.parametrize(
    ("error", "can_pass"),
    [
        (PermissionError(13, "Permission denied"), True),
        (OSError(5, "Input/output error"), True),
        (FileNotFoundError(2, "No such file or directory"), False),
        (RuntimeError("not a ZIP archive"), False),
    ],
)
def test_a_file_that_the_system_cannot_read_now_may_be_read_later(error: Exception, can_pass: bool) -> None:
    from rocserve.backends.pytorch.exported_file import read_fault

    fault = read_fault(Path("model.pt2"), error)
    assert (fault.code, fault.can_pass) == (StatusCode.INVALID_ARGUMENT, can_pass)
    assert f"cannot read model.pt2: {error}" in fault.text
