"""Execution providers are held against ONNX Runtime's CPU provider. A stand-in for one is the CPU's own under another
kind, whose answers a test may change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.load_check import model, normal
from support.models import map_classifier

from rocserve.backends.base import LoadedModel, ModelSource, model_load_check
from rocserve.backends.onnx import backend, provider_check
from rocserve.backends.onnx.provider_options import MIGRAPHX_PROVIDER, OPENVINO
from rocserve.backends.onnx.providers import Provider, ProviderPlan
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import REFERENCE, ROWS, LoadCheckFailed
from rocserve.core.model_config import WarmupInput, WarmupSample

SourceMaker = Callable[..., ModelSource]
Array = np.ndarray[Any, Any]
Load = Callable[..., LoadedModel]

CPU = "CPUExecutionProvider"
LINEAR = "net (float[n, 4] x) => (float[n, 3] y) { y = MatMul (x, w) }"
WEIGHTS = {"w": normal(4, 3)}
OVER_ROWS = "net (float[n, 4] x) => (float[n, 4] y) { y = Softmax <axis = 0> (x) }"


class Stand:
    """What the provider is, and what it computes."""

    def __init__(self) -> None:
        self.plan = ProviderPlan((Provider(replace(OPENVINO, provider=CPU), {}),), accepts_cpu=False)
        self.error = 0.0
        self.sizes: list[int] = []

    def plan_providers(self, *_: object) -> ProviderPlan:
        return self.plan

    def session_run(self, session: Any, signature: object) -> Callable[..., Sequence[Array]]:
        def run(wanted: Sequence[str], inputs: Mapping[str, Array]) -> Sequence[Array]:
            self.sizes.append(len(next(iter(inputs.values()))))
            outputs: Sequence[Array] = session.run(wanted, inputs)
            return [output + self.error if output.dtype == np.float32 else output for output in outputs]

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
        config = replace(source.config, parameters={"load_check": mode}, **options)
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
