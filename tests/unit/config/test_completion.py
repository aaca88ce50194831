from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.model_folders import Models

from rocserve.backends.base import BackendSpec, EngineSpec
from rocserve.backends.registry import BackendRegistry
from rocserve.config.definition import ModelDefinition, complete_definition
from rocserve.config.request_rules import ConfigRequest
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, InstanceGroup, InstanceKind, OutputConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.protocol.json_form import plain_values

MakeSignature = Callable[..., Signature]
Read = Callable[..., ModelDefinition]


@pytest.fixture
def read(models: Models) -> Read:
    """The definition of a model "m" with this config.pbtxt and an ONNX file."""
    return lambda text, **options: models.made("m", {"config.pbtxt": text, "1/model.onnx": ""}, **options)


@pytest.fixture
def batching(make_signature: MakeSignature) -> Signature:
    return make_signature({"x": ("FP32", (-1, 4))}, {"y": ("BYTES", (-1, -1)), "z": ("INT64", (-1,))})


@pytest.fixture
def single(make_signature: MakeSignature) -> Signature:
    return make_signature({"x": ("FP32", (1, 4))}, {"y": ("FP32", ())})


def test_all_is_filled_from_a_model_that_batches(read: Read, batching: Signature) -> None:
    config = complete_definition(read('backend: "onnxruntime"'), batching).config
    assert config.max_batch_size == 64
    assert config.inputs == (InputConfig("x", DataType.FP32, (4,)),)
    assert config.outputs == (
        OutputConfig("y", DataType.BYTES, (-1,)),
        OutputConfig("z", DataType.INT64, (1,), reshape=()),
    )
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.preferred_batch_sizes == (64,)


def test_the_message_tells_the_same(read: Read, batching: Signature) -> None:
    definition = complete_definition(read('backend: "onnxruntime"'), batching)
    message = definition.message
    assert (message.platform, message.backend) == ("onnx_onnxv1", "onnxruntime")
    assert message.default_model_filename == "model.onnx"
    assert message.version_policy.latest.num_versions == 1
    assert list(message.dynamic_batching.preferred_batch_size) == [64]
    assert definition.serialized == message.SerializeToString(deterministic=True)


def test_a_note_says_that_the_batch_size_was_completed(read: Read, batching: Signature) -> None:
    assert complete_definition(read('backend: "onnxruntime"'), batching).notes == (
        "autofilled max_batch_size to 64 for model 'm' since batching is supported but no max_batch_size is specified"
        " in model configuration; specify max_batch_size for larger batches",
    )


@pytest.mark.parametrize(("most", "completed", "scheduler"), [(1, 1, False), (5, 5, True), (1000, 64, True)])
def test_a_model_may_take_less(read: Read, batching: Signature, most: int, completed: int, scheduler: bool) -> None:
    config = complete_definition(read('backend: "onnxruntime"'), replace(batching, max_batch_size=most)).config
    assert config.max_batch_size == completed
    assert (config.dynamic_batching is not None) == scheduler


def test_a_model_that_cannot_batch_keeps_its_shapes(read: Read, single: Signature) -> None:
    config = complete_definition(read('backend: "onnxruntime"'), single).config
    assert config.max_batch_size == 0
    assert config.inputs[0].dims == (1, 4)
    assert config.dynamic_batching is None


def test_single_values_are_reshaped_for_the_model(read: Read, single: Signature) -> None:
    definition = complete_definition(read('backend: "onnxruntime"'), single)
    assert definition.config.inputs[0].reshape is None
    assert definition.config.outputs == (OutputConfig("y", DataType.FP32, (1,), reshape=()),)
    assert not definition.message.output[0].HasField("reshape")


def test_batch_size_on_a_model_that_cannot_batch(read: Read, single: Signature) -> None:
    with pytest.raises(ServeError) as raised:
        complete_definition(read('backend: "onnxruntime" max_batch_size: 8'), single)
    assert raised.value.code is StatusCode.INVALID_ARGUMENT
    assert raised.value.text == (
        "autofill failed for model 'm': model does not support batching while non-zero max_batch_size is specified;"
        " its inputs are x [1,4]: write max_batch_size: 0, or export it with an open first dimension"
    )


def test_a_given_batch_size_is_kept(read: Read, batching: Signature) -> None:
    definition = complete_definition(read('backend: "onnxruntime" max_batch_size: 1'), batching)
    assert definition.config.max_batch_size == 1
    assert definition.config.dynamic_batching is None
    assert definition.warnings == ()
    assert complete_definition(definition, batching) == definition


def test_a_given_dynamic_batching_is_kept(read: Read, batching: Signature) -> None:
    text = 'backend: "onnxruntime" max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 5 }'
    config = complete_definition(read(text), batching).config
    assert config.dynamic_batching is not None
    assert config.dynamic_batching.max_queue_delay_microseconds == 5
    assert config.dynamic_batching.preferred_batch_sizes == (8,)


