"""The pytorch backend on a GPU: concurrent batches, at fixed sizes on captured graphs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.pytorch import TorchFiles

from rocserve.backends.base import Batch, Execution, LoadedModel, ModelSource, model_executions, model_preparation
from rocserve.backends.warmup import as_served
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import DEVICE_PROPERTY
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, InstanceKind, OutputConfig
from rocserve.core.tensors import Tensor, tensor_from_numpy


def _has_gpu() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


SourceMaker = Callable[..., ModelSource]

pytestmark = [pytest.mark.long, pytest.mark.skipif("not _has_gpu()", reason="no GPU here that PyTorch can use")]

LARGEST = 8
PACKAGE = """
import sys, torch
torch._inductor.aoti_compile_and_package(torch.export.load(sys.argv[1]), package_path=sys.argv[2])
torch._inductor.aoti_load_package(sys.argv[2])
"""


@pytest.fixture
def classifier(model_source: SourceMaker, torch_files: TorchFiles) -> ModelSource:
    source = model_source(
        "model.pt2",
        torch_files.data("classifier"),
        inputs=[InputConfig("x", DataType.FP32, (4,))],
        max_batch_size=LARGEST,
        kind=InstanceKind.GPU,
    )
    return replace(source, device=0)


@pytest.fixture
def model(classifier: ModelSource) -> Iterator[LoadedModel]:
    from rocserve.backends.pytorch import eager

    model = eager.load(classifier)
    model.warm_up([])
    prepare_all(model)
    yield model
    model.close()


def prepare_all(model: LoadedModel) -> None:
    while model_preparation(model)():
        pass


def start(execution: Execution, x: np.ndarray) -> None:
    execution.start(Batch({"x": tensor_from_numpy("x", x, DataType.FP32)}, ("scores", "best"), (len(x),)))


def check(execution: Execution, x: np.ndarray, expected: dict[str, np.ndarray]) -> None:
    outputs = execution.result().outputs
    np.testing.assert_allclose(outputs["scores"], expected["scores"][: len(x)], atol=1e-5)
    np.testing.assert_array_equal(np.ravel(outputs["best"]), np.ravel(expected["best"][: len(x)]))


def test_two_batches_in_flight_have_their_own_results(model: LoadedModel, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("classifier")
    first, second = model_executions(model)
    rows = len(inputs["x"])
    turned = {name: value[::-1] for name, value in expected.items()}
    for count in (1, 2, 3, rows):
        for _ in range(20):
            x, y = inputs["x"][:count], inputs["x"][::-1][:count]
            start(first, x)
            start(second, y)
            check(first, x, expected)
            start(first, x)
            check(second, y, turned)
            check(first, x, expected)
            assert first.is_done and second.is_done


def test_a_model_serves_with_its_first_size_and_prepares_the_others_between_batches(
    classifier: ModelSource, torch_files: TorchFiles
) -> None:
    from rocserve.backends.pytorch import eager

    reports: list[str] = []
    inputs, expected = torch_files.values("classifier")
    with closing(eager.load(replace(classifier, report=reports.append))) as model:
        assert reports[-2:] == ["preparing batch size 1", ""]
        model.warm_up([])
        executions = model_executions(model)
        for sizes in ([1], [1, 2], [1, 2, 4], [1, 2, 4, 8]):
            assert all(execution.batch_sizes == sizes for execution in executions)
            for count in (1, 2, 3, min(len(inputs["x"]), LARGEST)):
                for execution in executions:
                    start(execution, inputs["x"][:count])
                for execution in executions:
                    check(execution, inputs["x"][:count], expected)
            is_more = model_preparation(model)()
            assert is_more == (sizes != [1, 2, 4, 8])
        assert reports[2:] == [*(f"serving; preparing batch size {size}" for size in (2, 4, 8)), ""]
        assert model.properties["batch_sizes"] == "1, 2, 4, 8"


def test_a_batch_above_the_largest_size_runs_in_pieces(model: LoadedModel, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("classifier")
    execution = model_executions(model)[0]
    times = 1 + 2 * LARGEST // len(inputs["x"])
    x = np.concatenate([inputs["x"]] * times)
    start(execution, x)
    check(execution, x, {name: np.concatenate([value] * times) for name, value in expected.items()})
    assert execution.input_memory(len(x), ()) == {}


def test_what_is_put_into_the_engines_memory_runs_from_there(model: LoadedModel, torch_files: TorchFiles) -> None:
    inputs, expected = torch_files.values("classifier")
    for execution in model_executions(model):
        x = inputs["x"][:3]
        memory = execution.input_memory(3, ())["x"][: x.nbytes]
        memory[:] = x.tobytes()
        execution.start(Batch({"x": Tensor("x", DataType.FP32, x.shape, memory)}, ("scores", "best"), (1, 2)))
        check(execution, x, expected)


def test_open_lengths_run_on_graphs_of_chosen_sizes_beside_each_other(
    model_source: SourceMaker, torch_files: TorchFiles
) -> None:
    from rocserve.backends.pytorch import eager

    inputs = [InputConfig(name, DataType.INT64, (-1,)) for name in ("ids", "mask")]
    source = model_source(
        "model.pt2", torch_files.data("encoder"), inputs=inputs, max_batch_size=LARGEST, kind=InstanceKind.GPU
    )
    with closing(eager.load(source)) as on_cpu, closing(eager.load(replace(source, device=0))) as model:
        padding = model.signature.padding
        assert [dimension.sizes for dimension in padding.dimensions] == [(16, 24, 32, 40)]
        assert "dimension 'ids:0' may be padded" in model.load_check.parts
        assert DEVICE_PROPERTY not in model.properties and not on_cpu.signature.padding.dimensions
        model.warm_up([])
        rng, executions = np.random.default_rng(0), model_executions(model)
        running: list[tuple[Execution, Batch]] = []
        for turn in range(300):
            if turn % 10 == 0:
                for execution, _ in running:
                    execution.result()
                running.clear()
                # 16 pairs of a batch size and a length
                model_preparation(model)()
            if len(running) == len(executions):
                execution, batch = running.pop(0)
                alone = on_cpu.execute(batch).outputs
                padded = execution.result().outputs
                length = batch.inputs["ids"].shape[1]
                np.testing.assert_allclose(padded["states"][:, :length], alone["states"], atol=1e-4)
                np.testing.assert_allclose(padded["mean"], alone["mean"], atol=1e-4)
            ids = rng.integers(0, 50, (rng.integers(1, 2 * LARGEST), rng.integers(2, 41)))
            tensors = {"ids": ids, "mask": np.ones_like(ids)}
            batch = Batch(
                {name: tensor_from_numpy(name, values, DataType.INT64) for name, values in tensors.items()},
                ("states", "mean"),
                (len(ids),),
            )
            running.append((executions[turn % len(executions)], batch))
            running[-1][0].start(as_served(batch, source.config, padding))
        for execution, _ in running:
            execution.result()


def test_a_dimension_that_must_not_be_padded_runs_as_it_is(model_source: SourceMaker, torch_files: TorchFiles) -> None:
    from rocserve.backends.pytorch import eager

    inputs = [InputConfig(name, DataType.INT64, (-1,)) for name in ("ids", "mask")]
    source = model_source(
        "model.pt2", torch_files.data("seeing_all"), inputs=inputs, max_batch_size=LARGEST, kind=InstanceKind.GPU
    )
    with closing(eager.load(replace(source, device=0))) as model:
        assert not model.signature.padding.dimensions
        assert any("'ids:0' must not be padded" in part for part in model.load_check.parts)


@pytest.mark.parametrize("saves", ["exported", "traced"])
@pytest.mark.parametrize("devices", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:1")])
def test_of_kind_model_parts_stay_on_the_gpus_where_the_file_has_them(
    model_source: SourceMaker, tmp_path: Path, saves: str, devices: tuple[str, str]
) -> None:
    import torch

    if devices[1] == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("no second GPU here")
    network = two_layers(*devices)
    x = torch.arange(12.0).reshape(3, 4)
    expected = network(x).cpu()
    file = tmp_path / ("saved.pt2" if saves == "exported" else "saved.pt")
    if saves == "exported":
        rows = torch.export.Dim("rows", max=64)
        torch.export.save(torch.export.export(network, (x,), dynamic_shapes=({0: rows},)), file)
    else:
        torch.jit.trace(network, x).save(file)
    source = model_source(
        f"model{file.suffix}",
        file.read_bytes(),
        inputs=[InputConfig("INPUT__0", DataType.FP32, (4,))],
        outputs=[OutputConfig("OUTPUT__0", DataType.FP32, (2,))],
        max_batch_size=LARGEST,
        kind=InstanceKind.MODEL,
    )
    model = eager_load(source)
    assert set(devices) <= set(model.properties["device"].split(", "))
    check_output(model, x.numpy(), expected.numpy())
    model.close()


@pytest.mark.parametrize("kind", [InstanceKind.CPU, InstanceKind.GPU])
def test_a_program_that_was_exported_on_a_gpu_runs_where_its_instance_is(
    model_source: SourceMaker, tmp_path: Path, kind: InstanceKind
) -> None:
    import torch

    network = two_layers("cuda:0", "cuda:0")
    x = torch.arange(12.0).reshape(3, 4)
    expected = network(x).cpu().numpy()
    rows = torch.export.Dim("rows", max=64)
    file = tmp_path / "exported.pt2"
    torch.export.save(torch.export.export(network, (x.to("cuda:0"),), dynamic_shapes=({0: rows},)), file)
    source = model_source("model.pt2", file.read_bytes(), max_batch_size=LARGEST, kind=kind)
    model = eager_load(replace(source, device=0) if kind is InstanceKind.GPU else source)
    assert model.properties["device"] == ("cpu" if kind is InstanceKind.CPU else "cuda:0")
    name = model.signature.inputs[0].name
    check_output(model, x.numpy(), expected, name)
    model.close()


def test_a_package_for_a_gpu_takes_what_it_was_compiled_for(model_source: SourceMaker, tmp_path: Path) -> None:
    import torch

    network = two_layers("cuda:0", "cuda:0")
    x = torch.arange(12.0).reshape(3, 4)
    expected = network(x).cpu().numpy()
    rows = torch.export.Dim("rows", max=64)
    file = tmp_path / "package.pt2"
    torch.export.save(
        torch.export.export(network, (x.to("cuda:0"),), dynamic_shapes=({0: rows},)), tmp_path / "exported.pt2"
    )
    made = subprocess.run([sys.executable, "-c", PACKAGE, tmp_path / "exported.pt2", file], check=False, timeout=200)
    if made.returncode < 0:
        pytest.skip(f"PyTorch itself ends by signal {-made.returncode} when it loads a package for the GPU here")
    assert made.returncode == 0

    def load(width: int, datatype: DataType, kind: InstanceKind = InstanceKind.GPU) -> LoadedModel:
        source = model_source(
            "model.pt2",
            file.read_bytes(),
            inputs=[InputConfig("INPUT__0", datatype, (width,))],
            outputs=[OutputConfig("OUTPUT__0", DataType.FP32, (2,))],
            max_batch_size=LARGEST,
            kind=kind,
        )
        return eager_load(replace(source, device=0) if kind is InstanceKind.GPU else source)

    model = load(4, DataType.FP32)
    check_output(model, x.numpy(), expected)
    check_output(model, x.numpy()[:1], expected[:1])
    model.close()
    for width, datatype in ((3, DataType.FP32), (8, DataType.FP32), (4, DataType.FP64), (4, DataType.FP16)):
        with pytest.raises(ServeError, match="but the package was compiled for ") as refused:
            load(width, datatype)
        assert refused.value.code is StatusCode.INVALID_ARGUMENT
    with pytest.raises(ServeError, match="is compiled for PyTorch's device 'cuda', but the instance is on 'cpu'"):
        load(4, DataType.FP32, InstanceKind.CPU)


def two_layers(first: str, second: str) -> Any:
    """A network of 4 to 8 to 2 values, with its layers on these devices."""
    import torch
    from torch import nn

    class TwoLayers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 8).to(first)
            self.second = nn.Linear(8, 2).to(second)

        def forward(self, x: Any) -> Any:
            return self.second(torch.relu(self.first(x.to(first))).to(second))

    torch.manual_seed(0)
    return TwoLayers().eval().requires_grad_(False)


def eager_load(source: ModelSource) -> LoadedModel:
    from rocserve.backends.pytorch import eager

    model = eager.load(source)
    model.warm_up([])
    return model


def check_output(model: LoadedModel, x: np.ndarray, expected: np.ndarray, name: str = "INPUT__0") -> None:
    (output,) = (spec.name for spec in model.signature.outputs)
    execution = model_executions(model)[0]
    execution.start(Batch({name: tensor_from_numpy(name, x, DataType.FP32)}, (output,), (len(x),)))
    value = execution.result().outputs[output]
    assert isinstance(value, np.ndarray)
    np.testing.assert_allclose(value, expected, atol=2e-3)
