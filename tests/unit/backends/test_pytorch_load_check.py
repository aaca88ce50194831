"""The load check of PyTorch programs: whether their rows depend on each other, and what their graphs tell."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.base import Batch, ModelSource, model_unchanged
from rocserve.backends.refusals import report_on_refused_zeros
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.load_check import RECORDED_FILE, REFERENCE, ROWS, LoadCheckFailed, LoadCheckReport
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.plain import to_json
from rocserve.core.tensors import tensor_from_numpy
from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve.load_check.reference import ReferenceVerdict, load_cases
from rocserve.load_check.rows import Independence, RowsVerdict

# Importing PyTorch takes seconds.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here; `make pytorch` installs it"),
]

SourceMaker = Callable[..., ModelSource]
Loader = Callable[..., Any]
FP32 = DataType.FP32


@pytest.fixture(autouse=True)
def the_same_weights_each_time() -> None:
    import torch

    torch.manual_seed(0)


@pytest.fixture
def load(model_source: SourceMaker, tmp_path: Path) -> Loader:
    """Load a function of tensors, or a module, as a program whose first dimension varies, with the engine eager."""

    def make(function: Any, *example: Any, file: str = "model.pt2", **options: Any) -> Any:
        import torch

        from rocserve.backends.pytorch import eager

        path, module = tmp_path / file, function
        if not isinstance(function, torch.nn.Module):
            module = torch.nn.Module()
            module.forward = function  # type: ignore[method-assign]
        if file.endswith(".pt"):
            torch.jit.save(torch.jit.script(module), path)
        else:
            rows = torch.export.Dim("rows", max=256)
            shapes = tuple({0: rows} for _ in example)
            torch.export.save(torch.export.export(module, example, dynamic_shapes=shapes), path)
        source = model_source(file, path.read_bytes(), **options)
        return eager.load(replace(source, settings=replace(source.settings, cache_directory=str(tmp_path / "cache"))))

    return make


def couple(kind: str) -> Any:
    import torch

    return {
        "a sum over rows": lambda x: x.cumsum(0),
        "the largest row": lambda x: x / x.abs().max(),
        "a branch for all": lambda x: torch.where(x.mean() > 2, x, -x),
        "torch.cond": lambda x: torch.cond(x.std() > 100, lambda x: x.relu(), lambda x: x.tanh(), (x,)),
        "the number of rows": lambda x: x * x.shape[0],
        "the row's number": lambda x: x + torch.arange(x.shape[0])[:, None],
        "labels": lambda x: x.cumsum(0).argmax(1),
        "attention": torch.nn.TransformerEncoderLayer(4, 2, 16, batch_first=False).eval(),
        "statistics": torch.nn.BatchNorm1d(4).train(),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        "a sum over rows", "the largest row", "a branch for all", "torch.cond", "the number of rows",
        "the row's number", "labels", "attention", "statistics",
    ],
)  # fmt: skip
def test_dependent_rows_are_not_joined(load: Loader, kind: str) -> None:
    import torch

    example = torch.rand(5, 3, 4) if kind == "attention" else torch.rand(5, 4)
    model = load(couple(kind), example)
    assert model.signature.supports_batching
    assert model.signature.dependent_rows.startswith("rows depend on each other: ")
    assert model.load_check.parts == (model.signature.dependent_rows,)
    assert not model.load_check.warning, "the server joins nothing"


@pytest.mark.parametrize("kind", ["attention", "convolutions", "ids", "labels", "squeezed", "bf16"])
def test_independent_rows_are_joined(load: Loader, kind: str) -> None:
    import torch
    from torch import nn

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(50, 4)

        def forward(self, ids: Any, mask: Any) -> Any:
            return (self.table(ids) * mask[..., None]).sum(1)

    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()).eval()
    layer = nn.TransformerEncoderLayer(4, 2, 16, batch_first=True).eval()
    function, *example = {
        "attention": (layer, torch.rand(5, 3, 4)),
        "convolutions": (network, torch.rand(5, 3, 8, 8)),
        "ids": (Text(), torch.randint(0, 50, (5, 3)), torch.ones(5, 3)),
        "labels": (lambda x: x.argmax(1), torch.rand(5, 4)),
        # One row comes back without its dimension of 1.
        "squeezed": (lambda x: x[:, None, :].squeeze(), torch.rand(5, 4)),
        "bf16": (lambda x: x.relu() * 2, torch.rand(5, 4, dtype=torch.bfloat16)),
    }[kind]
    model = load(function, *example)
    assert model.load_check.parts == ("rows are independent",)
    assert model.signature.supports_batching and not model.signature.dependent_rows


def test_a_verdict_is_kept_and_off_checks_nothing(load: Loader) -> None:
    import torch

    example = torch.rand(5, 4)
    first, second = (load(lambda x: x.cumsum(0), example) for _ in range(2))
    assert first.load_check.seconds > 0 == second.load_check.seconds
    assert first.load_check.parts == second.load_check.parts
    unchecked = load(lambda x: x.cumsum(0), example, parameters={"load_check": "off"})
    assert unchecked.load_check.parts == () and unchecked.signature.dependent_rows == ""


def test_written_batching_of_dependent_rows_is_served_with_a_warning(load: Loader) -> None:
    import torch

    def function(x: Any) -> Any:
        return x.cumsum(0)

    class Script(torch.nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]
            return x.cumsum(0)

    tensors = {"inputs": (InputConfig("x", FP32, (4,)),), "outputs": (OutputConfig("OUTPUT__0", FP32, (4,)),)}
    exported = load(function, torch.rand(5, 4), max_batch_size=8, **tensors)
    script = load(Script(), file="model.pt", max_batch_size=8, **tensors)
    for model in (exported, script):
        assert model.load_check.failures == (ROWS,)
        assert model.load_check.warning.startswith("batched as configured, but rows depend on each other: output 'OUT")
    one = load(function, torch.rand(5, 4), max_batch_size=1, **tensors)
    assert one.load_check.parts == (), "nothing is joined"


def test_a_load_leaves_a_programs_state_as_it_was(load: Loader) -> None:
    import torch

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("runs", torch.zeros(1))

        def forward(self, x):  # type: ignore[no-untyped-def]
            self.runs.add_(1)
            return x * self.runs

    model = load(Counting(), torch.rand(5, 4))
    assert "equal runs differ" in model.signature.dependent_rows
    assert [buffer.tolist() for buffer in model.program.buffers] == [[0.0]]
    # The outputs of a TorchScript file are found by runs, too.
    inputs, outputs = (InputConfig("INPUT__0", FP32, (4,)),), (OutputConfig("OUTPUT__0", FP32, (4,)),)
    script = load(Counting(), file="model.pt", max_batch_size=8, inputs=inputs, outputs=outputs)
    assert [buffer.tolist() for buffer in script.program.buffers] == [[0.0]]


@pytest.mark.parametrize("file", ["model.pt2", "model.pt"])
def test_the_first_request_finds_a_programs_state_as_the_file_has_it(load: Loader, file: str) -> None:
    """A recurrent network may keep its state in a buffer, and TorchScript also in other attributes."""
    import torch

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(1))
            if file == "model.pt":
                self.runs, self.state = 0, torch.zeros(1)
                self.kept, self.counts = [0], {"runs": 0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.total.add_(1)
            if not torch.jit.is_scripting():
                return x + 5 * self.total
            self.runs += 1
            self.state = self.state + 1
            self.kept.append(0)
            self.counts["runs"] += 1
            return x + self.total + self.state + self.runs + len(self.kept) - 1 + self.counts["runs"]

    class Whole(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Part()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.part(x)

    options = table(8) | {"outputs": [OutputConfig("OUTPUT__0", FP32, (5,))]} if file == "model.pt" else {}
    model = load(Whole(), torch.rand(5, 5), file=file, **options)
    with model_unchanged(model):
        model.warm_up([])
    x = tensor_from_numpy(model.signature.inputs[0].name, np.zeros((1, 5), np.float32))
    outputs = [spec.name for spec in model.signature.outputs]
    for runs in (1, 2):
        answer = model.execute(Batch({x.name: x}, tuple(outputs), (1,))).outputs[outputs[0]]
        assert answer.tolist() == [[5 * runs] * 5]


def test_a_program_that_takes_no_made_up_input_is_loaded(load: Loader) -> None:
    import torch

    def function(x: Any) -> Any:
        torch.ops.aten._assert_async.msg(x.amin() > 1e6, "only large numbers")
        return x * 2

    model = load(function, torch.full((5, 4), 2e6))
    assert model.signature.dependent_rows.startswith("not checked: the engine takes no made-up input")
    assert model.load_check.failures == ()


def table(rows: int) -> dict[str, Any]:
    """The configuration of a program with an input of 5 columns."""
    first = () if rows else (1,)
    return {
        "max_batch_size": rows,
        "inputs": [InputConfig("INPUT__0", FP32, (*first, 5))],
        "outputs": [OutputConfig("OUTPUT__0", FP32, (*first, 3))],
    }


@pytest.mark.parametrize("rows", [8, 0])
def test_dims_that_the_program_refuses_are_warned_of(load: Loader, rows: int) -> None:
    import torch

    model = load(torch.nn.Linear(4, 3), file="model.pt", **table(rows))
    refusal = model.warm_up([])
    report = model.load_check
    if not rows:
        assert refusal is not None and report == LoadCheckReport()
        report = report_on_refused_zeros(model, model._config, refusal, PATIENCE_SECONDS)
    assert report.warning.startswith("each request may fail, as no made-up input runs; compare the inputs' data_type")
    assert (
        "; the error: PyTorch: RuntimeError: mat1 and mat2 shapes cannot be multiplied (1x5 and 4x3)" in report.warning
    )
    assert not report.failures


def test_a_program_that_takes_other_values_than_zeros_is_not_warned_of(load: Loader) -> None:
    import torch

    class Positive(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x == 0).all()):
                raise ValueError("nothing but zeros")
            return x[:, :3]

    model = load(Positive(), file="model.pt", **table(0))
    refusal = model.warm_up([])
    assert refusal is not None
    assert report_on_refused_zeros(model, model._config, refusal, PATIENCE_SECONDS) == LoadCheckReport()


def test_a_result_of_another_datatype_is_an_error_of_its_request(load: Loader) -> None:
    import torch

    class Large(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if bool((x > 100).any()):
                return x.long()
            return x

    config = {**table(0), "outputs": [OutputConfig("OUTPUT__0", FP32, (1, 5))]}
    model = load(Large(), file="model.pt", **config)
    text = "configuration expects datatype FP32 for output 'OUTPUT__0', model provides INT64 for this request; make the"

    def answer(value: float) -> Any:
        x = tensor_from_numpy("INPUT__0", np.full((1, 5), value, np.float32))
        return model.execute(Batch({x.name: x}, ("OUTPUT__0",), (1,))).outputs["OUTPUT__0"]

    with pytest.raises(ServeError, match=text):
        answer(101)
    assert answer(2).tolist() == [[2] * 5]


def test_samples_show_what_made_up_inputs_cannot(load: Loader, tmp_path: Path) -> None:
    import torch

    def function(x: Any) -> Any:
        torch.ops.aten._assert_async.msg(x.amin() > 1e6, "only large numbers")
        return x * 2

    folder = tmp_path / "model"
    folder.mkdir()
    x = np.random.default_rng(0).uniform(2e6, 3e6, (3, 4)).astype(np.float32)
    write_recorded(folder / RECORDED_FILE, RecordedAnswers({"x": x}, {"OUTPUT__0": 2 * x}, None))
    assert load(function, torch.full((5, 4), 2e6)).load_check.parts == ("rows are independent",)


def test_what_graphs_tell() -> None:
    import torch

    from rocserve.backends.pytorch.graph_facts import graph_facts

    def facts(function: Any) -> Any:
        module = torch.nn.Module()
        module.forward = function  # type: ignore[method-assign]
        rows = torch.export.Dim("rows", max=256)
        return graph_facts(torch.export.export(module, (torch.rand(5, 4),), dynamic_shapes=({0: rows},)))

    def choose(x: Any, condition: Any) -> Any:
        return torch.cond(condition, lambda x: x + 1, lambda x: x - 1, (x,))

    assert facts(lambda x: choose(x, x.sum() > 3.5)).couples_rows == "torch.cond takes one branch for all rows"
    of_size = facts(lambda x: choose(x, x.shape[0] > 9))
    assert (of_size.couples_rows, of_size.thresholds) == ("", (9.0,))
    assert facts(lambda x: torch.where(x.mean() > 2, x, -x)).thresholds == (2.0,)
    assert facts(lambda x: torch.where(x > 2, x, -x)).thresholds == (), "compared element by element"
    assert facts(lambda x: torch.rand_like(x) + x).is_random == "rand_like"
    assert facts(lambda x: torch.nn.functional.dropout(x, 0.5, training=True)).is_random == "dropout"
    assert facts(lambda x: torch.nn.functional.dropout(x, 0.5, training=False)).is_random == ""


def test_a_dynamic_quantisation_takes_one_scale_from_all_rows(load: Loader) -> None:
    pytest.importorskip("torchao")
    import torch
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as quantizer
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    rows = torch.export.Dim("rows", max=256)
    module = torch.export.export(network, (torch.rand(5, 4),), dynamic_shapes=({0: rows},)).module()
    config = quantizer.get_default_x86_inductor_quantization_config(is_dynamic=True)
    prepared = prepare_pt2e(module, quantizer.X86InductorQuantizer().set_global(config))
    prepared(torch.rand(5, 4))
    model = load(convert_pt2e(prepared), torch.rand(5, 4))
    assert "choose_qparams takes one scale from all rows" in model.signature.dependent_rows


def test_torchscripts_dynamic_quantisation_does_so_too(load: Loader) -> None:
    import torch

    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(network, {torch.nn.Linear}, dtype=torch.qint8)
    model = load(
        quantised,
        file="model.pt",
        max_batch_size=8,
        inputs=(InputConfig("input", FP32, (4,)),),
        outputs=(OutputConfig("OUTPUT__0", FP32, (3,)),),
    )
    assert "quantized::linear_dynamic takes one scale from all rows" in model.load_check.warning


def test_open_sizes_are_those_of_the_example_and_ids_end_at_the_table(load: Loader) -> None:
    import torch

    from rocserve.backends.pytorch.checked_tensors import checked_inputs
    from rocserve.load_check.tensors import ROWS as ROWS_DIMENSION

    class Text(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(50, 4)

        def forward(self, ids: Any) -> Any:
            return self.table(ids).sum(1)

    model = load(Text(), torch.randint(0, 50, (5, 3)))
    (ids,) = checked_inputs(model._bound, model.program.signature.inputs)
    assert (ids.shape, ids.least, ids.end) == ((ROWS_DIMENSION, 3), 0, 50)
    np.testing.assert_array_equal(ids.shape_with({}, rows=2), (2, 3))


@pytest.fixture
def program_file(tmp_path: Path) -> Path:
    """A linear layer without a bias."""
    import torch

    layer = torch.nn.Linear(4, 3, bias=False)
    torch.nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(0))
    rows = torch.export.Dim("rows", max=256)
    path = tmp_path / "linear.pt2"
    torch.export.save(torch.export.export(layer, (torch.rand(5, 4),), dynamic_shapes=({0: rows},)), path)
    return path


@pytest.mark.parametrize(
    ("factor", "precision", "is_right"),
    [(1.0, "fp32", True), (1.01, "fp32", False), (1.01, "fp16", True), (1.05, "fp16", False), (1.05, "bf16", True)],
)
def test_a_compiled_program_is_held_against_pytorch(
    program_file: Path, factor: float, precision: str, is_right: bool
) -> None:
    import torch

    from rocserve.backends.pytorch.comparison import COMPARING, EagerReference, compared
    from rocserve.backends.pytorch.exported_file import read_exported
    from rocserve.backends.pytorch.program import open_exported

    def candidate() -> Any:
        program = open_exported(read_exported(program_file))
        return replace(program, call=lambda values: program.call(values) * factor)

    phases: list[str] = []
    found = compared(
        EagerReference(program_file, PATIENCE_SECONDS),
        [(3, candidate)],
        torch.device("cpu"),
        precision,
        phases.append,
        True,
    )
    assert found.rows is not None and found.rows.reason == "rows are independent"
    (verdict,) = found.verdicts
    assert verdict.right is is_right
    assert COMPARING in phases and found.reason == ""
    if is_right:
        assert verdict.largest_error == pytest.approx(1 - 1 / factor, abs=1e-5) and verdict.cases > 3
    else:
        assert "output 'OUTPUT__0' is wrong with plain inputs: " in verdict.reason


@pytest.mark.parametrize("mode", ["on", "warn", "off"])
def test_a_compiled_program_that_is_wrong_is_refused_unless_a_warning_will_do(
    program_file: Path, model_source: SourceMaker, mode: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    from rocserve.backends.pytorch import model_check
    from rocserve.backends.pytorch.comparison import COMPARISON_FILE, Comparison

    wrong = ReferenceVerdict(
        False, 2, 0.5, "y", "large", "output 'y' is wrong with large inputs: 1 instead of 2 at [0]"
    )
    (tmp_path / COMPARISON_FILE).write_bytes(to_json(Comparison(None, (wrong,), "", 1.5)))

    def written_folder(source: Any, kind: str, parts: Any, job: Any) -> Path:
        job(tmp_path)
        return tmp_path

    monkeypatch.setattr(model_check, "written_folder", written_folder)
    source = model_source("model.pt2", program_file.read_bytes(), parameters={"load_check": mode})
    check = model_check.ModelCheck(source, torch.device("cpu"), "fp32")

    def compiled() -> Path:
        return check.compiled_folder("inductor", "Inductor", (), lambda folder: None)  # type: ignore[arg-type,return-value]

    if mode == "on":
        with pytest.raises(
            LoadCheckFailed, match=r"Inductor does not compute .*: output 'y' is wrong with large"
        ) as found:
            compiled()
        assert found.value.kind == REFERENCE
    else:
        assert compiled() == tmp_path
        expected = LoadCheckReport()
        if mode == "warn":
            text = f"Inductor's answers differ from PyTorch's: {wrong.reason}"
            expected = LoadCheckReport((wrong.reason,), text, (REFERENCE,), 1.5)
        assert check.report == expected
        assert (check.seconds > 0) == (mode == "warn")


def test_a_verdict_that_the_time_ended_is_not_kept_with_the_compiled_program(
    program_file: Path, model_source: SourceMaker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    from rocserve.backends.pytorch import model_check
    from rocserve.backends.pytorch.comparison import COMPARISON_FILE, Comparison

    ended = RowsVerdict(Independence.UNDECIDED, "not checked: the time ended", is_lasting=False)
    (tmp_path / COMPARISON_FILE).write_bytes(to_json(Comparison(ended, (), "the time ended", 1.5)))
    monkeypatch.setattr(model_check, "written_folder", lambda *_: tmp_path)
    source = model_source("model.pt2", program_file.read_bytes())
    source = replace(source, settings=replace(source.settings, cache_directory=str(tmp_path / "cache")))
    check = model_check.ModelCheck(source, torch.device("cpu"), "fp32")
    check.compiled_folder("inductor", "Inductor", (), lambda folder: None)  # type: ignore[arg-type,return-value]
    assert check.report.parts == ("rows are independent", "not compared: the time ended")


def test_migraphx_is_held_against_the_program_not_its_export(program_file: Path, tmp_path: Path) -> None:
    import torch

    from rocserve.backends.pytorch.onnx_export import EagerReferenceJob

    cases_file = tmp_path / "cases.npz"
    shapes = {"INPUT__0": (4,)}
    job = EagerReferenceJob(
        "m", str(program_file), ("INPUT__0",), ("OUTPUT__0",), shapes, True, str(cases_file), 3, PATIENCE_SECONDS
    )
    result = job.perform(lambda phase: None)
    assert result.rows is not None and result.rows.reason == "rows are independent"
    cases = load_cases(cases_file)
    assert (len(cases), result.reason) == (result.cases, "") and cases[0].name == "plain"
    layer = torch.export.load(program_file).module()
    for case in cases:
        assert case.feed["INPUT__0"].shape == (3, 4)
        right = layer(torch.from_numpy(case.feed["INPUT__0"])).detach().numpy()
        np.testing.assert_allclose(case.outputs["OUTPUT__0"], right, rtol=1e-6)


def test_a_program_of_fixed_rows_is_tried_with_batches_of_that_size(tmp_path: Path) -> None:
    import torch

    from rocserve.backends.pytorch.onnx_export import EagerReferenceJob

    for name, function, text in (
        ("alone", lambda x: x * 2, "rows are independent"),
        ("joined", lambda x: x.cumsum(0), "rows depend on each other"),
    ):
        module = torch.nn.Module()
        module.forward = function  # type: ignore[method-assign]
        path = tmp_path / f"{name}.pt2"
        torch.export.save(torch.export.export(module, (torch.rand(4, 3),)), path)
        cases_file = str(tmp_path / "cases.npz")
        job = EagerReferenceJob("m", str(path), (), (), {"x": (3,)}, True, cases_file, 4, PATIENCE_SECONDS)
        result = job.perform(lambda phase: None)
        assert result.rows is not None and result.rows.reason.startswith(text)
