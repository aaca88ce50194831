"""`rocserve quantise`, on digits that the sample's classifier was not trained with."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from support.pytorch import NO_PYTORCH

from rocserve import cli
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve_tools.quantise.verb import QuantiseOptions, read_inputs

# PyTorch takes up to half a minute of a processor's time for one of them.
pytestmark = pytest.mark.long

Array = np.ndarray[Any, Any]

TRAIN = """
import numpy
import torch

def train(network):
    optimizer = torch.optim.SGD(network.parameters(), 1e-6)
    for batch in torch.from_numpy(numpy.load({data!r})).split(32):
        loss = network(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@dataclass(frozen=True)
class Digits:
    folder: Path
    images: Array
    labels: Array

    def accuracy(self, scores: Array) -> float:
        return float(np.mean(scores.argmax(1) == self.labels))


CALIBRATE = """
import numpy, torch

def train(network):
    \"\"\"Find the scales of the inputs, and change nothing else.\"\"\"
    kept = {{name: value.clone() for name, value in network.named_buffers() if "running_" in name}}
    with torch.no_grad():
        network(torch.from_numpy(numpy.load({data!r})))
        for name, value in network.named_buffers():
            if name in kept:
                value.copy_(kept[name])
"""


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Digits:
    networks = pytest.importorskip("support.torch_networks", reason=NO_PYTORCH)
    folder = tmp_path_factory.mktemp("digits")
    images, labels = networks.held_out_digits()
    np.save(folder / "images.npy", images)
    (folder / "train.py").write_text(TRAIN.format(data=str(folder / "images.npy")))
    networks.save_program(networks.digits_network(), folder / "digits.pt2", 1, 16, 16)
    # What cannot be quantised, and what it cannot be quantised with.
    networks.save_program(networks.nn.ReLU(), folder / "no_layers.pt2", 1, 16, 16)
    np.save(folder / "narrow.npy", images[:, :, :8])
    np.save(folder / "nan.npy", np.full_like(images[:4], np.nan))
    (folder / "photos").mkdir()
    (folder / "photos/a.jpg").touch()
    return Digits(folder, images, labels)


def quantise(digits: Digits, model: str, method: str, out: str, *more: str) -> int:
    paths = {"data": "images.npy", "out": out}
    flags = [f"--{name}={digits.folder / file}" for name, file in paths.items()]
    train = [f"--train={digits.folder / 'train.py'}"] if method == "qat" else []
    return cli.main(["quantise", str(digits.folder / model), f"--method={method}", *flags, *train, *more])


def run(path: Path, images: Array) -> Array:
    import torch

    with torch.no_grad():
        scores: Array = torch.export.load(path).module()(torch.from_numpy(images)).numpy()
    return scores


@pytest.mark.parametrize("method", ["dynamic", "static", "qat"])
def test_each_method_leaves_the_digits_what_they_are(
    digits: Digits, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert quantise(digits, "digits.pt2", method, f"{method}.pt2", "--samples=360") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(f"{method}.pt2: 3 of 3 layers with weights in int8, by {method}")
    assert lines[1].startswith("size: ")
    assert "OUTPUT__0: largest difference " in lines[2] and lines[2].endswith("of 360 rows")
    original, written = digits.folder / "digits.pt2", digits.folder / f"{method}.pt2"
    assert written.stat().st_size < original.stat().st_size
    assert digits.accuracy(run(original, digits.images)) > 0.97
    assert digits.accuracy(run(written, digits.images)) > 0.97
    alone = run(written, digits.images[:1])
    np.testing.assert_allclose(alone, run(written, digits.images)[:1], rtol=1e-5, atol=1e-5)


@pytest.fixture
def patterns_of_one_kind(digits: Digits, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchao exports patterns for each kind of convolution and of its quantisation, for half a minute; `convolutions`
    has one kind."""
    import torch
    from torchao.quantization.pt2e import qat_utils

    def restrict(name: str) -> None:
        helper = getattr(qat_utils, name)

        def helped(module: Any, kind: Any, *others: Any, **more: Any) -> Any:
            return helper(module, kind, *others, **more) if kind is torch.nn.functional.conv2d else module

        monkeypatch.setattr(qat_utils, name, helped)

    restrict("_fuse_conv_bn_qat_helper")
    restrict("_fold_conv_bn_qat_helper")
    # Scales per channel, a bias that is not quantised, and statistics that do not change any more.
    one_kind = SimpleNamespace(product=lambda *options: [(True, True, False, False)])
    monkeypatch.setattr(qat_utils, "itertools", one_kind)


@pytest.mark.usefixtures("patterns_of_one_kind")
def test_convolutions_take_their_batch_normalisation_in_with_its_eps(
    digits: Digits, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """When it trains, torchao 0.18 replaces it by 1e-5, which multiplies the first channel of this network by seven."""
    import torch
    from support import torch_networks as networks

    network = networks.convolutions()
    for index, eps in ((1, 0.5), (5, 1e-3)):
        network[index].eps = eps
        network[index].running_var.copy_(torch.linspace(0.01, 1, 8))
    networks.save_program(network, digits.folder / "eps.pt2", 1, 16, 16)
    (tmp_path / "train.py").write_text(CALIBRATE.format(data=str(digits.folder / "images.npy")))
    flags = (f"--train={tmp_path / 'train.py'}", "--samples=64")
    assert quantise(digits, "eps.pt2", "static", "eps_static.pt2", "--samples=64") == 0
    program = torch.export.load(digits.folder / "eps_static.pt2")
    operators = [str(node.target) for node in program.graph.nodes]
    assert not any("batch_norm" in name for name in operators)
    assert sum("dequantize_per_channel" in name for name in operators) == 3
    assert {tensor.dtype for name, tensor in program.state_dict.items() if tensor.ndim > 1} == {torch.int8}
    assert quantise(digits, "eps.pt2", "qat", "eps_qat.pt2", *flags) == 0, capsys.readouterr().err
    assert "batch normalisation: 2 layers with another eps than PyTorch's default keep it" in capsys.readouterr().out
    expected, static, trained = (
        run(digits.folder / name, digits.images[:64]) for name in ("eps.pt2", "eps_static.pt2", "eps_qat.pt2")
    )
    scale = np.abs(expected).max()
    assert np.abs(static - expected).max() < 0.1 * scale
    assert np.abs(trained - expected).max() < 0.1 * scale


@pytest.mark.parametrize(
    ("method", "operators"), [("dynamic", {"MatMulInteger"}), ("static", {"QuantizeLinear", "DequantizeLinear"})]
)
def test_the_same_as_onnx(digits: Digits, method: str, operators: set[str]) -> None:
    """MIGraphX computes in int8, but not in uint8."""
    assert quantise(digits, "digits.pt2", method, f"{method}.onnx") == 0
    model = onnx.load(digits.folder / f"{method}.onnx")
    assert operators <= {node.op_type for node in model.graph.node}
    assert not any(tensor.data_type == onnx.TensorProto.UINT8 for tensor in model.graph.initializer)
    session = onnxruntime.InferenceSession(digits.folder / f"{method}.onnx")
    (scores,) = session.run(["OUTPUT__0"], {"input": digits.images})
    assert digits.accuracy(scores) > 0.97


@pytest.mark.parametrize(
    ("model", "method", "flags", "text"),
    [
        ("digits.pt2", "static", ["--data={folder}/train.py"], "must be an .npz file, an .npy file for one input, or"),
        ("digits.pt2", "static", ["--data={folder}/none.npy"], "none.npy does not exist"),
        ("digits.pt2", "static", ["--data={folder}/narrow.npy"], "expected [1, 16, 16] or, for several samples,"),
        ("digits.pt2", "static", ["--data={folder}/narrow.npy"], "digits.pt2: --data {folder}/narrow.npy has shape"),
        ("digits.pt2", "static", ["--data={folder}/nan.npy"], "has NaN or infinite values for input 'input'"),
        ("digits.pt2", "static", ["--data={folder}/photos"], "to make inputs of them; name it by --pipeline"),
        ("digits.pt2", "static", ["--out={folder}/none/never.pt2"], "there is no folder {folder}/none"),
        ("dynamic.pt2", "static", [], "it is quantised already"),
        ("train.py", "static", [], "train.py is not a PyTorch file"),
        ("none.pt2", "static", [], "none.pt2 cannot be read: No such file"),
        ("no_layers.pt2", "static", [], "finds no layer to quantise in the program"),
        ("digits.pt2", "qat", ["--train={folder}/images.npy"], "is not a Python file"),
    ],
)
def test_what_cannot_be_done_is_said(
    digits: Digits, model: str, method: str, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if model == "dynamic.pt2" and not (digits.folder / model).exists():
        assert quantise(digits, "digits.pt2", "dynamic", model) == 0
    more = [flag.format(folder=digits.folder) for flag in flags]
    assert quantise(digits, model, method, "never.pt2", *more) == 1
    assert text.format(folder=digits.folder) in capsys.readouterr().err
    assert not (digits.folder / "never.pt2").exists()


@pytest.mark.parametrize(("out", "text"), [("digits.pt2", "is the model itself"), ("digits.bin", ".pt2 or .onnx")])
def test_where_the_result_cannot_go(digits: Digits, out: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = (digits.folder / "digits.pt2").read_bytes()
    with pytest.raises(SystemExit):
        quantise(digits, "digits.pt2", "static", out)
    assert text in capsys.readouterr().err
    assert (digits.folder / "digits.pt2").read_bytes() == before


def test_a_disk_that_is_full_is_a_line(
    digits: Digits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextlib.contextmanager
    def replacing(*_: object) -> Iterator[Any]:
        with Path("/dev/full").open("wb", buffering=0) as file:
            yield file

    monkeypatch.setattr("rocserve_tools.quantise.verb.replacing", replacing)
    assert quantise(digits, "digits.pt2", "static", "never.pt2", "--samples=32") == 1
    assert capsys.readouterr().err.endswith("No space left on device\n")


def test_without_torchao_it_says_what_to_install(
    digits: Digits, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "rocserve_tools.quantise.verb.find_spec", lambda name: None if name == "torchao" else found(name)
    )
    assert quantise(digits, "digits.pt2", "static", "never.pt2") == 1
    assert "this needs torchao, which is not installed: pip install 'torchao==0.18.0'" in capsys.readouterr().err


def test_qat_needs_who_trains(digits: Digits, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        quantise(digits, "digits.pt2", "static", "never.pt2", "--train=train.py")
    assert "--method qat needs --train, and no other method takes it" in capsys.readouterr().err


def test_outputs_of_any_datatype_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch", reason=NO_PYTORCH)

    class Answers(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 4)

        def forward(self, x: Any) -> Any:
            scores = self.layer(x)
            found = scores > scores.mean(-1, keepdim=True)
            return {"found": found, "bytes": found.to(torch.uint8), "narrow": scores.bfloat16(), "none": scores[:, :0]}

    chance = np.random.default_rng(1)
    np.save(tmp_path / "data.npy", chance.standard_normal((64, 8)).astype(np.float32))
    rows = {"x": {0: torch.export.Dim("rows")}}
    torch.export.save(
        torch.export.export(Answers().eval(), (torch.ones(5, 8),), dynamic_shapes=rows), tmp_path / "model.pt2"
    )
    flags = ("--method=dynamic", f"--data={tmp_path / 'data.npy'}", f"--out={tmp_path / 'out.pt2'}")
    assert cli.main(["quantise", str(tmp_path / "model.pt2"), *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines[-4:]] == ["found", "bytes", "narrow", "none"]
    assert lines[-4].partition(": ")[2] == lines[-3].partition(": ")[2], "one less than nothing is one away"
    assert lines[-1] == "none: largest difference 0, of values up to 0"


def test_a_script_whose_train_is_no_function(tmp_path: Path) -> None:
    methods = pytest.importorskip("rocserve_tools.quantise.methods", reason=NO_PYTORCH)
    (tmp_path / "script.py").write_text("train = 3\n")
    with pytest.raises(ServeError, match=r"script.py has no function train\(network\)"):
        methods.training_function(tmp_path / "script.py")


def test_samples_in_bf16_cannot_be_had(tmp_path: Path) -> None:
    program = pytest.importorskip("rocserve.backends.pytorch.program", reason=NO_PYTORCH)
    np.save(tmp_path / "data.npy", np.zeros((2, 4), np.uint16))
    tensor = program.ProgramTensor(("x",), DataType.BF16, (-1, 4), (1, 4))
    options = QuantiseOptions(data=tmp_path / "data.npy")
    with pytest.raises(
        ServeError, match="input 'x' of the program is in bf16, which samples in numpy's files cannot be"
    ):
        read_inputs(program.ProgramSignature((tensor,), (), batches=True), options)
