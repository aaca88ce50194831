"""Execution providers are held against ONNX Runtime's CPU provider. A stand-in for one is the CPU's own under another
kind, whose answers a test may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.encoders import encoder
from support.load_check import model, normal
from support.models import map_classifier

from rocserve.backends.base import LoadedModel, ModelSource, model_load_check
from rocserve.backends.onnx import backend, provider_check
from rocserve.backends.onnx.external_weights import NO_WEIGHTS
from rocserve.backends.onnx.provider_options import MIGRAPHX_PROVIDER, OPENVINO
from rocserve.backends.onnx.provider_padding import ProviderPadding
from rocserve.backends.onnx.providers import Provider, ProviderPlan
from rocserve.backends.written_sizes import half_steps
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import NOT_CHECKED, PADDING, REFERENCE, ROWS, LoadCheckFailed
from rocserve.core.model_config import WarmupInput, WarmupSample
from rocserve.core.padding import NO_PADDING

SourceMaker = Callable[..., ModelSource]
Array = np.ndarray[Any, Any]
Load = Callable[..., LoadedModel]

CPU = "CPUExecutionProvider"
LINEAR = "net (float[n, 4] x) => (float[n, 3] y) { y = MatMul (x, w) }"
WEIGHTS = {"w": normal(4, 3)}
MEAN = "net (float[n, time, 4] x) => (float[n, 4] y) { y = ReduceMean <axes = [1], keepdims = 0> (x) }"
TANH = "net (float[n, time, 4] x) => (float[n, time, 4] y) { y = Tanh (x) }"
OVER_ROWS = "net (float[n, 4] x) => (float[n, 4] y) { y = Softmax <axis = 0> (x) }"


class Stand:
    """What the provider is, and what it computes."""

    def __init__(self) -> None:
        self.plan = ProviderPlan((Provider(replace(OPENVINO, provider=CPU), {}),), accepts_cpu=False)
        self.error = 0.0
        self.wrong_at = 0
        """The length of inputs, in the second dimension, at which answers are wrong."""
        self.sizes: list[int] = []

    def plan_providers(self, *_: object) -> ProviderPlan:
        return self.plan

    def session_run(self, session: Any, signature: object) -> Callable[..., Sequence[Array]]:
        def run(wanted: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
            first = next(iter(inputs.values()))
            self.sizes.append(len(first))
            outputs: Sequence[Array] = session.run(wanted, inputs)
            error = 0.5 if first.shape[1] == self.wrong_at else self.error
            return [output + error if output.dtype == np.float32 else output for output in outputs]

        return run


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand = Stand()
    monkeypatch.setattr(backend, "plan_providers", stand.plan_providers)
    monkeypatch.setattr(backend, "session_run", stand.session_run)
    monkeypatch.setattr(backend, "is_on_cpu", lambda session: False)
    return stand


@pytest.fixture
def load(model_source: SourceMaker, tmp_path: Path) -> Load:
    def load(content: bytes, mode: str = "on", **options: Any) -> LoadedModel:
        source = model_source("model.onnx", content)
        parameters = {name: options.pop(name) for name in ("sizes", "version") if name in options}
        config = replace(source.config, parameters={"load_check": mode, **parameters}, **options)
        settings = replace(source.settings, cache_directory=str(tmp_path / "cache"))
        return backend.load(replace(source, config=config, settings=settings))

    return load


def linear() -> bytes:
    return bytes(model(LINEAR, **WEIGHTS).SerializeToString())


@pytest.mark.long
def test_a_right_provider(provider: Stand, load: Load) -> None:
    loaded = load(linear())
    report = model_load_check(loaded)
    rows, reference = report.parts
    assert rows == "rows are independent"
    assert reference.endswith(f" inputs on {CPU} and on the CPU, largest error 0")
    assert (report.warning, report.failures) == ("", ()) and report.seconds > 0
    again = model_load_check(load(linear()))
    assert (again.parts, again.seconds) == (report.parts, 0)


@pytest.mark.long
def test_a_named_provider_that_computes_otherwise_is_refused(provider: Stand, load: Load) -> None:
    provider.error = 0.5
    for _ in range(2):
        with pytest.raises(LoadCheckFailed) as refused:
            load(linear())
        assert (refused.value.kind, refused.value.code) == (REFERENCE, StatusCode.INVALID_ARGUMENT)
        assert f"model 'model': {CPU} does not compute what ONNX Runtime's CPU provider does" in refused.value.text
        assert "output 'y' is wrong with plain inputs: " in refused.value.text
    warned = model_load_check(load(linear(), "warn"))
    assert warned.failures == (REFERENCE,) and "output 'y' is wrong with plain inputs" in warned.warning
    assert model_load_check(load(linear(), "off")).parts == ()


@pytest.mark.long
@pytest.mark.parametrize("options", [{"accepts_cpu": True}, {"accepts_cpu": False, "is_default": True}])
def test_the_cpu_replaces_a_provider_that_nobody_has_named(
    provider: Stand, load: Load, options: dict[str, bool]
) -> None:
    provider.plan, provider.error = ProviderPlan(provider.plan.providers, **options), 0.5
    report = model_load_check(load(linear()))
    assert report.warning.startswith("it runs on ONNX Runtime's CPU provider instead: model 'model': ")
    assert "output 'y' is wrong" in report.warning
    assert report.failures == (REFERENCE,)
    assert report.parts == ("rows are independent",)


@pytest.mark.long
def test_rows_that_depend_on_each_other_are_not_compiled_for_batches(provider: Stand, load: Load) -> None:
    content = bytes(model(OVER_ROWS).SerializeToString())
    loaded = load(content)
    assert loaded.signature.dependent_rows.startswith("rows depend on each other")
    written = load(content, max_batch_size=4)
    report = model_load_check(written)
    assert report.failures == (ROWS,) and report.warning.startswith("batched as configured, but rows depend")
    # OpenVINO that compiles each shape gets no batch sizes then, so the configuration must give all dims.
    stand_in = Provider(OPENVINO, {"disable_dynamic_shapes": "true"})
    provider.plan = ProviderPlan((stand_in,), accepts_cpu=False)
    with pytest.raises(ServeError, match="dimension 0 of input 'x' may have any size"):
        load(content)


@pytest.mark.long
def test_the_reference_is_what_is_served_in_place_of_the_file(provider: Stand, load: Load) -> None:
    """ONNX Runtime's maps are served as tensors."""
    report = model_load_check(load(map_classifier([3, 5, -8])))
    assert report.parts[-1].endswith(f" inputs on {CPU} and on the CPU, largest error 0")