_OUTPUTS = """
output { name: "y" data_type: TYPE_STRING dims: -1 }
output { name: "z" data_type: TYPE_INT64 dims: 1 reshape { } }
"""


def test_given_outputs_stay_when_inputs_are_filled(read: Read, batching: Signature) -> None:
    text = 'backend: "onnxruntime" max_batch_size: 2 output { name: "y" data_type: TYPE_STRING dims: 7 }'
    config = complete_definition(read(text), batching).config
    assert [tensor.name for tensor in config.inputs] == ["x"]
    assert config.outputs == (OutputConfig("y", DataType.BYTES, (7,)),)


def test_nothing_is_filled_when_both_are_given(read: Read, batching: Signature) -> None:
    text = f'backend: "onnxruntime" max_batch_size: 8 input {{ name: "x" data_type: TYPE_FP32 dims: 4 }} {_OUTPUTS}'
    config = complete_definition(read(text), batching).config
    assert config.max_batch_size == 8
    assert config.dynamic_batching is None


def test_the_completed_configuration_marks_optional_inputs(read: Read, make_signature: MakeSignature) -> None:
    signature = make_signature({"x": ("FP32", (2,)), "bias": ("FP32", (2,))}, {"y": ("FP32", (2,))}, optional=("bias",))
    config = complete_definition(read('backend: "onnxruntime"'), signature).config
    assert {tensor.name: tensor.optional for tensor in config.inputs} == {"x": False, "bias": True}


def test_an_input_that_the_model_needs_may_not_be_left_out(read: Read, batching: Signature) -> None:
    """The configuration calls the input optional; requests without it failed in the engine with a KeyError."""
    text = 'backend: "onnxruntime" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: 4 optional: true }'
    definition = complete_definition(read(text), batching)
    (entry,) = definition.config.inputs
    assert not entry.optional
    # Clients see the configuration as it was written.
    assert definition.message.input[0].optional
    assert any("requests without it will fail" in warning for warning in definition.warnings)


def test_strict_fills_nothing(read: Read, batching: Signature) -> None:
    with pytest.raises(ServeError, match="configuration expects 0 inputs, model provides 1; missing: x"):
        complete_definition(read('backend: "onnxruntime"', strict=True), batching, strict=True)


def test_strict_needs_outputs(read: Read, batching: Signature) -> None:
    text = 'backend: "onnxruntime" max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: 4 }'
    with pytest.raises(ServeError, match="must specify at least one 'output'; the model provides: y, z"):
        complete_definition(read(text, strict=True), batching, strict=True)


def test_strict_accepts_what_is_complete(read: Read, batching: Signature) -> None:
    text = f'backend: "onnxruntime" max_batch_size: 2 input {{ name: "x" data_type: TYPE_FP32 dims: 4 }} {_OUTPUTS}'
    assert complete_definition(read(text, strict=True), batching, strict=True).config.max_batch_size == 2


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("", InstanceGroup("m", InstanceKind.AUTO, 1)),
        ("instance_group { }", InstanceGroup("m_0", InstanceKind.AUTO, 1)),
        ("instance_group { kind: KIND_CPU }", InstanceGroup("m_0", InstanceKind.CPU, 2)),
        ("instance_group { kind: KIND_CPU count: 1 }", InstanceGroup("m_0", InstanceKind.CPU, 1)),
        (
            'instance_group { name: "g" kind: KIND_GPU count: 3 gpus: [1, 0] }',
            InstanceGroup("g", InstanceKind.GPU, 3, (1, 0)),
        ),
    ],
)
def test_instance_groups(read: Read, groups: str, expected: InstanceGroup) -> None:
    assert read(f'backend: "onnxruntime" {groups}').config.instance_groups == (expected,)


def test_the_default_count_is_that_of_the_engine_that_is_named(tmp_path: Path) -> None:
    shares, alone = EngineSpec("shares", "s", True, True), EngineSpec("alone", "a", False, False)
    registry = BackendRegistry([BackendSpec("onnx", ("onnxruntime",), (shares, alone), ("model.onnx",))])
    models = Models(tmp_path, registry)
    for engine, count in (("", 2), ("auto", 2), ("shares", 2), ("alone", 1)):
        named = f'parameters {{ key: "engine" value {{ string_value: "{engine}" }} }}' if engine else ""
        text = f'backend: "onnxruntime" instance_group {{ kind: KIND_CPU }} {named}'
        definition = models.made(f"m{engine}", {"config.pbtxt": text, "1/model.onnx": ""})
        assert definition.config.instance_groups[0].count == count
        assert dict(definition.config.parameters) == ({"engine": engine} if engine else {})


def test_without_instances_there_is_one(models: Models) -> None:
    assert models.made("m", {"1/model.py": ""}).config.instance_groups == (InstanceGroup("m", InstanceKind.AUTO, 1),)


@pytest.fixture
def open_signature() -> Signature:
    """Of a model whose file leaves ranks open, has a size of 0, and knows an output's classes."""
    return Signature(
        (TensorSpec("x", DataType.FP32, (-1,), any_rank=True), TensorSpec("past", DataType.FP32, (1, 0, 4))),
        (TensorSpec("y", DataType.FP32, (-1, 2), labels=("no", "yes")),),
        supports_batching=False,
    )


