"""Whether requests may share a batch is tried on the loaded session, before the model is served."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.load_check import model, normal
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.base import LoadedModel, ModelSource, model_load_check
from rocserve.backends.onnx import backend
from rocserve.backends.refusals import report_on_refused_zeros
from rocserve.core.datatypes import DataType
from rocserve.core.load_check import NOT_CHECKED, ROWS
from rocserve.core.model_config import (
    BatchInput,
    BatchInputKind,
    InputConfig,
    ModelConfig,
    OutputConfig,
    WarmupInput,
    WarmupSample,
)

SourceMaker = Callable[..., ModelSource]
Load = Callable[..., LoadedModel]

SOFTMAX = "net (float[n, 4] x) => (float[n, 4] y) { y = Softmax <axis = -1> (x) }"
OVER_ROWS = "net (float[n, 4] x) => (float[n, 4] y) { y = Softmax <axis = 0> (x) }"
RECURRENT = """net (float[sequence, batch, 3] x) => (float[sequence, batch, 2] y) {
    h, last = GRU <hidden_size = 2> (x, W, R)
    y = Squeeze (h, one)
}"""


@pytest.fixture
def load(model_source: SourceMaker, tmp_path: Path) -> Load:
    """Load a graph in ONNX' textual syntax. Options are fields of the configuration."""

    def load(text: str, mode: str = "on", weights: dict[str, Any] | None = None, **options: Any) -> LoadedModel:
        source = model_source("model.onnx", model(text, **(weights or {})).SerializeToString())
        config = replace(source.config, parameters={"engine": "cpu", "load_check": mode}, **options)
        settings = replace(source.settings, cache_directory=str(tmp_path / "cache"))
        return backend.load(replace(source, config=config, settings=settings))

    return load


def tensors(kind: type[InputConfig] | type[OutputConfig], name: str, *dims: int, **options: Any) -> Any:
    return (kind(name, DataType.FP32, dims, **options),)


def test_independent_rows(load: Load) -> None:
    loaded = load(SOFTMAX)
    assert (loaded.signature.supports_batching, loaded.signature.dependent_rows) == (True, "")
    report = model_load_check(loaded)
    assert (report.parts, report.warning, report.failures) == (("rows are independent",), "", ())
    assert report.seconds > 0


def test_a_first_dimension_that_is_time_is_no_batch(load: Load) -> None:
    """PyTorch's recurrent networks take [sequence, batch, features]."""
    weights = {"W": normal(1, 6, 3), "R": normal(1, 6, 2, seed=1), "one": np.array([1])}
    loaded = load(RECURRENT, weights=weights)
    assert loaded.signature.dependent_rows.startswith("rows depend on each other: output 'y' of a row ")
    report = model_load_check(loaded)
    assert report.parts == (loaded.signature.dependent_rows,)
    # Nothing goes wrong: the server does not join them.
    assert (report.warning, report.failures) == ("", ())


def test_one_scale_for_the_whole_batch(load: Load) -> None:
    text = """net (float[n, 4] x) => (float[n, 2] y) {
        q, s, z = DynamicQuantizeLinear (x)
        i = MatMulInteger (q, w, z)
        f = Cast <to = 1> (i)
        y = Mul (f, s)
    }"""
    loaded = load(text, weights={"w": np.ones((4, 2), np.int8)})
    reason = "rows depend on each other: DynamicQuantizeLinear takes one scale from all rows"
    assert loaded.signature.dependent_rows == reason


def test_a_written_batch_size_is_kept_with_a_warning(load: Load) -> None:
    loaded = load(OVER_ROWS, max_batch_size=8)
    dependent = loaded.signature.dependent_rows
    assert loaded.signature.supports_batching and "output 'y' of a row differs by" in dependent
    report = model_load_check(loaded)
    assert (report.warning, report.failures) == (f"batched as configured, but {dependent}", (ROWS,))