@pytest.mark.long
def test_a_model_that_takes_only_its_samples(provider: Stand, load: Load, tmp_path: Path) -> None:
    text = "net (string[n, 2] x) => (float[n, 2] y) { y = Cast <to = 1> (x) }"
    content = bytes(model(text).SerializeToString())
    missing = model_load_check(load(content))
    assert missing.parts[-1] == (
        f"{CPU} not checked against ONNX Runtime's CPU provider: no made-up input runs on ONNX Runtime; give warm-up"
        " samples or check.npz"
    )
    folder = tmp_path / "model" / "warmup"
    folder.mkdir(parents=True)
    (folder / "x").write_bytes(b"".join(len(one).to_bytes(4, "little") + one for one in (b"1", b"250")))
    sample = WarmupSample("digits", 1, {"x": WarmupInput(DataType.BYTES, (2,), "file:x")}, 1)
    report = model_load_check(load(content, model_warmup=(sample,)))
    assert report.parts[0] == "rows are independent"
    assert " inputs on " in report.parts[-1]
    provider.error = 0.5
    with pytest.raises(LoadCheckFailed, match="output 'y' is wrong with plain inputs"):
        load(content, model_warmup=(sample,), graph_level=-1)


@pytest.mark.parametrize(
    ("kind", "options", "precision"),
    [
        (OPENVINO, {}, "fp32"),
        (OPENVINO, {"device_type": "GPU.0"}, "fp16"),
        (OPENVINO, {"device_type": "GPU", "precision": "FP32"}, "fp32"),
        (OPENVINO, {"precision": "FP16"}, "fp16"),
        (MIGRAPHX_PROVIDER, {}, "fp32"),
        (MIGRAPHX_PROVIDER, {"migraphx_bf16_enable": "1"}, "bf16"),
        (MIGRAPHX_PROVIDER, {"migraphx_fp16_enable": "1", "migraphx_int8_enable": "1"}, "int8"),
        (provider_check.CUDA, {}, "fp16"),
        (provider_check.CUDA, {"use_tf32": "0"}, "fp32"),
    ],
)
def test_what_a_provider_computes_in(kind: Any, options: Mapping[str, str], precision: str) -> None:
    assert provider_check.precision_of(Provider(kind, options)) == precision


