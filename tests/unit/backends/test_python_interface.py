"""The names of Triton's Python interface, one by one."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import wait_until

from rocserve.backends.python.pb_utils import make_module
from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.backends.python.pb_utils.metrics import ModelMetrics
from rocserve.backends.python.pb_utils.tensor import wrap_tensor
from rocserve.backends.request_model import ModelCall
from rocserve.core.custom_metrics import CustomMetrics, MetricChange, MetricChanges, MetricKind
from rocserve.core.datatypes import DataType
from rocserve.core.plain import from_json, to_json
from rocserve.core.tensors import Tensor
from rocserve.workers.messages import LONGEST_FRAME, encode_message

NAMES = [
    "Tensor",
    "InferenceRequest",
    "InferenceResponse",
    "TritonError",
    "TritonModelException",
    "Logger",
    "PreferredMemory",
    "MetricFamily",
    "ModelConfig",
    "InferenceTrace",
    "load_model",
    "unload_model",
    "is_model_ready",
    "get_model_dir",
    "serialize_byte_tensor",
    "deserialize_bytes_tensor",
    "get_input_tensor_by_name",
    "get_output_tensor_by_name",
    "get_input_config_by_name",
    "get_output_config_by_name",
    "using_decoupled_model_transaction_policy",
    "triton_to_numpy_type",
    "numpy_to_triton_type",
    "triton_string_to_numpy",
    "TRITON_STRING_TO_NUMPY",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_MEMORY_CPU",
]


@pytest.fixture
def sent() -> list[MetricChange]:
    """Changes of metrics that were sent."""
    return []


@pytest.fixture
def book(sent: list[MetricChange]) -> ModelMetrics:
    """A metrics book that reports when the test asks for it."""
    return ModelMetrics(lambda changes: sent.extend(changes.changes), gather_seconds=3600)


@pytest.fixture
def pb_utils(tmp_path: Path, book: ModelMetrics) -> Any:
    return make_module(tmp_path, Caller(), book)


def test_all_names_are_there(pb_utils: Any, tmp_path: Path) -> None:
    assert [name for name in NAMES if not hasattr(pb_utils, name)] == []
    assert pb_utils.get_model_dir() == str(tmp_path)
    flags = (pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START, pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert (flags, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL) == ((1, 2), 1)


# Tensors

TYPES = [
    ("BOOL", np.bool_, 1),
    ("UINT8", np.uint8, 2),
    ("UINT16", np.uint16, 3),
    ("UINT32", np.uint32, 4),
    ("UINT64", np.uint64, 5),
    ("INT8", np.int8, 6),
    ("INT16", np.int16, 7),
    ("INT32", np.int32, 8),
    ("INT64", np.int64, 9),
    ("FP16", np.float16, 10),
    ("FP32", np.float32, 11),
    ("FP64", np.float64, 12),
]


@pytest.mark.parametrize(("name", "numpy_type", "number"), TYPES)
def test_a_tensor_of_each_datatype(pb_utils: Any, name: str, numpy_type: Any, number: int) -> None:
    array = np.array([[0, 1, 1]], numpy_type)
    tensor = pb_utils.Tensor("T", array)
    assert (tensor.name(), tensor.shape(), tensor.triton_dtype(), tensor.is_cpu()) == ("T", [1, 3], number, True)
    assert tensor.as_numpy() is array
    sent = tensor._tensor
    assert (sent.datatype, sent.shape, bytes(sent.data)) == (DataType(name), (1, 3), array.tobytes())
    assert pb_utils.triton_string_to_numpy(f"TYPE_{name}")(1) == numpy_type(1)
    assert pb_utils.triton_to_numpy_type(number) is numpy_type
    assert pb_utils.numpy_to_triton_type(numpy_type) == pb_utils.numpy_to_triton_type(array.dtype) == number
    assert tensor.__dlpack_device__() == (1, 0)
    shared = np.from_dlpack(tensor)
    assert np.shares_memory(shared, array)
    for source in (array, tensor.to_dlpack(), tensor):
        again = pb_utils.Tensor.from_dlpack("A", source)
        assert (again.name(), again.triton_dtype()) == ("A", number)
        assert np.shares_memory(again.as_numpy(), array)


def test_texts(pb_utils: Any) -> None:
    array = np.array([[b"\x00\xff", "grüße"], [7, b""]], dtype=object)
    tensor = pb_utils.Tensor("T", array)
    array[0, 0] = b"changed afterwards"
    sent = tensor._tensor
    assert (sent.datatype, sent.shape) == (DataType.BYTES, (2, 2))
    assert sent.numpy().tolist() == [[b"\x00\xff", "grüße".encode()], [b"7", b""]]
    assert tensor.triton_dtype() == 13
    assert pb_utils.Tensor("S", np.array([b"ab", b"c"]))._tensor.numpy().tolist() == [b"ab", b"c"]
    with pytest.raises(pb_utils.TritonModelException, match="DLPack does not have support for string tensors"):
        tensor.to_dlpack()
    with pytest.raises(pb_utils.TritonModelException, match=r"NumPy dtype is not supported.*use dtype object"):
        pb_utils.Tensor("U", np.array(["ab"]))
    received = wrap_tensor(sent)
    assert received.as_numpy().tolist() == sent.numpy().tolist()
    assert bytes(received._tensor.data) == sent.data


def test_serialised_bytes(pb_utils: Any) -> None:
    encoded = pb_utils.serialize_byte_tensor(np.array([[b"one", "zwö"]], dtype=object))
    assert encoded == b"\x03\0\0\0one\x04\0\0\0zw\xc3\xb6"
    assert pb_utils.deserialize_bytes_tensor(encoded).tolist() == [b"one", "zwö".encode()]
    assert pb_utils.serialize_byte_tensor(np.array([], dtype=object)) == ()
    assert pb_utils.serialize_byte_tensor(np.zeros(2)) is None


def test_inputs_may_be_changed_in_place(pb_utils: Any) -> None:
    for data in (bytes(8), bytearray(8)):
        tensor = wrap_tensor(Tensor("X", DataType.FP32, (2,), data))
        values = tensor.as_numpy()
        values += 1
        assert tensor.as_numpy().tolist() == [1, 1]
        assert tensor._tensor.numpy().tolist() == [1, 1]


def test_arrays_of_any_layout(pb_utils: Any) -> None:
    square = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert pb_utils.Tensor("T", square.T)._tensor.numpy().tolist() == square.T.tolist()
    assert pb_utils.Tensor("E", np.zeros((0, 3)))._tensor.shape == (0, 3)
    assert pb_utils.Tensor("S", np.array(4.0))._tensor.shape == ()
    unaligned = np.frombuffer(bytes(range(9)), np.int32, 2, offset=1)
    for array in (square, np.zeros((0, 3)), np.array(4.0), np.ones((2, 1), np.float16), np.ones(3, bool), unaligned):
        sent = pb_utils.Tensor("A", array)._tensor
        assert (len(sent.data), bytes(sent.data)) == (array.nbytes, array.tobytes())
    for array in (
        np.ma.masked_array(square),
        np.ma.masked_array(square.T),
        np.ma.masked_array(4.0),
        square.view(np.matrix),
    ):
        assert pb_utils.Tensor("K", array)._tensor.numpy().tolist() == np.asarray(array).tolist()
    fixed = np.arange(3)
    fixed.setflags(write=False)
    assert np.from_dlpack(pb_utils.Tensor("F", fixed)).tolist() == [0, 1, 2]
    with pytest.raises(pb_utils.TritonModelException, match="Only contiguous DLPack tensors"):
        pb_utils.Tensor.from_dlpack("T", square.T)


def test_bfloat16_only_by_dlpack(pb_utils: Any) -> None:
    bits = np.array([0x3F80, 0xC000], np.uint16).tobytes()
    tensor = wrap_tensor(Tensor("B", DataType.BF16, (2,), bits))
    with pytest.raises(pb_utils.TritonModelException, match="Use to_dlpack"):
        tensor.as_numpy()
    again = pb_utils.Tensor.from_dlpack("C", tensor.to_dlpack())
    del tensor
    assert again.triton_dtype() == 14
    assert again._tensor == Tensor("C", DataType.BF16, (2,), again._tensor.data)
    assert bytes(again._tensor.data) == bits


class OnDevice:
    """A tensor on a GPU, as a framework has it."""

    def __init__(self, has_cpu: bool) -> None:
        if has_cpu:
            self.cpu = lambda: np.arange(3)

    def __dlpack__(self, stream: object = None) -> object:
        raise AssertionError("its memory cannot be read here")

    def __dlpack_device__(self) -> tuple[int, int]:
        return 10, 0


@pytest.mark.parametrize("imported", ["numpy", "torch"])
def test_what_lies_elsewhere_is_copied_or_refused(
    pb_utils: Any, imported: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip(imported)
    if imported == "torch":
        monkeypatch.setattr(module.cuda, "is_available", lambda: False)
    assert pb_utils.Tensor.from_dlpack("D", OnDevice(True)).as_numpy().tolist() == [0, 1, 2]
    with pytest.raises(pb_utils.TritonModelException, match=r"DLDevice type 10 is not supported.*copy it to the CPU"):
        pb_utils.Tensor.from_dlpack("D", OnDevice(False))
    with pytest.raises(pb_utils.TritonModelException, match="Tensor must be a DLPack capsule or have"):
        pb_utils.Tensor.from_dlpack("D", [1, 2])
    capsule = np.arange(3).__dlpack__()
    np_owner = pb_utils.Tensor.from_dlpack("D", capsule)
    with pytest.raises(pb_utils.TritonModelException, match="was used before"):
        pb_utils.Tensor.from_dlpack("D", capsule)
    assert np_owner.as_numpy().tolist() == [0, 1, 2]


def test_what_is_no_tensor(pb_utils: Any) -> None:
    with pytest.raises(pb_utils.TritonModelException, match="Tensor name cannot be an empty string"):
        pb_utils.Tensor("", np.zeros(1))
    with pytest.raises(TypeError, match="must be made from a numpy array, got list"):
        pb_utils.Tensor("T", [1])
    with pytest.raises(pb_utils.TritonModelException, match="NumPy dtype is not supported"):
        pb_utils.Tensor("T", np.zeros(1, complex))


# Requests, responses, errors


def test_a_request_for_a_call(pb_utils: Any) -> None:
    tensor = pb_utils.Tensor("X", np.zeros(1))
    request = pb_utils.InferenceRequest(
        model_name="m", requested_output_names=["A", "B"], inputs=[tensor], parameters={"k": "v"}, timeout=7
    )
    assert pb_utils.get_input_tensor_by_name(request, "X") is tensor
    assert pb_utils.get_input_tensor_by_name(request, "Y") is None
    assert (request.requested_output_names(), json.loads(request.parameters())) == ({"A", "B"}, {"k": "v"})
    assert (request.request_id(), request.correlation_id(), request.timeout()) == ("", 0, 7)
    request.set_flags(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END)
    assert (request.flags(), request.trace().get_context(), request.is_cancelled()) == (2, None, False)
    with pytest.raises(pb_utils.TritonModelException, match="Unable to send response"):
        request.get_response_sender()
    once = pb_utils.InferenceRequest(
        model_name="m", requested_output_names=map(str, ["A"]), inputs=(one for one in [tensor])
    )
    assert (once.inputs(), once.requested_output_names()) == ([tensor], {"A"})
    numbers = dict.fromkeys(("correlation_id", "timeout", "flags", "model_version"), True)
    counted = pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[], **numbers)
    counted.set_flags(True)
    # The server could not read a call with a True in it, and killed the process.
    assert from_json(ModelCall, to_json(counted._call())) == counted._call()
    with pytest.raises(TypeError, match="needs inputs, requested_output_names and model_name"):
        pb_utils.InferenceRequest(model_name="m", inputs=[])
    for wrong, message in (
        ({"correlation_id": 1.5}, "Correlation ID must be integer or string"),
        ({"inputs": [None]}, "Input tensor for request with id '' and model name 'm' should not be empty."),
        ({"requested_output_names": [""]}, "Requested output name for request with id ''"),
        ({"parameters": {1: "v"}}, "Expect parameters keys to have type str"),
    ):
        options = {"model_name": "m", "requested_output_names": [], "inputs": [], **wrong}
        with pytest.raises(pb_utils.TritonModelException, match=message):
            pb_utils.InferenceRequest(**options)


def test_names_may_be_bytes_as_they_come_from_tensors(pb_utils: Any) -> None:
    tensor = pb_utils.Tensor(b"X", np.zeros(1))
    request = pb_utils.InferenceRequest(
        model_name=b"m",
        requested_output_names=[b"A", "A"],
        inputs=[tensor],
        request_id="zwölf".encode(),
        model_version=np.int64(3),
    )
    assert (tensor.name(), request.model_name(), request.request_id()) == ("X", "m", "zwölf")
    assert request.requested_output_names() == {"A"}
    assert pb_utils.TritonError(b"no").message() == "no"
    for action in (lambda: pb_utils.TritonError(ValueError("no")), lambda: pb_utils.Tensor(3, np.zeros(1))):
        with pytest.raises(TypeError, match="must be a str"):
            action()


def test_a_response(pb_utils: Any) -> None:
    tensor = pb_utils.Tensor("Y", np.zeros(1))
    response = pb_utils.InferenceResponse([tensor], parameters={"n": 1})
    assert pb_utils.get_output_tensor_by_name(response, "Y") is tensor
    assert pb_utils.get_output_tensor_by_name(response, "Z") is None
    assert (response.has_error(), response.error(), response.parameters()) == (False, None, '{"n":1}')
    failed = pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError("no"))
    assert failed.has_error()
    assert (failed.error().message(), failed.error().code()) == ("no", pb_utils.TritonError.INTERNAL)


# Configuration


@pytest.fixture
def config(pb_utils: Any) -> Any:
    ragged = {"name": "R", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": True}
    plain = {"name": "X", "data_type": "TYPE_FP32", "dims": [3]}
    text = {"name": "m", "max_batch_size": 4, "input": [plain, ragged]}
    return pb_utils.ModelConfig(json.dumps(text))


def test_completing_a_configuration(pb_utils: Any, config: Any) -> None:
    config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [3], "optional": True})
    config.add_input({"name": "R", "data_type": "TYPE_FP32", "dims": [-1]})
    config.add_input({"name": "W", "data_type": "TYPE_INT8", "dims": [1], "allow_ragged_batch": True})
    config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [-1]})
    config.set_max_batch_size(8)
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    fields = config.as_dict()
    assert [tensor["name"] for tensor in fields["input"]] == ["X", "R", "W"]
    assert [tensor.get("allow_ragged_batch", False) for tensor in fields["input"]] == [False, True, True]
    assert pb_utils.get_input_config_by_name(fields, "X")["optional"] is True
    assert pb_utils.get_output_config_by_name(fields, "Y")["dims"] == [-1]
    assert pb_utils.get_output_config_by_name(fields, "none") is None
    assert (fields["max_batch_size"], fields["dynamic_batching"]) == (8, {})
    assert pb_utils.using_decoupled_model_transaction_policy(fields)


@pytest.mark.parametrize(
    ("method", "argument", "message"),
    [
        ("set_max_batch_size", 2, "configuration specified max_batch_size 4, but in auto-complete-config function"),
        ("add_input", {"name": "X", "data_type": "TYPE_INT8", "dims": [3]}, "configuration expects datatype TYPE_FP32"),
        ("add_input", {"name": "X", "data_type": "TYPE_FP32", "dims": [4]}, r"specifies dims \[3\]"),
        ("add_input", {"name": "X", "data_type": "TYPE_FP32"}, "is missing 'dims' property"),
        ("add_input", {"data_type": "TYPE_FP32"}, "is missing 'name' property"),
        ("add_output", {"name": "Y", "data_type": "TYPE_FP32", "dims": [1], "optional": True}, "contains property"),
        (
            "add_input",
            {"name": "R", "data_type": "TYPE_FP32", "dims": [-1], "allow_ragged_batch": False},
            "the model expects allow_ragged_batch False but the model configuration specifies allow_ragged_batch True",
        ),
        (
            "add_input",
            {"name": "W", "data_type": "TYPE_FP32", "dims": [1], "reshape": {}},
            "property other than 'name', 'data_type', 'dims', 'optional' and 'allow_ragged_batch'",
        ),
        ("add_output", {"name": "Y", "dims": [1]}, "is missing 'data_type' property"),
        ("set_model_transaction_policy", {"coupled": True}, "contains property other than 'decoupled'"),
    ],
)
def test_what_a_model_may_not_complete(config: Any, method: str, argument: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(config, method)(argument)


def test_a_configured_scheduler_and_policy_stand(pb_utils: Any) -> None:
    text = {"name": "m", "sequence_batching": {}, "model_transaction_policy": {"decoupled": True}}
    config = pb_utils.ModelConfig(json.dumps(text))
    with pytest.raises(ValueError, match="scheduling_choice as 'sequence_batching'"):
        config.set_dynamic_batching()
    with pytest.raises(ValueError, match="already set to 'True'"):
        config.set_model_transaction_policy({"decoupled": False})


# The log, metrics, control


def test_the_log(pb_utils: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    logger = pb_utils.Logger
    logger.log(b"100 %s")
    logger.log("careful", logger.WARNING)
    logger.log_info("i")
    logger.log_warn("w")
    logger.log_error("e")
    logger.log_verbose("v")
    logger.log("named", logger.LogLevel.ERROR)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "100 %s"),
        ("WARNING", "careful"),
        ("INFO", "i"),
        ("WARNING", "w"),
        ("ERROR", "e"),
        ("DEBUG", "v"),
        ("ERROR", "named"),
    ]


def test_metrics_are_counted_and_sent(pb_utils: Any, book: ModelMetrics, sent: list[MetricChange]) -> None:
    family = pb_utils.MetricFamily
    counts = family(name="seen", description="requests", kind=family.COUNTER)
    metric = counts.Metric(labels={"model": "m"})
    metric.increment(2)
    counts.Metric(labels={"model": "m"}).increment(1)
    assert (metric.value(), counts.Metric(labels={"model": "n"}).value()) == (3, 0)
    level = family("level", "", family.GAUGE).Metric()
    level.set(5)
    level.increment(-1)
    assert level.value() == 4
    latency = family("latency", "", family.HISTOGRAM).Metric(buckets=[0.1, 1])
    latency.observe(0.5)
    latency.observe(1)
    latency.observe(7)
    book.send()
    assert sent == [
        MetricChange("seen", MetricKind.COUNTER, "requests", {"model": "m"}, 3.0),
        MetricChange("seen", MetricKind.COUNTER, "requests", {"model": "n"}, 0.0),
        MetricChange("level", MetricKind.GAUGE, "", {}, 4.0, True),
        MetricChange("latency", MetricKind.HISTOGRAM, "", {}, 8.5, False, (0.1, 1.0), (0, 2, 1)),
    ]
    sent.clear()
    level.increment(3)
    metric.increment(0.5)
    book.send()
    assert sent == [
        MetricChange("seen", MetricKind.COUNTER, "requests", {"model": "m"}, 0.5),
        MetricChange("level", MetricKind.GAUGE, "", {}, 3.0),
    ]
    sent.clear()
    book.send()
    assert not sent


def test_numbers_of_numpy_are_counted_as_numbers(pb_utils: Any, book: ModelMetrics, sent: list[MetricChange]) -> None:
    """A message cannot hold numpy's numbers, and numpy's 32-bit sums are not exact."""
    family = pb_utils.MetricFamily
    seen, level = family("seen", "", family.COUNTER).Metric(), family("level", "", family.GAUGE).Metric()
    latency = family("latency", "", family.HISTOGRAM).Metric(buckets=[1])
    seen.increment(np.float32(0.5))
    level.increment(np.int64(2))
    latency.observe(np.float32(0.25))
    assert [type(metric.value()) for metric in (seen, level)] == [float, float]
    book.send()
    assert from_json(MetricChanges, to_json(MetricChanges(tuple(sent)))).changes == tuple(sent)
    assert [change.value for change in sent] == [0.5, 2, 0.25]


def test_many_changes_of_metrics_go_in_messages_that_the_server_reads(tmp_path: Path) -> None:
    messages: list[MetricChanges] = []
    book = ModelMetrics(messages.append, gather_seconds=3600)
    family = make_module(tmp_path, Caller(), book).MetricFamily
    for number in range(3000):
        family("asked", "d" * 1000, family.COUNTER).Metric({"number": str(number), "text": "t" * 5000}).increment(1)
    book.send()
    assert max(len(encode_message(message)) for message in messages) < LONGEST_FRAME
    numbers = [change.labels["number"] for message in messages for change in message.changes]
    assert numbers == [str(number) for number in range(3000)]
    metrics, owner = CustomMetrics(), object()
    assert "more than 1024 characters" in metrics.apply(owner, messages[0])["asked"]


def test_changes_of_metrics_are_sent_by_themselves(sent: list[MetricChange], tmp_path: Path) -> None:
    book = ModelMetrics(lambda changes: sent.extend(changes.changes), gather_seconds=0.01)
    family = make_module(tmp_path, Caller(), book).MetricFamily
    metric = family("seen", "", family.COUNTER).Metric()
    wait_until(lambda: sent)
    sent.clear()
    metric.increment(1)
    wait_until(lambda: sent)
    assert [change.value for change in sent] == [1.0]


def test_wrong_uses_of_metrics(pb_utils: Any) -> None:
    family = pb_utils.MetricFamily
    counts = family("seen", "", family.COUNTER)
    metric, level = counts.Metric(), family("level", "", family.GAUGE).Metric()
    latency = family("latency", "", family.HISTOGRAM)
    for action, message in (
        (lambda: metric.increment(-1), "monotonically"),
        (lambda: metric.set(1), "COUNTER does not support Set"),
        (lambda: level.observe(1), "GAUGE does not support Observe"),
        (latency.Metric(buckets=[1]).value, "HISTOGRAM does not support Value"),
        (lambda: latency.Metric(buckets=[1]).increment(1), "HISTOGRAM does not support Increment"),
        (lambda: counts.Metric(buckets=[1]), "Unexpected buckets found"),
        (latency.Metric, "Missing required buckets"),
        (lambda: latency.Metric(buckets=[2, 1]), "Bucket Boundaries must be strictly sorted"),
        (lambda: latency.Metric(buckets=(1, 2)), "Buckets must be a list"),
        (lambda: counts.Metric(labels=["m"]), "Labels must be a dictionary"),
        (lambda: counts.Metric(labels={"no label": "m"}), "Invalid label name"),
        (lambda: family("no name", "", family.GAUGE), "Invalid metric name"),
        (lambda: family("seen", "", family.GAUGE), "Family name already exists with different type"),
        (lambda: family("nv_inference_count", "", family.COUNTER), "is reserved for the server"),
    ):
        with pytest.raises(pb_utils.TritonModelException, match=message):
            action()
    with pytest.raises(TypeError, match="the description of a MetricFamily must be a str, got NoneType"):
        family("said", None, family.GAUGE)


def test_models_cannot_control_the_server(pb_utils: Any) -> None:
    for action in (pb_utils.load_model, pb_utils.unload_model, pb_utils.is_model_ready):
        with pytest.raises(pb_utils.TritonModelException, match="other: models cannot control the server's models"):
            action("other")
