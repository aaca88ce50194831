"""Whether dimensions may be padded to the sizes of the configuration is tried on the loaded session."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.encoders import demanding, encoder, with_own_names
from support.load_check import model
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.base import LoadedModel, ModelSource, model_load_check
from rocserve.backends.onnx import backend
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import NOT_CHECKED, PADDING, LoadCheckFailed
from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve.load_check.tensors import Feed
from rocserve.settings import EngineSettings

SourceMaker = Callable[..., ModelSource]
Load = Callable[..., LoadedModel]

MEAN = "net (float[n, time, 4] x) => (float[n, 4] y) { y = ReduceMean <axes = [1], keepdims = 0> (x) }"
SQUARES = "net (float[n, time, 4] x) => (float[n, t, 4] y) { y = Mul (x, x) }"
CHANGES = "dimension 'time' must not be padded: output 'y' changes by "


@pytest.fixture
def load(model_source: SourceMaker, tmp_path: Path) -> Load:
    """Load a graph. Options are fields of the configuration, or parameters."""

    def load(
        proto: str | onnx.ModelProto,
        mode: str = "on",
        seconds: float = PATIENCE_SECONDS,
        max_batch_size: int = 8,
        sample: Feed | None = None,
        **parameters: str,
    ) -> LoadedModel:
        graph = model(proto) if isinstance(proto, str) else proto
        source = model_source("model.onnx", graph.SerializeToString())
        recorded = source.version_folder / "check.npz"
        recorded.unlink(missing_ok=True)
        if sample is not None:
            write_recorded(recorded, RecordedAnswers(sample, {"y": np.zeros(1, np.float32)}))
        given: Mapping[str, Any] = {"engine": "cpu", "load_check": mode, **parameters}
        config = replace(source.config, parameters=given, max_batch_size=max_batch_size, is_batch_size_written=True)
        settings = EngineSettings(cache_directory=str(tmp_path / "cache"), load_check_seconds=seconds)
        return backend.load(replace(source, config=config, settings=settings))

    return load


def test_an_encoder_with_a_mask(load: Load) -> None:
    loaded = load(encoder(), sizes="sequence=16,32")
    report = model_load_check(loaded)
    assert report.parts == ("rows are independent", "dimension 'sequence' may be padded")
    assert (report.warning, report.failures) == ("", ())
    (dimension,) = loaded.signature.padding.dimensions
    assert (dimension.label, dimension.sizes, dimension.outputs) == ("sequence", (16, 32), {"tokens": (1,)})


def test_without_sizes_nothing_is_padded(load: Load) -> None:
    assert model_load_check(load(encoder())).parts == ("rows are independent",)


def test_sizes_that_change_answers_are_obeyed_with_a_warning(load: Load) -> None:
    loaded = load(MEAN, sizes="time=16,32")
    report = model_load_check(loaded)
    assert report.parts[1].startswith(CHANGES)
    assert report.warning == f"padded as configured, but {report.parts[1]}"
    assert report.failures == (PADDING,)
    assert [one.sizes for one in loaded.signature.padding.dimensions] == [(16, 32)]


def test_a_strict_check_refuses_them(load: Load) -> None:
    for _ in range(2):
        # The second time, the verdict is known.
        with pytest.raises(LoadCheckFailed, match=CHANGES) as failure:
            load(MEAN, "strict", sizes="time=16,32")
        assert failure.value.kind == PADDING
        assert 'remove it from \'sizes\', or set parameter "load_check" to "on"' in str(failure.value)


def test_a_check_that_is_off_does_not_run(load: Load) -> None:
    loaded = load(MEAN, "off", sizes="time=16,32")
    assert model_load_check(loaded) == NOT_CHECKED
    assert loaded.signature.padding.dimensions


def test_a_verdict_is_known_at_the_next_load(load: Load) -> None:
    first, again = load(SQUARES, sizes="time=16"), load(SQUARES, sizes="time=16")
    assert model_load_check(first).seconds > 0
    assert model_load_check(again).seconds == 0
    assert again.signature == first.signature
    # It belongs to these sizes.
    assert model_load_check(load(SQUARES, sizes="time=16,32")).seconds > 0


@pytest.mark.parametrize("mode", ["on", "strict"])
def test_without_time_nothing_is_known(load: Load, mode: str) -> None:
    report = model_load_check(load(SQUARES, mode, 0.0, sizes="time=16"))
    reason = "padding of dimension 'time' not checked: 0 s are too few; raise --load-check-seconds"
    assert report.parts[1] == reason
    assert report.failures == ()
    assert (f"padded as configured, but {reason}" in report.warning) is (mode == "strict")
    assert model_load_check(load(SQUARES, mode, sizes="time=16")).parts[1] == "dimension 'time' may be padded"


def test_a_mask_that_hides_with_1_is_filled_with_1(load: Load) -> None:
    proto = model(
        """net (float[n, time, 4] x, bool[n, time] mask) => (float[n, time, 4] y) {
            t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) f = Cast<to = 1>(mask) u = Unsqueeze(f, one)
            l = Mul(u, least) h = Add(s, l) p = Softmax<axis = -1>(h) y = MatMul(p, x) }""",
        one=np.array([1]),
        least=np.array(-1e9, np.float32),
    )
    loaded = load(proto, sizes="time=16")
    assert loaded.signature.padding.values == {"mask": 1.0}
    assert model_load_check(loaded).parts[1] == "dimension 'time' may be padded, with 1 in 'mask'"
    # What somebody writes is obeyed.
    written = load(proto, sizes="time=16", padding="mask=0")
    assert written.signature.padding.values == {}
    assert model_load_check(written).failures == (PADDING,)


def test_the_batch_dimension_as_one_of_many(load: Load) -> None:
    """max_batch_size: 0 leaves the first dimension to the requests."""
    loaded = load("net (float[n, 4] x) => (float[n, 4] y) { y = Neg (x) }", max_batch_size=0, sizes="n=4,8")
    assert model_load_check(loaded).parts[-1:] == ("dimension 'n' may be padded",)


def test_a_model_of_one_row(load: Load) -> None:
    """The rows of its batches run one by one."""
    loaded = load("net (float[1, time, 4] x) => (float[1, time, 4] y) { y = Neg (x) }", sizes="time=16")
    assert model_load_check(loaded).parts == ("dimension 'time' may be padded",)
    (dimension,) = loaded.signature.padding.dimensions
    assert dimension.outputs == {"y": (1,)}


NAMES = {"input_ids": (1,), "attention_mask": (1,)}


@pytest.mark.parametrize(
    ("name", "sizes", "label"),
    [
        ("unk__{}", "unk__2=16,32", "unk__2"),
        ("unk__{}", "unk__4=16,32", "unk__4"),
        ("unk__{}", "unk__4=32,16; unk__2=16,32", "unk__2"),
        ("", "input_ids:0=16,32", "input_ids:0"),
        ("", "attention_mask:0=16,32", "attention_mask:0"),
    ],
)
@pytest.mark.parametrize("max_batch_size", [8, 0])
def test_dimensions_with_other_names_that_must_be_equal(
    load: Load, name: str, sizes: str, label: str, max_batch_size: int
) -> None:
    if not name and not max_batch_size:
        # The index of a dimension counts the rows, too.
        sizes, label = sizes.replace(":0", ":1"), label.replace(":0", ":1")
    loaded = load(with_own_names(encoder(), name), max_batch_size=max_batch_size, sizes=sizes)
    (dimension,) = loaded.signature.padding.dimensions
    assert (dimension.label, dimension.sizes) == (label, (16, 32))
    assert (dimension.inputs, dimension.outputs) == (NAMES, {"tokens": (1,)})
    assert model_load_check(loaded).parts[-1] == f"dimension '{label}' may be padded"
    assert not model_load_check(loaded).warning


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            "unk__2=16,32; unk__4=16",
            "parameter 'sizes' of model 'model' gives the dimensions 'unk__2' and 'unk__4' different sizes, but the"
            " model needs equal ones; write the sizes of one of them",
        ),
        ("unk__3=16", "names the dimension 'unk__3'"),
    ],
)
def test_faults_of_dimensions_that_must_be_equal(load: Load, sizes: str, text: str) -> None:
    with pytest.raises(ServeError) as refused:
        load(with_own_names(encoder()), sizes=sizes)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
    assert text in refused.value.text


def test_texts_that_must_be_as_long_as_something_padded(load: Load) -> None:
    graph = """net (float[n, a] x, string[n, b] t) => (float[n, c] y) {
        f = Cast<to = 1>(t) y = Add(x, f) }"""
    with pytest.raises(ServeError, match="dimension 'a', which must equal a dimension of the texts in input 't'"):
        load(graph, sizes="a=8,16", sample={"x": np.ones((1, 8), np.float32), "t": np.full((1, 8), "1", object)})


def test_dimensions_that_need_not_be_equal_stay_what_they_are(load: Load) -> None:
    graph = """net (float[n, a, 4] x, float[n, b, 4] z) => (float[n, a, b] y) {
        t = Transpose<perm = [0, 2, 1]>(z) y = MatMul(x, t) }"""
    (dimension,) = load(graph, sizes="a=8,16").signature.padding.dimensions
    assert (dimension.inputs, dimension.outputs) == ({"x": (1,)}, {"y": (1,)})


@pytest.mark.parametrize("label", ["a", "b"])
@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_model_that_refuses_zeros(load: Load, label: str, mode: str) -> None:
    loaded = load(demanding(), mode, sizes=f"{label}=8,16")
    (dimension,) = loaded.signature.padding.dimensions
    assert (dimension.inputs, dimension.outputs) == (NAMES, {"tokens": (1,)})


OFFSET = (
    "net (int64[n, a] x, int64[n, b] z) => (float[n, a] y) { s = Add(x, z) i = Sub(s, first) y = Gather(table, i) }"
)


@pytest.mark.parametrize("length", [5, 40])
def test_samples_of_any_length_show_what_a_model_without_zeros_does(load: Load, length: int) -> None:
    """Made-up inputs do not fit: only the sums 92 to 107 do."""
    proto = model(OFFSET, first=np.array([100]), table=np.arange(8, dtype=np.float32))
    sample = {"x": np.full((1, length), 50), "z": np.full((1, length), 51)}
    loaded = load(proto, sizes="a=8,16", sample=sample)
    (dimension,) = loaded.signature.padding.dimensions
    assert (dimension.inputs, dimension.outputs) == ({"x": (1,), "z": (1,)}, {"y": (1,)})
    with pytest.raises(ServeError, match="give a warm-up sample"):
        load(proto, sizes="a=8,16")