def test_names_decide_only_what_nobody_wrote(load: Load) -> None:
    text = "net (float[batch, 4] x) => (float[time, 4] y) { y = Neg (x) }"
    named = "rows depend on each other: output 'y' has 'time' rows, input 'x' has 'batch'"
    for mode in ("on", "off"):
        assert load(text, mode).signature.dependent_rows == named
    assert load(text, max_batch_size=8).signature.dependent_rows == ""


@pytest.mark.parametrize("rows", [8, 0])
def test_dims_that_the_model_refuses_are_warned_of(load: Load, rows: int) -> None:
    """The file leaves the number of columns open, and its weights tell it."""
    text = "net (float[n, columns] x) => (float[n, 3] y) { y = MatMul (x, w) }"
    dims = (5,) if rows else (1, 5)
    config = {"max_batch_size": rows, "is_batch_size_written": True, "inputs": tensors(InputConfig, "x", *dims)}
    loaded = load(text, weights={"w": normal(4, 3)}, **config)
    refusal = loaded.warm_up([])
    assert refusal is not None
    report = model_load_check(loaded)
    if not rows:
        assert report == NOT_CHECKED
        report = report_on_refused_zeros(loaded, ModelConfig("net", **config), refusal, PATIENCE_SECONDS)
    assert report.warning.startswith("each request may fail, as no made-up input runs; compare the inputs' data_type")
    assert "MatMul dimension mismatch" in report.warning


def test_a_model_that_takes_numbers_in_texts_is_not_warned_of(load: Load) -> None:
    text = "net (string[2] x) => (float[2] y) { y = Cast <to = 1> (x) }"
    loaded = load(text)
    refusal = loaded.warm_up([])
    assert refusal is not None
    assert report_on_refused_zeros(loaded, ModelConfig("net"), refusal, PATIENCE_SECONDS) == NOT_CHECKED


def test_a_check_that_is_off_does_not_run(load: Load) -> None:
    loaded = load(OVER_ROWS, "off")
    assert loaded.signature.dependent_rows == ""
    assert model_load_check(loaded) == NOT_CHECKED


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_an_input_that_cannot_be_made_up_is_not_batched(load: Load, mode: str) -> None:
    """Only texts of digits can be cast to numbers, and hardly a made-up text is one."""
    text = "net (string[n, 2] x) => (float[n, 2] y) { y = Cast <to = 1> (x) }"
    loaded = load(text, mode)
    assert loaded.signature.dependent_rows.startswith("not checked: the engine takes no made-up input")
    assert "give warm-up samples or check.npz" in loaded.signature.dependent_rows
    written = model_load_check(load(text, mode, max_batch_size=8))
    assert written.failures == ()
    assert bool(written.warning) is (mode == "strict")


@pytest.mark.parametrize(("dims", "size"), [((2,), 1), ((3, 2), 0)], ids=["of a row", "of a batch"])
def test_warm_up_samples_are_inputs(load: Load, tmp_path: Path, dims: tuple[int, ...], size: int) -> None:
    """Only texts of digits can be cast to numbers, and hardly a made-up text is one."""
    text = "net (string[n, 2] x) => (float[n, 2] y) { y = Cast <to = 1> (x) }"
    folder = tmp_path / "model" / "warmup"
    folder.mkdir(parents=True)
    numbers = [b"1", b"2", b"30", b"4", b"500", b"6"][: int(np.prod(dims))]
    (folder / "x").write_bytes(b"".join(len(one).to_bytes(4, "little") + one for one in numbers))
    sample = WarmupSample("digits", size, {"x": WarmupInput(DataType.BYTES, dims, "file:x")}, 1)
    loaded = load(text, model_warmup=(sample,))
    assert loaded.signature.dependent_rows == ""
    assert model_load_check(loaded).parts == ("rows are independent",)


