"""The onnx backend on ONNX Runtime's CPU provider; test_onnx_installed_providers.py tests the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from support.encoders import encoder
from support.load_check import model as onnx_model
from support.models import add_sub, graph, identity
from support.waiting import wait_until

from rocserve.backends.base import Batch, BatchResult, LoadedModel, ModelSource, model_executions, model_properties
from rocserve.backends.onnx import backend
from rocserve.backends.onnx.opener import session_options
from rocserve.backends.onnx.providers import ProviderPlan
from rocserve.backends.onnx.runs import InPlaceRun
from rocserve.backends.parameters import usable_cpus
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, InstanceKind, ModelConfig, OutputConfig
from rocserve.core.requests import TensorSpec
from rocserve.core.tensors import Tensor, tensor_from_numpy

SourceMaker = Callable[..., ModelSource]

FLOAT = TensorProto.FLOAT


def load(source: ModelSource) -> LoadedModel:
    return backend.load(
        replace(source, config=replace(source.config, parameters={"engine": "cpu", **source.config.parameters}))
    )


def batch_of(*wanted: str, **inputs: np.ndarray[Any, Any]) -> Batch:
    tensors = {name: tensor_from_numpy(name, array) for name, array in inputs.items()}
    return Batch(tensors, wanted, (next(iter(inputs.values())).shape[0],))


def run_one(model: LoadedModel, name: str, array: np.ndarray[Any, Any]) -> Any:
    return model.execute(batch_of("OUTPUT0", **{name: array})).outputs["OUTPUT0"]


def test_add_sub(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", add_sub()))
    inputs, outputs = (
        tuple(TensorSpec(name, DataType.INT32, (-1, 16)) for name in names)
        for names in (("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1"))
    )
    assert model.signature.inputs == inputs
    assert model.signature.outputs == outputs
    assert model.signature.supports_batching
    left = np.arange(48, dtype=np.int32).reshape(3, 16)
    right = left[::-1].copy()
    outputs = model.execute(batch_of("OUTPUT1", "OUTPUT0", INPUT0=left, INPUT1=right)).outputs
    np.testing.assert_array_equal(outputs["OUTPUT0"], left + right)
    np.testing.assert_array_equal(outputs["OUTPUT1"], left - right)
    assert set(model.execute(batch_of("OUTPUT1", INPUT0=left, INPUT1=right)).outputs) == {"OUTPUT1"}


def test_on_a_gpu_there_is_a_session_for_each_size_and_two_batches_are_under_way(
    model_source: SourceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The CPU provider in the place of a GPU's.
    monkeypatch.setattr(ProviderPlan, "on_gpu", True)
    source = model_source("model.onnx", add_sub())
    model = load(replace(source, config=replace(source.config, max_batch_size=4)))
    model.warm_up([])
    assert model_properties(model)["batch_sizes"] == "1, 2, 4"
    rows = np.arange(48, dtype=np.int32).reshape(3, 16)
    one, other = model_executions(model)
    for turn in range(20):
        one.start(batch_of("OUTPUT0", INPUT0=rows, INPUT1=rows + turn))
        other.start(batch_of("OUTPUT0", INPUT0=rows, INPUT1=rows[:, : turn % 16]))
        wait_until(lambda: one.is_done)
        np.testing.assert_array_equal(one.result().outputs["OUTPUT0"], 2 * rows + turn)
        with pytest.raises(ServeError) as raised:
            other.result()
        assert raised.value.code is StatusCode.INVALID_ARGUMENT
        assert other.is_done
    model.close()


def test_on_a_gpu_a_model_with_other_open_dimensions_has_one_session(
    model_source: SourceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProviderPlan, "on_gpu", True)
    source = model_source("model.onnx", identity(FLOAT, ["rows", "columns"]))
    model = load(replace(source, config=replace(source.config, max_batch_size=4)))
    assert "batch_sizes" not in model_properties(model)
    rows = np.arange(12, dtype=np.float32).reshape(3, 4)
    np.testing.assert_array_equal(run_one(model, "INPUT0", rows), rows)
    model.close()


def test_a_batch_of_1_in_the_file_is_run_row_by_row_where_the_configuration_batches(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", identity(FLOAT, [1, 3]))
    assert load(source).signature.inputs == (TensorSpec("INPUT0", DataType.FP32, (1, 3)),)
    model = load(replace(source, config=replace(source.config, max_batch_size=4)))
    assert model.signature.inputs == (TensorSpec("INPUT0", DataType.FP32, (-1, 3)),)
    assert model.signature.supports_batching
    rows = np.arange(12, dtype=np.float32).reshape(4, 3)
    np.testing.assert_array_equal(run_one(model, "INPUT0", rows), rows)
    model.close()


@pytest.mark.parametrize(
    ("element_type", "datatype"),
    [
        (TensorProto.BOOL, DataType.BOOL),
        (TensorProto.UINT8, DataType.UINT8),
        (TensorProto.UINT16, DataType.UINT16),
        (TensorProto.UINT32, DataType.UINT32),
        (TensorProto.UINT64, DataType.UINT64),
        (TensorProto.INT8, DataType.INT8),
        (TensorProto.INT16, DataType.INT16),
        (TensorProto.INT32, DataType.INT32),
        (TensorProto.INT64, DataType.INT64),
        (TensorProto.FLOAT16, DataType.FP16),
        (TensorProto.BFLOAT16, DataType.BF16),
        (TensorProto.FLOAT, DataType.FP32),
        (TensorProto.DOUBLE, DataType.FP64),
    ],
)
def test_every_datatype_goes_through(model_source: SourceMaker, element_type: int, datatype: DataType) -> None:
    model = load(model_source("model.onnx", identity(element_type, ["batch", 3])))
    assert model.signature.outputs == (TensorSpec("OUTPUT0", datatype, (-1, 3)),)
    assert model.signature.outputs[0].dimension_names == ("batch", "")
    array = np.array([[0, 1, 1], [1, 0, 1]]).astype(datatype.numpy_dtype)
    for rows in (array, array[:0]):
        given = Tensor("INPUT0", datatype, rows.shape, rows.tobytes())
        result = model.execute(Batch({"INPUT0": given}, ("OUTPUT0",), (len(rows),))).outputs["OUTPUT0"]
        tensor = result if isinstance(result, Tensor) else tensor_from_numpy("OUTPUT0", result)
        assert (tensor.datatype, tensor.shape) == (datatype, rows.shape)
        np.testing.assert_array_equal(tensor.numpy(), rows)


def test_memory_that_is_read_only_and_not_aligned(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", identity(FLOAT, ["batch", 2])))
    array = np.array([[1.5, -2.5]], np.float32)
    data = memoryview(b"x" + array.tobytes())[1:]
    result = model.execute(Batch({"INPUT0": Tensor("INPUT0", DataType.FP32, (1, 2), data)}, ("OUTPUT0",), (1,)))
    np.testing.assert_array_equal(result.outputs["OUTPUT0"], array)


LARGE = 100_000
"""So many elements that writing them in place is faster than copying them."""


def batch_with_room(rows: int, wanted: Sequence[str], room: dict[str, Any], **inputs: np.ndarray[Any, Any]) -> Batch:
    batch = batch_of(*wanted, **inputs)
    return replace(batch, request_sizes=(rows,), room=room)


def test_large_outputs_are_written_where_there_is_room(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", add_sub(LARGE), max_batch_size=8))
    left = np.arange(3 * LARGE, dtype=np.int32).reshape(3, LARGE)
    left.flags.writeable = False
    right = left[::-1].copy()
    room = {name: np.zeros((3, LARGE), np.int32) for name in ("OUTPUT0", "OUTPUT1")}
    batch = batch_with_room(3, ("OUTPUT1", "OUTPUT0"), room, INPUT0=left, INPUT1=right)
    outputs = model.execute(batch).outputs
    assert list(outputs) == ["OUTPUT1", "OUTPUT0"]
    assert all(outputs[name] is room[name] for name in room)
    np.testing.assert_array_equal(room["OUTPUT0"], left + right)
    np.testing.assert_array_equal(room["OUTPUT1"], left - right)


@pytest.mark.parametrize(("length", "room"), [(16, (3, 16)), (LARGE, None), (LARGE, (3, 1))])
def test_outputs_that_are_small_or_without_room_have_memory_of_their_own(
    model_source: SourceMaker, length: int, room: tuple[int, ...] | None
) -> None:
    model = load(model_source("model.onnx", identity(FLOAT, ["batch", length]), max_batch_size=8))
    array = np.ones((3, length), np.float32)
    given = {} if room is None else {"OUTPUT0": np.zeros(room, np.float32)}
    output = model.execute(batch_with_room(3, ("OUTPUT0",), given, INPUT0=array)).outputs["OUTPUT0"]
    assert output is not given.get("OUTPUT0")
    np.testing.assert_array_equal(output, array)


@pytest.mark.parametrize("wording", [LARGE, "length"])
def test_a_large_output_of_another_shape_than_its_room(
    model_source: SourceMaker, monkeypatch: pytest.MonkeyPatch, wording: int | str
) -> None:
    in_place = InPlaceRun.__call__
    tried: list[Batch] = []

    def count(run: InPlaceRun, batch: Batch, inputs: Mapping[str, np.ndarray[Any, Any]]) -> Any:
        tried.append(batch)
        return in_place(run, batch, inputs)

    monkeypatch.setattr(InPlaceRun, "__call__", count)
    node = helper.make_node("Slice", ["X", "FROM", "TO"], ["Y"])
    number = (TensorProto.INT64, [1])
    content = graph([node], {"X": (FLOAT, [LARGE]), "FROM": number, "TO": number}, {"Y": (FLOAT, [wording])})
    model = load(model_source("model.onnx", content))
    x = np.arange(LARGE, dtype=np.float32)
    for end in (LARGE, 5, 5, LARGE):
        room = {"Y": np.zeros(LARGE, np.float32)}
        batch = batch_with_room(1, ("Y",), room, X=x, FROM=np.array([0]), TO=np.array([end]))
        np.testing.assert_array_equal(model.execute(batch).outputs["Y"], x[:end])
    assert len(tried) == 2, "once it is known, no batch is run twice"


def test_an_output_whose_size_its_input_decides_is_written_where_there_is_room(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", identity(FLOAT, ["batch", "length"]), max_batch_size=8))
    for length in (LARGE, 2 * LARGE):
        array, room = np.ones((1, length), np.float32), {"OUTPUT0": np.zeros((1, length), np.float32)}
        output = model.execute(batch_with_room(1, ("OUTPUT0",), room, INPUT0=array)).outputs["OUTPUT0"]
        assert output is room["OUTPUT0"]
        np.testing.assert_array_equal(output, array)


def test_the_error_of_the_engine_is_the_same_on_each_path(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", identity(FLOAT, ["batch", LARGE]), max_batch_size=8))
    room = {"OUTPUT0": np.zeros((1, LARGE), np.float32)}
    texts = []
    for given in (room, {}):
        with pytest.raises(ServeError) as caught:
            model.execute(batch_with_room(1, ("OUTPUT0",), given, INPUT0=np.ones((1, LARGE + 1), np.float32)))
        texts.append(caught.value.text)
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    "element",
    [
        b"",
        b"\xff\xfe",
        b"gr\xfcn",
        b"\x00\x80\x00",
        bytes(range(256)),
        "\udcff".encode(errors="surrogatepass"),
        # The character that stands in for a byte is itself sent, alone and next to such a byte.
        "\U0010f7ff".encode(),
        "a\U0010f780".encode() + b"\x80",
        "\U0010f800 \U0010f77f grün 漢字".encode(),
    ],
)
def test_bytes_that_are_no_text_come_back_byte_for_byte(model_source: SourceMaker, element: bytes) -> None:
    model = load(model_source("model.onnx", identity(TensorProto.STRING, ["batch", 2])))
    result = run_one(model, "INPUT0", np.array([[element, b"good"]], dtype=object))
    assert tensor_from_numpy("OUTPUT0", result).numpy().tolist() == [[element, b"good"]]


@pytest.mark.parametrize(
    ("shape", "declared", "expected", "batching"),
    [
        (["batch", 4], (4,), (-1, 4), True),
        ([None, "length"], (4,), (-1, -1), True),
        ([4, "length"], (4,), (4, -1), False),
        ([], (), (), False),
    ],
)
def test_dimensions(
    model_source: SourceMaker, shape: list[Any], declared: tuple[int, ...], expected: tuple[int, ...], batching: bool
) -> None:
    signature = load(model_source("model.onnx", identity(FLOAT, shape))).signature
    assert signature.inputs[0].shape == expected
    assert signature.supports_batching is batching


def test_an_output_without_a_shape_takes_the_declared_one(model_source: SourceMaker) -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("Identity", ["X"], ["Y"])],
            "graph",
            [helper.make_tensor_value_info("X", FLOAT, None)],
            [helper.make_tensor_value_info("Y", FLOAT, None)],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    ).SerializeToString()
    signature = load(
        model_source(
            "model.onnx",
            model,
            inputs=[InputConfig("X", DataType.FP32, (-1, 2))],
            outputs=[OutputConfig("Y", DataType.FP32, (-1, 2))],
        )
    ).signature
    assert (signature.inputs[0].shape, signature.outputs[0].shape) == ((-1, 2), (-1, 2))


def test_fp8_has_no_name_in_the_protocol(model_source: SourceMaker) -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT8E4M3FN, ["batch", 2]) for name in ("X", "Y"))
    fp8 = helper.make_graph([helper.make_node("Identity", ["X"], ["Y"])], "graph", [x], [y])
    model = helper.make_model(fp8, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    with pytest.raises(
        ServeError, match=r"input 'X' has ONNX type tensor\(float8e4m3fn\), which the KServe protocol does not have"
    ):
        load(model_source("model.onnx", model.SerializeToString()))


def test_sequences_are_refused(model_source: SourceMaker) -> None:
    value = helper.make_tensor_value_info("X", FLOAT, ["batch"])
    sequence = helper.make_tensor_sequence_value_info("Y", FLOAT, None)
    model = helper.make_model(
        helper.make_graph([helper.make_node("SequenceConstruct", ["X"], ["Y"])], "graph", [value], [sequence]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    with pytest.raises(ServeError, match=r"output 'Y' has ONNX type seq\(tensor\(float\)\), but only dense tensors"):
        load(model_source("model.onnx", model.SerializeToString()))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "model.onnx is empty; expected an ONNX model, copy it again"),
        (
            b"version https://git-lfs.github.com/spec/v1\n",
            "it is a git-LFS pointer, not the file itself; `git lfs pull`",
        ),
        (b"PK\x03\x04", "it is a zip archive, as PyTorch's files are; export the model with torch.onnx.export"),
        (b"\n<!DOCTYPE html>", "it is a web page, as a failed download leaves one; download it again"),
        (b"not a model at all", "ONNX Runtime cannot load model.onnx: .*Protobuf parsing failed"),
        (add_sub()[:-40], f"it looks cut short, at {len(add_sub()) - 40} bytes; copy it again"),
    ],
)
def test_the_error_of_a_broken_file_has_the_engines_text(model_source: SourceMaker, content: bytes, text: str) -> None:
    with pytest.raises(ServeError, match=text):
        load(model_source("model.onnx", content))


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("opset", r"; this ONNX Runtime reads opset <= (\d+): export again with opset_version=\1$"),
        ("ir", r"; this ONNX Runtime reads IR version <= (\d+): export again with an older onnx package, or set ir_v"),
    ],
)
def test_a_model_that_is_too_new(model_source: SourceMaker, field: str, text: str) -> None:
    model = onnx.load_from_string(add_sub())
    if field == "opset":
        model.opset_import[0].version = 1000
    else:
        model.ir_version = 1000
    with pytest.raises(ServeError, match=text):
        load(model_source("model.onnx", model.SerializeToString()))


def test_the_locale_that_a_model_of_texts_needs(model_source: SourceMaker) -> None:
    texts = [helper.make_tensor_value_info(name, TensorProto.STRING, ["n"]) for name in ("x", "y")]
    node = helper.make_node("StringNormalizer", ["x"], ["y"], case_change_action="LOWER", locale="tlh_KX.UTF-8")
    graph = helper.make_graph([node], "texts", texts[:1], texts[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    advice = (
        "lacks the locale tlh_KX.UTF-8, .*localedef --inputfile=tlh_KX --charmap=UTF-8 tlh_KX.UTF-8 .*-langpack-tlh"
    )
    with pytest.raises(ServeError, match=advice):
        load(model_source("model.onnx", model.SerializeToString()))


def test_an_operator_that_the_engine_lacks(model_source: SourceMaker) -> None:
    model = helper.make_model(
        helper.make_graph(
            [helper.make_node("MyFancyOp", ["X"], ["Y"])],
            "graph",
            [helper.make_tensor_value_info("X", FLOAT, [1])],
            [helper.make_tensor_value_info("Y", FLOAT, [1])],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    with pytest.raises(ServeError, match=r"cannot load model.onnx: .*MyFancyOp"):
        load(model_source("model.onnx", model.SerializeToString()))


def test_a_missing_file(model_source: SourceMaker) -> None:
    source = model_source("model.onnx", add_sub())
    with pytest.raises(ServeError, match=r"other.onnx does not exist or is not a file"):
        load(replace(source, model_file=source.version_folder / "other.onnx"))


def test_inputs_that_the_model_refuses(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", add_sub()))
    good = np.zeros((1, 16), np.int32)
    for bad in (np.zeros((1, 15), np.int32), np.zeros((1, 16), np.int64)):
        with pytest.raises(ServeError, match="onnx runtime error: ") as caught:
            model.execute(batch_of("OUTPUT0", INPUT0=good, INPUT1=bad))
        assert caught.value.code is StatusCode.INVALID_ARGUMENT
    with pytest.raises(ServeError, match=r"onnx runtime error: .*2 by 3") as caught:
        model.execute(batch_of("OUTPUT0", INPUT0=np.zeros((2, 16), np.int32), INPUT1=np.zeros((3, 16), np.int32)))
    assert caught.value.code is StatusCode.INTERNAL
    np.testing.assert_array_equal(model.execute(batch_of("OUTPUT0", INPUT0=good, INPUT1=good)).outputs["OUTPUT0"], good)


def test_threads_share_one_session(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", add_sub(), instance_count=4))

    def ask(number: int) -> bool:
        left = np.full((1 + number % 3, 16), number, np.int32)
        outputs = model.execute(batch_of("OUTPUT0", "OUTPUT1", INPUT0=left, INPUT1=left)).outputs
        return bool(np.all(outputs["OUTPUT0"] == 2 * number) and not np.any(outputs["OUTPUT1"]))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(ask, range(400)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"parameters": {"engine": "tensorrt"}}, "'engine' .* must be one of .*onnxruntime"),
        ({"kind": InstanceKind.GPU, "parameters": {"engine": "cpu"}}, "asks for KIND_GPU"),
        ({"parameters": {"intra_op_thread_count": "many"}}, "'intra_op_thread_count' .* whole number from 0 to 1024"),
        ({"parameters": {"inter_op_thread_count": "-1"}}, "'inter_op_thread_count' .* whole number from 0 to 1024"),
        ({"parameters": {"graph_optimization_level": "99"}}, "'graph_optimization_level' .* must be one of disable"),
    ],
)
def test_parameters_that_cannot_be_followed(model_source: SourceMaker, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ServeError, match=text) as caught:
        load(model_source("model.onnx", add_sub(), **options))
    assert caught.value.code is StatusCode.INVALID_ARGUMENT


def test_session_options_follow_the_parameters() -> None:
    defaults = session_options(ModelConfig("m"), instance_count=1)
    assert defaults.intra_op_num_threads == usable_cpus()
    assert defaults.get_session_config_entry("session.force_spinning_stop") == "1"
    zeros = {"intra_op_thread_count": "0", "inter_op_thread_count": "0"}
    left_to_us = session_options(ModelConfig("m", parameters=zeros), instance_count=1)
    assert (left_to_us.intra_op_num_threads, left_to_us.inter_op_num_threads) == (usable_cpus(), 1)
    several = session_options(ModelConfig("m"), instance_count=2)
    assert several.intra_op_num_threads == max(1, usable_cpus() - 1)
    assert session_options(ModelConfig("m"), instance_count=usable_cpus() + 1).intra_op_num_threads == 1
    chosen = session_options(
        ModelConfig(
            "m",
            parameters={
                "intra_op_thread_count": "3",
                "inter_op_thread_count": "2",
                "graph_optimization_level": "basic",
                "enable_mem_arena": "0",
                "enable_mem_pattern": "0",
                "session.force_spinning_stop": "0",
                "session.intra_op.allow_spinning": "0",
                "something_of_the_users_own": "ignored",
            },
        ),
        instance_count=1,
    )
    assert (chosen.intra_op_num_threads, chosen.inter_op_num_threads) == (3, 2)
    assert chosen.execution_mode.name == "ORT_PARALLEL"
    assert chosen.graph_optimization_level.name == "ORT_ENABLE_BASIC"
    assert not chosen.enable_cpu_mem_arena
    assert not chosen.enable_mem_pattern
    assert chosen.get_session_config_entry("session.force_spinning_stop") == "0"
    assert chosen.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_without_optimisations_two_draws_of_one_tensor_stay_two(model_source: SourceMaker) -> None:
    """ONNX Runtime 1.32.0 merges such nodes, because its list of random operators lacks Bernoulli."""
    spec = (FLOAT, ["batch", 1000])
    draws = [helper.make_node("Bernoulli", ["X"], [name]) for name in ("first", "second")]
    content = graph([*draws, helper.make_node("Sub", ["first", "second"], ["OUTPUT0"])], {"X": spec}, {"OUTPUT0": spec})
    source = model_source("model.onnx", content, parameters={"graph_optimization_level": "disable"})
    assert run_one(load(source), "X", np.full((1, 1000), 0.5, np.float32)).any()


def square_of_four() -> bytes:
    """Y = matmul(X, constant 4 x 4), X FP32 [batch, length]: it works for a length of 4 only."""
    weights = helper.make_tensor("weights", FLOAT, [4, 4], np.eye(4, dtype=np.float32).tobytes(), raw=True)
    constant = helper.make_node("Constant", [], ["W"], value=weights)
    return graph(
        [constant, helper.make_node("MatMul", ["X", "W"], ["Y"])],
        {"X": (FLOAT, ["batch", "length"])},
        {"Y": (FLOAT, ["batch", 4])},
    )


def test_an_automatic_warm_up_that_does_not_suit_the_model_is_no_fault(model_source: SourceMaker) -> None:
    model = load(model_source("model.onnx", square_of_four()))
    model.warm_up([])
    bad = batch_of("Y", X=np.zeros((1, 3), np.float32))
    with pytest.raises(ServeError):
        model.warm_up([bad])
    model.warm_up([batch_of("Y", X=np.zeros((1, 4), np.float32))])


@pytest.mark.parametrize("size", [1 << 42, 1 << 62])
def test_an_input_that_no_memory_holds_is_no_fault_of_the_load(
    model_source: SourceMaker, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    caplog.set_level("DEBUG")
    load(model_source("model.onnx", identity(TensorProto.FLOAT, ["batch", size]))).warm_up([])
    assert "does not fit into memory" in caplog.text and f"of shape [1, {size}]" in caplog.text


def test_an_automatic_warm_up_takes_declared_dims(model_source: SourceMaker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    inputs = [InputConfig("X", DataType.FP32, (4,))]
    outputs = [OutputConfig("Y", DataType.FP32, (4,))]
    load(model_source("model.onnx", square_of_four())).warm_up([])
    assert "warm-up with zeros failed" in caplog.text
    caplog.clear()
    load(model_source("model.onnx", square_of_four(), inputs=inputs, outputs=outputs, max_batch_size=2)).warm_up([])
    assert not caplog.text


def test_parameters_that_are_migraphx_s_are_said_to_do_nothing(
    model_source: SourceMaker, caplog: pytest.LogCaptureFixture
) -> None:
    source = model_source("model.onnx", square_of_four())
    for parameters, what in (
        ({"precision": "fp16"}, "parameter 'precision' has"),
        ({"precision": "FP32", "fast_math": "0", "batch_sizes": "1"}, "parameters 'batch_sizes', 'fast_math' have"),
    ):
        caplog.clear()
        load(replace(source, config=replace(source.config, parameters=parameters)))
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.message.endswith(f": {what} no effect with ONNX Runtime, only with MIGraphX")


def test_strings_are_warmed_up(model_source: SourceMaker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    load(model_source("model.onnx", identity(TensorProto.STRING, ["batch", 2]))).warm_up([])
    assert not caplog.text


def test_the_memory_of_a_batch_is_measured_at_the_largest_sizes(
    model_source: SourceMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes: list[tuple[int, ...]] = []
    execute = backend.OnnxModel.execute

    def noting(model: backend.OnnxModel, batch: Batch) -> BatchResult:
        shapes.append(batch.inputs["input_ids"].shape)
        return execute(model, batch)

    monkeypatch.setattr(backend.OnnxModel, "execute", noting)
    sizes = {"sizes": "sequence=8,32"}
    model = load(model_source("model.onnx", encoder().SerializeToString(), parameters=sizes))
    assert shapes[:2] == [(1, 32), (2, 32)]
    assert model.signature.padding.properties == {"sizes": "sequence=8,32"}
    shapes.clear()
    model.warm_up([])
    assert shapes == [(1, 8)]


def test_outputs_that_follow_a_dimension_are_found_whatever_they_are_called(model_source: SourceMaker) -> None:
    text = """g (float[batch, n] x) => (float[batch, other] doubled, float[a, b] same, float[batch, n] sum) {
        doubled = Add(x, x) same = Identity(x) sum = ReduceSum<keepdims = 1>(x, one) }"""
    content = onnx_model(text, one=np.array([1])).SerializeToString()
    model = load(model_source("model.onnx", content, parameters={"sizes": "n=4,8"}))
    (found,) = model.signature.padding.dimensions
    assert (found.inputs, found.outputs) == ({"x": (1,)}, {"doubled": (1,), "same": (1,)})


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("y = Concat<axis = 1>(x, x)", "output 'y' has the shape [2, 8] for the size 4 and [2, 16] for 8"),
        ("y = Slice(x, one, end, one)", "output 'y' has the shape [2, 3] for the size 4 and [2, 7] for 8"),
        ("y = Reshape(x, flat)", "output 'y' has the shape [8] for the size 4 and [16] for 8"),
    ],
)
def test_what_cannot_be_cut_back_is_not_padded(model_source: SourceMaker, body: str, text: str) -> None:
    weights = {"one": np.array([1]), "end": np.array([1 << 30]), "flat": np.array([-1])}
    content = onnx_model(f"g (float[batch, n] x) => (float[a, b] y) {{ {body} }}", **weights)
    content.graph.output[0].type.tensor_type.ClearField("shape")
    config = {
        "inputs": (InputConfig("x", DataType.FP32, (-1,)),),
        "outputs": (OutputConfig("y", DataType.FP32, (-1,)),),
    }
    parameters = {"sizes": "n=4,8"}
    source = model_source("model.onnx", content.SerializeToString(), parameters=parameters, max_batch_size=4, **config)
    with pytest.raises(ServeError, match="cannot pad dimension 'n'") as refused:
        load(source)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT and text in refused.value.text


FROM_3 = onnx_model(
    "g (int64[batch, n] x) => (float[batch, n] y) { ids = Sub(x, first) y = Gather(table, ids) }",
    first=np.array([30]),
    table=np.arange(8, dtype=np.float32),
).SerializeToString()
"""Takes 22 to 37 only."""


def test_a_model_of_which_no_inputs_are_found_is_not_padded(model_source: SourceMaker) -> None:
    with pytest.raises(ServeError) as refused:
        load(model_source("model.onnx", FROM_3, parameters={"sizes": "n=4,8"}))
    assert refused.value.code is StatusCode.INVALID_ARGUMENT
    text = (
        "parameter 'sizes' of model 'model' needs a run that shows which outputs are cut back, and the model takes"
        " neither zeros with dimension 'n' of 4 (onnx runtime error: "
    )
    assert refused.value.text.startswith(text)
    assert "; give a warm-up sample (model_warmup)" in refused.value.text
