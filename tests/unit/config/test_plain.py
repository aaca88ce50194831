from __future__ import annotations

from rocserve.config.completion import normalise
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.plain import to_plain
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import (
    DynamicBatching,
    EnsembleStep,
    ExecutionAccelerator,
    InputConfig,
    InstanceGroup,
    InstanceKind,
    ModelConfig,
    OutputConfig,
    QueuePolicy,
    VersionPolicy,
    WarmupInput,
    WarmupSample,
)


def test_every_part() -> None:
    message = parse_model_config(
        """
        name: "m" platform: "onnx_onnxv1" backend: "onnxruntime" max_batch_size: 8
        version_policy { specific { versions: [2, 5] } }
        input { name: "x" data_type: TYPE_UINT8 format: FORMAT_NHWC dims: [2, 3, -1] optional: true }
        output { name: "y" data_type: TYPE_STRING dims: 1 reshape { } label_filename: "l.txt" }
        instance_group { count: 2 kind: KIND_GPU gpus: [0, 1] passive: true }
        dynamic_batching {
          preferred_batch_size: [8, 4] max_queue_delay_microseconds: 9 preserve_ordering: true
          priority_levels: 2 default_priority_level: 1
          default_queue_policy { max_queue_size: 3 }
          priority_queue_policy {
            key: 2
            value { timeout_action: DELAY default_timeout_microseconds: 4 allow_timeout_override: true }
          }
        }
        default_model_filename: "f.onnx"
        parameters { key: "k" value { string_value: "v" } }
        model_warmup {
          name: "w" batch_size: 2
          inputs { key: "x" value { data_type: TYPE_UINT8 dims: [2, 3, 1] random_data: true } }
        }
        model_warmup {
          name: "v" batch_size: 1 count: 3
          inputs { key: "x" value { data_type: TYPE_BF16 dims: 1 input_data_file: "raw" } }
          inputs { key: "z" value { data_type: TYPE_BOOL zero_data: true } }
        }
        model_warmup { name: "skipped" }
        optimization { execution_accelerators {
          gpu_execution_accelerator { name: "migraphx" parameters { key: "precision" value: "fp16" } }
          gpu_execution_accelerator { name: "x" }
          cpu_execution_accelerator { name: "openvino" }
        } }
        """,
        "config.pbtxt",
    )
    assert to_plain(message, "onnx", {"y": ("cat", "dog")}) == ModelConfig(
        name="m",
        platform="onnx_onnxv1",
        backend="onnx",
        max_batch_size=8,
        is_batch_size_written=True,
        inputs=(InputConfig("x", DataType.UINT8, (2, 3, -1), None, True, "FORMAT_NHWC"),),
        outputs=(OutputConfig("y", DataType.BYTES, (1,), (), "l.txt", ("cat", "dog")),),
        version_policy=VersionPolicy(specific=(2, 5)),
        instance_groups=(InstanceGroup("", InstanceKind.GPU, 2, (0, 1), True),),
        dynamic_batching=DynamicBatching(
            (4, 8), 9, True, 2, 1, QueuePolicy(max_queue_size=3), {2: QueuePolicy(True, 4, True, 0)}
        ),
        model_warmup=(
            WarmupSample("w", 2, {"x": WarmupInput(DataType.UINT8, (2, 3, 1), "random")}),
            WarmupSample(
                "v",
                1,
                {"x": WarmupInput(DataType.BF16, (1,), "file:raw"), "z": WarmupInput(DataType.BOOL, (), "zero")},
                3,
            ),
        ),
        default_model_filename="f.onnx",
        parameters={"k": "v"},
        gpu_accelerators=(ExecutionAccelerator("migraphx", {"precision": "fp16"}), ExecutionAccelerator("x")),
        cpu_accelerators=(ExecutionAccelerator("openvino"),),
    )


def test_steps_without_a_version_take_the_highest() -> None:
    message = parse_model_config(
        """
        name: "e"
        ensemble_scheduling {
          step { model_name: "a" input_map { key: "x" value: "in" } output_map { key: "y" value: "out" } }
          step { model_name: "b" model_version: 3 }
        }
        """,
        "config.pbtxt",
    )
    normalise(message, None)
    config = to_plain(message, "ensemble", {})
    assert config.is_ensemble
    assert config.platform == "ensemble"
    assert config.instance_groups == ()
    assert config.ensemble_steps == (EnsembleStep("a", -1, {"x": "in"}, {"y": "out"}), EnsembleStep("b", 3, {}, {}))


def test_every_datatype_has_its_name() -> None:
    for datatype in DataType:
        name = "TYPE_STRING" if datatype is DataType.BYTES else f"TYPE_{datatype.value}"
        message = parse_model_config(f'input {{ name: "x" data_type: {name} dims: 1 }}', "config.pbtxt")
        assert to_plain(message, "onnx", {}).inputs[0].datatype is datatype