def test_dims_of_the_configuration_are_sizes_of_the_inputs(load: Load) -> None:
    """The file leaves open what only 11 columns fit."""
    text = "net (float[n, c] x) => (float[n, 1] y) { y = MatMul (x, w) }"
    weights = {"w": normal(11, 1)}
    assert load(text, weights=weights, inputs=tensors(InputConfig, "x", -1, 11)).signature.dependent_rows == ""
    batched = load(text, weights=weights, inputs=tensors(InputConfig, "x", 11), max_batch_size=4)
    assert model_load_check(batched).parts == ("rows are independent",)
    assert load(text, weights=weights).signature.dependent_rows.startswith("not checked")


def test_numbers_before_a_choice_show_what_the_choice_hides(load: Load) -> None:
    """The label hardly ever changes with the row's neighbours, but the scores do."""
    text = """net (float[n, 4] x) => (int64[n] y) {
        all = ReduceMean <axes = [0], keepdims = 1> (x)
        little = Mul (all, small)
        scores = Add (x, little)
        y = ArgMax <axis = 1, keepdims = 0> (scores)
    }"""
    loaded = load(text, weights={"small": np.array([1e-4], np.float32)})
    assert loaded.signature.dependent_rows.startswith("rows depend on each other: output 'scores' of a row")
    assert [spec.name for spec in loaded.signature.outputs] == ["y"]


def test_one_row_that_loses_its_dimension_keeps_its_batch(load: Load) -> None:
    """PyTorch's squeeze() of [1, 1, 4] gives [4]."""
    text = "net (float[n, 1, 4] x) => (float[n, 4] y) { y = Squeeze (x) }"
    assert load(text).signature.dependent_rows == ""


def test_what_is_served_without_batches_is_not_checked(load: Load) -> None:
    fixed = "net (float[1, 4] x) => (float[1, 4] y) { y = Neg (x) }"
    # The rows of its batches run one by one.
    assert model_load_check(load(fixed, max_batch_size=4)) == NOT_CHECKED
    whole = {"inputs": tensors(InputConfig, "x", -1, 4), "outputs": tensors(OutputConfig, "y", -1, 4)}
    assert model_load_check(load(OVER_ROWS, **whole)) == NOT_CHECKED


def test_requests_of_unlike_shapes_share_tensors_without_rows(load: Load) -> None:
    text = "net (float[total] x, float[n] ends) => (float[n] y) { y = Neg (ends) }"
    ends = BatchInput(BatchInputKind.ACCUMULATED_ELEMENT_COUNT, DataType.FP32, ("ends",), ("x",))
    ragged = tensors(InputConfig, "x", -1, allow_ragged_batch=True)
    loaded = load(text, inputs=ragged, batch_inputs=(ends,), max_batch_size=4)
    assert model_load_check(loaded) == NOT_CHECKED


def test_a_verdict_is_known_at_the_next_load(load: Load) -> None:
    first, again = load(OVER_ROWS), load(OVER_ROWS)
    assert model_load_check(first).seconds > 0
    assert model_load_check(again).seconds == 0
    assert again.signature == first.signature
    # It belongs to this file and this configuration.
    assert model_load_check(load(SOFTMAX)).parts == ("rows are independent",)
    assert model_load_check(load(OVER_ROWS, graph_level=-1)).seconds > 0


def test_an_index_says_that_the_model_is_being_checked(load: Load, model_source: SourceMaker, tmp_path: Path) -> None:
    reports: list[str] = []
    source = model_source("model.onnx", model(SOFTMAX).SerializeToString())
    settings = replace(source.settings, cache_directory=str(tmp_path / "cache"))
    for _ in range(2):
        backend.load(replace(source, settings=settings, report_check=reports.append))
    assert reports == ["running batches of different rows", ""]


def test_a_time_that_ended_is_tried_again(load: Load, model_source: SourceMaker, tmp_path: Path) -> None:
    source = model_source("model.onnx", model(SOFTMAX).SerializeToString())
    settings = replace(source.settings, cache_directory=str(tmp_path / "cache"))
    hasty = backend.load(replace(source, settings=replace(settings, load_check_seconds=0.0)))
    assert hasty.signature.dependent_rows.startswith("not checked: 0 s are too few")
    patient = backend.load(replace(source, settings=settings))
    assert patient.signature.dependent_rows == ""