@pytest.mark.long
def test_written_sizes_are_padded_and_compared_as_they_serve(provider: Stand, load: Load) -> None:
    content, sizes = bytes(encoder().SerializeToString()), {"sizes": "sequence=512"}
    report = model_load_check(loaded := load(content, max_batch_size=4, **sizes))
    assert report.parts[:2] == ("rows are independent", "dimension 'sequence' may be padded")
    assert f" inputs on {CPU} and on the CPU, largest error" in report.parts[2]
    (dimension,) = loaded.signature.padding.dimensions
    assert (dimension.sizes, dimension.outputs) == ((512,), {"tokens": (1,)})
    # No input of the check is as long.
    provider.wrong_at = 512
    with pytest.raises(LoadCheckFailed, match="output 'tokens' is wrong"):
        load(content, max_batch_size=4, **sizes, version="2")


@pytest.mark.long
def test_written_sizes_that_change_answers(provider: Stand, load: Load) -> None:
    content = bytes(model(MEAN).SerializeToString())
    report = model_load_check(load(content, max_batch_size=4, sizes="time=16,32"))
    assert report.warning.startswith("padded as configured, but dimension 'time' must not be padded")
    assert report.failures == (PADDING,)
    with pytest.raises(LoadCheckFailed, match="parameter 'sizes' pads requests, but"):
        load(content, "strict", max_batch_size=4, sizes="time=16,32")
    assert model_load_check(load(content, "off", max_batch_size=4, sizes="time=16,32")) == NOT_CHECKED


@pytest.mark.long
@pytest.mark.parametrize(
    ("proto", "mode", "sizes", "reason"),
    [
        (encoder(longest=40), "on", (16, 24, 32, 40), "dimension 'sequence' may be padded"),
        (TANH, "on", half_steps(512), "dimension 'time' may be padded"),
        (MEAN, "on", (), "dimension 'time' must not be padded: output 'y' changes by "),
        (encoder(longest=40), "off", (), ""),
        (LINEAR, "on", (), ""),
    ],
)
def test_default_sizes(
    model_source: SourceMaker, proto: Any, mode: str, sizes: tuple[int, ...], reason: str, tmp_path: Path
) -> None:
    graph = model(proto, **(WEIGHTS if proto == LINEAR else {})) if isinstance(proto, str) else proto
    parameters = {"load_check": mode, "engine": "cpu"}
    source = model_source("model.onnx", graph.SerializeToString(), max_batch_size=4, parameters=parameters)
    source = replace(source, settings=replace(source.settings, cache_directory=str(tmp_path / "cache")))
    loaded = backend.load(source)
    assert isinstance(loaded, backend.OnnxModel)
    found = ProviderPadding(source, NO_WEIGHTS, loaded.signature, loaded.shapes_on_zeros)
    padding, report = found.chosen(by_default=True)
    assert [one.sizes for one in padding.dimensions] == [sizes] * bool(sizes)
    # Beyond its table the encoder fails.
    assert [one.takes_others for one in padding.dimensions] == [proto == TANH] * bool(sizes)
    assert " ".join(report.parts).startswith(reason) and bool(report.parts) == bool(reason)
    assert found.chosen(by_default=False)[0] == NO_PADDING