def test_an_open_rank_is_shown_as_one_open_dimension(read: Read, open_signature: Signature) -> None:
    definition = complete_definition(read('backend: "onnxruntime"'), open_signature)
    x, past = definition.config.inputs
    assert x == InputConfig("x", DataType.FP32, (-1,), any_rank=True)
    assert past == InputConfig("past", DataType.FP32, (1, 0, 4))
    assert list(definition.message.input[0].dims) == [-1]


@pytest.mark.parametrize(("dims", "served"), [("[1, -1, 4]", True), ("[1, 2, 4]", False), ("[1, 0, 4]", False)])
def test_an_open_dimension_stands_for_a_size_of_0(
    read: Read, open_signature: Signature, dims: str, served: bool
) -> None:
    text = f"""
    backend: "onnxruntime"
    input [ {{ name: "past" data_type: TYPE_FP32 dims: {dims} }}, {{ name: "x" data_type: TYPE_FP32 dims: [2, 3] }} ]
    """
    if served:
        past, x = complete_definition(read(text), open_signature).config.inputs
        assert (past.dims, x.dims) == ((1, -1, 4), (2, 3))
        return
    with pytest.raises(ServeError, match=r"must be integer >= 1, or -1|dimension 1 is 0 in the model, 2 in the"):
        complete_definition(read(text), open_signature)


@pytest.mark.parametrize(
    ("written", "labels"),
    [
        ("", ("no", "yes")),
        ('output { name: "y" data_type: TYPE_FP32 dims: [-1, 2] label_filename: "own.txt" }', ("bad", "good")),
    ],
)
def test_the_models_classes_are_labels_unless_a_file_has_others(
    models: Models, open_signature: Signature, written: str, labels: tuple[str, ...]
) -> None:
    files = {"config.pbtxt": f'backend: "onnxruntime" {written}', "own.txt": "bad\ngood\n", "1/model.onnx": ""}
    assert complete_definition(models.made("m", files), open_signature).config.outputs[0].labels == labels


@pytest.mark.parametrize(("written", "chosen"), [("", True), ("max_batch_size: 8", False)])
def test_it_is_known_who_chose_the_batch_size(read: Read, batching: Signature, written: str, chosen: bool) -> None:
    definition = complete_definition(read(f'backend: "onnxruntime" {written}'), batching)
    assert definition.config.is_batch_size_chosen is chosen
    # For another version.
    assert complete_definition(definition, batching).config.is_batch_size_chosen is chosen


@pytest.mark.parametrize(("written", "size", "dims"), [("", 0, [-1, 4]), ("max_batch_size: 8", 8, [4])])
def test_dependent_rows_are_joined_only_as_written(
    read: Read, batching: Signature, written: str, size: int, dims: list[int]
) -> None:
    signature = replace(batching, dependent_rows="rows depend on each other: output 'y' changes by 0.3")
    definition = complete_definition(read(f'backend: "onnxruntime" {written}'), signature)
    message = definition.message
    assert message.max_batch_size == size
    assert list(message.input[0].dims) == dims
    assert message.HasField("dynamic_batching") is bool(size)
    note = (
        f"max_batch_size stays 0 for model '{message.name}', so requests run one by one: rows depend on each"
        " other: output 'y' changes by 0.3"
    )
    assert definition.notes == (() if size else (note,))


@pytest.mark.parametrize("rest", ["", 'input { name: "x" data_type: TYPE_FP32 dims: [-1, 4] }'])
def test_a_written_zero_switches_batching_off(read: Read, batching: Signature, rest: str) -> None:
    written = read(f'backend: "onnxruntime" max_batch_size: 0 {rest}')
    assert not written.config.has_open_batch
    complete = complete_definition(written, batching)
    assert complete.config.max_batch_size == 0 and not complete.message.HasField("dynamic_batching")
    assert [tensor.dims for tensor in complete.config.inputs] == [(-1, 4)]
    assert not complete.config.is_batch_size_chosen and complete.notes == ()


@pytest.mark.parametrize(("field", "size"), [('"max_batch_size": 0', 0), ('"maxBatchSize": 0', 0), ('"name": "m"', 64)])
def test_a_load_request_may_switch_batching_off(models: Models, batching: Signature, field: str, size: int) -> None:
    request = ConfigRequest(f'{{"backend": "onnxruntime", {field}}}')
    definition = models.made("m", {"config.pbtxt": "max_batch_size: 8", "1/model.onnx": ""}, request=request)
    assert complete_definition(definition, batching).config.max_batch_size == size


@pytest.mark.parametrize("written", ["", "max_batch_size: 0"])
def test_clients_and_models_see_a_size_that_nobody_wrote(read: Read, written: str) -> None:
    assert plain_values(read(f'backend: "onnxruntime" {written}').message)["max_batch_size"] == 0
