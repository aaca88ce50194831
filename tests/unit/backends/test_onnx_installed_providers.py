"""Models on every execution provider of the installed ONNX Runtime; on most machines that is the CPU's alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper
from support.models import add_sub, graph, identity

from rocserve.backends.base import Batch, LoadedModel, ModelSource, model_properties
from rocserve.backends.onnx.backend import load
from rocserve.backends.onnx.opener import SessionOpener
from rocserve.backends.onnx.providers import CUDA, KINDS, MIGRAPHX_PROVIDER, OPENVINO, ROCM, Provider, ProviderPlan
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import ExecutionAccelerator, InputConfig, InstanceKind, OutputConfig
from rocserve.core.tensors import Tensor, tensor_from_numpy

SourceMaker = Callable[..., ModelSource]

FLOAT = TensorProto.FLOAT
AVAILABLE = onnxruntime.get_available_providers()


@dataclass(frozen=True)
class Setting:
    """A way to ask for a provider on this machine."""

    provider: str
    accelerator: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    on_gpu: bool = False

    def given_to(self, source: ModelSource, cache: Path) -> ModelSource:
        accelerators = (ExecutionAccelerator(self.accelerator, self.parameters),) if self.accelerator else ()
        parameters = {**source.config.parameters, **({} if self.accelerator else {"engine": "cpu"})}
        config = replace(source.config, parameters=parameters)
        settings = replace(source.settings, cache_directory=str(cache))
        if self.on_gpu:
            config = replace(config, gpu_accelerators=accelerators)
            return replace(source, config=config, settings=settings, instance_kind=InstanceKind.GPU, device=0)
        return replace(source, config=replace(config, cpu_accelerators=accelerators), settings=settings)


SETTINGS = {
    "cpu": Setting("CPUExecutionProvider"),
    "openvino": Setting(OPENVINO.provider, "openvino"),
    "openvino of fixed shapes": Setting(OPENVINO.provider, "openvino", {"disable_dynamic_shapes": "true"}),
    "openvino with a cache": Setting(OPENVINO.provider, "openvino", {"cache_dir": "any"}),
    "migraphx": Setting(MIGRAPHX_PROVIDER.provider, "migraphx", on_gpu=True),
    "rocm": Setting(ROCM.provider, "rocm", on_gpu=True),
    "cuda": Setting(CUDA.provider, "cuda", {"use_tf32": "0"}, on_gpu=True),
}


def has_gpu() -> bool:
    return any(Path(device).exists() for device in ("/dev/kfd", "/dev/nvidiactl"))


USABLE = [
    name for name, setting in SETTINGS.items() if setting.provider in AVAILABLE and (has_gpu() or not setting.on_gpu)
]


@pytest.fixture(params=USABLE)
def setting(request: pytest.FixtureRequest) -> Setting:
    return SETTINGS[request.param]


@pytest.fixture
def load_with(setting: Setting, tmp_path: Path) -> Callable[[ModelSource], LoadedModel]:
    return lambda source: load(setting.given_to(source, tmp_path / "cache"))


Loader = Callable[[ModelSource], LoadedModel]


def run(model: LoadedModel, wanted: tuple[str, ...], **inputs: np.ndarray[Any, Any]) -> Mapping[str, Any]:
    tensors = {name: tensor_from_numpy(name, array) for name, array in inputs.items()}
    return model.execute(Batch(tensors, wanted, (len(next(iter(inputs.values()))),))).outputs


def small_net() -> bytes:
    """Y = softmax of a product after a convolution, FP32 [batch, 2, 4, 4] -> [batch, 3]."""
    random = np.random.default_rng(7)

    def constant(name: str, *shape: int) -> Any:
        values = random.standard_normal(shape).astype(np.float32)
        tensor = helper.make_tensor(name, FLOAT, shape, values.tobytes(), raw=True)
        return helper.make_node("Constant", [], [name], value=tensor)

    nodes = [
        constant("kernel", 5, 2, 3, 3),
        constant("weights", 5 * 4 * 4, 3),
        helper.make_node("Conv", ["X", "kernel"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Flatten", ["r"], ["f"]),
        helper.make_node("MatMul", ["f", "weights"], ["m"]),
        helper.make_node("Softmax", ["m"], ["Y"]),
    ]
    return graph(nodes, {"X": (FLOAT, ["batch", 2, 4, 4])}, {"Y": (FLOAT, ["batch", 3])})


def test_a_net_gives_what_the_cpu_gives(model_source: SourceMaker, setting: Setting, load_with: Loader) -> None:
    source = model_source(
        "model.onnx",
        small_net(),
        max_batch_size=4,
        inputs=[InputConfig("X", DataType.FP32, (2, 4, 4))],
        outputs=[OutputConfig("Y", DataType.FP32, (3,))],
    )
    model = load_with(source)
    assert model.signature.supports_batching
    assert model_properties(model)["execution_providers"].split(", ")[0] == setting.provider
    model.warm_up([])
    plain = onnxruntime.InferenceSession(str(source.model_file), providers=["CPUExecutionProvider"])
    for rows in (1, 2, 3, 4, 7):
        images = np.random.default_rng(rows).standard_normal((rows, 2, 4, 4)).astype(np.float32)
        result = run(model, ("Y",), X=images)["Y"]
        np.testing.assert_allclose(result, plain.run(None, {"X": images})[0], atol=1e-4)
    model.close()


def test_several_inputs_and_outputs(model_source: SourceMaker, load_with: Loader) -> None:
    model = load_with(model_source("model.onnx", add_sub()))
    for rows in (1, 3, 4):
        left = np.arange(rows * 16, dtype=np.int32).reshape(rows, 16)
        outputs = run(model, ("OUTPUT1", "OUTPUT0"), INPUT0=left, INPUT1=left[::-1].copy())
        np.testing.assert_array_equal(outputs["OUTPUT0"], left + left[::-1])
        np.testing.assert_array_equal(outputs["OUTPUT1"], left - left[::-1])


def test_bfloat16(model_source: SourceMaker, load_with: Loader) -> None:
    cast = helper.make_node("Cast", ["X"], ["wide"], to=FLOAT)
    back = helper.make_node("Cast", ["wide"], ["Y"], to=TensorProto.BFLOAT16)
    spec = (TensorProto.BFLOAT16, ["batch", 3])
    model = load_with(model_source("model.onnx", graph([cast, back], {"X": spec}, {"Y": spec})))
    model.warm_up([])
    for rows in (1, 3):
        bits = np.arange(rows * 3, dtype=np.uint16).reshape(rows, 3) + 0x3F80
        given = Tensor("X", DataType.BF16, bits.shape, bits.tobytes())
        result = model.execute(Batch({"X": given}, ("Y",), (rows,))).outputs["Y"]
        assert isinstance(result, Tensor)
        assert result.datatype is DataType.BF16
        np.testing.assert_array_equal(result.numpy(), bits)


def test_text(model_source: SourceMaker, setting: Setting, load_with: Loader) -> None:
    source = model_source("model.onnx", identity(TensorProto.STRING, ["batch", 1]))
    if setting.on_gpu:
        with pytest.raises(ServeError, match="runs none of the model's operators, so all would run on the CPU: Ident"):
            load_with(source)
        return
    model = load_with(source)
    result = run(model, ("OUTPUT0",), INPUT0=np.array([[b"a"], [b"b"], [b"c"]], dtype=object))["OUTPUT0"]
    assert result.tolist() == [[b"a"], [b"b"], [b"c"]]


def test_a_broken_file(model_source: SourceMaker, load_with: Loader) -> None:
    with pytest.raises(ServeError, match=r"ONNX Runtime cannot load model.onnx: .*Protobuf parsing failed"):
        load_with(model_source("model.onnx", b"not a model at all"))


@pytest.mark.filterwarnings("ignore:Specified provider")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.accelerator)
def test_a_provider_that_does_not_start(
    model_source: SourceMaker, kind: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    if kind is OPENVINO and OPENVINO.provider in AVAILABLE:
        options = {"device_type": "NPU"}
    elif kind is not OPENVINO and kind.provider in AVAILABLE and has_gpu():
        pytest.skip(f"{kind.provider} may well start on this machine")
    else:
        options = {}
    plan = ProviderPlan((Provider(kind, options),), accepts_cpu=False)
    with pytest.raises(ServeError) as caught:
        source = model_source("model.onnx", add_sub())
        SessionOpener(source, plan).open()
    started = f"ONNX Runtime's {kind.provider} did not start: "
    failed = f"ONNX Runtime cannot run model.onnx on {kind.provider}: "
    assert caught.value.text.startswith((started, failed))
    assert len(caught.value.text) > len(started)
    if kind is OPENVINO and kind.provider in AVAILABLE:
        assert caught.value.text == started + "[OpenVINO] Device NPU is not available"
    if kind is MIGRAPHX_PROVIDER and kind.provider in AVAILABLE:
        assert "lib" in caught.value.text


def test_what_may_run_on_the_cpu_runs_there_said_loudly(
    model_source: SourceMaker, caplog: pytest.LogCaptureFixture
) -> None:
    unavailable = [kind for kind in (MIGRAPHX_PROVIDER, ROCM, CUDA) if kind.provider not in AVAILABLE]
    if len(unavailable) < 3:
        pytest.skip("the installed ONNX Runtime has a provider for GPUs")
    source = model_source("model.onnx", add_sub(), kind=InstanceKind.GPU)
    with pytest.raises(ServeError, match="install that package, use KIND_CPU") as caught:
        load(source)
    assert caught.value.code is StatusCode.UNAVAILABLE
    model = load(replace(source, config=replace(source.config, parameters={"engine": "auto"})))
    assert "runs on the CPU, as parameter 'engine' is \"auto\": the installed ONNX Runtime has no" in caplog.text
    ones = np.ones((1, 16), np.int32)
    np.testing.assert_array_equal(run(model, ("OUTPUT0",), INPUT0=ones, INPUT1=ones)["OUTPUT0"], ones * 2)


if OPENVINO.provider in AVAILABLE:

    def test_what_fails_to_start_is_replaced_only_by_word(
        model_source: SourceMaker, caplog: pytest.LogCaptureFixture
    ) -> None:
        source = model_source("model.onnx", add_sub())
        npu = (ExecutionAccelerator("openvino", {"device_type": "NPU"}),)
        with pytest.raises(ServeError, match="Device NPU is not available"):
            load(replace(source, config=replace(source.config, cpu_accelerators=npu)))
        load(replace(source, config=replace(source.config, cpu_accelerators=npu, parameters={"engine": "auto"})))
        assert (
            "runs on ONNX Runtime's CPU provider, as parameter 'engine' is \"auto\": ONNX Runtime's Open" in caplog.text
        )

    def test_a_note_names_operators_that_a_provider_leaves_to_the_cpu(
        model_source: SourceMaker, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.WARNING)
        load(model_source("model.onnx", identity(TensorProto.STRING, ["batch", 1])))
        assert (
            "1 of 1 operators run on ONNX Runtime's CPU provider, not on OpenVINOExecutionProvider: Identity"
            in caplog.text
        )
