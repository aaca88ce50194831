"""What `sequence_batching` may say, and the resulting configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.config.completion import autofill, normalise
from rocserve.config.model_folder import ModelFolder, read_initial_states
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.plain import to_plain
from rocserve.config.signature_checks import check_signature
from rocserve.config.validation import check_readable
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import with_sequence_tensors
from rocserve.core.requests import Signature, TensorSpec
from rocserve.protocol.model_config_pb2 import ModelConfig

START = "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }"
STATE = "state { input_name: 'SI' output_name: 'SO' data_type: TYPE_FP32 dims: [-1, 2] %s }"


def config(batching: str, more: str = "") -> ModelConfig:
    return parse_model_config(
        f"name: 'm' backend: 'onnx' max_batch_size: 4 {more} sequence_batching {{ {batching} }}", "config.pbtxt"
    )


@pytest.mark.parametrize(
    ("batching", "text"),
    [
        ("control_input { }", "sequence batching control tensor must have a name for m"),
        (f"{START} {START}", "sequence batching control tensor 'S' is specified for multiple control kinds for m"),
        (
            START + START.replace("'S'", "'T'"),
            "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m",
        ),
        (
            "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_END } }",
            "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for"
            " CONTROL_SEQUENCE_END for m",
        ),
        (
            "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1]"
            " fp32_false_true: [0, 1] } }",
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and"
            " 'bool_false_true' for CONTROL_SEQUENCE_READY for m",
        ),
        (
            "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_START fp32_false_true: [0, 1, 2] } }",
            "sequence batching control 'fp32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m",
        ),
        (
            "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_CORRID bool_false_true: [false, true] } }",
            "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for"
            " CONTROL_SEQUENCE_CORRID for m",
        ),
        (
            "control_input { name: 'S' control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_FP32 } }",
            "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64,"
            " TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
        ),
        ("oldest { preferred_batch_size: 0 }", "sequence batching preferred batch size must be positive for m"),
        (
            "oldest { preferred_batch_size: 5 }",
            "sequence batching preferred batch size must be <= max batch size for m",
        ),
        (
            "direct { minimum_slot_utilization: 1.5 }",
            "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m",
        ),
        (
            STATE % "initial_state { } initial_state { }",
            "initial_state field for state input 'SI' must contain exactly one or zero element. Found '2' elements.",
        ),
        (
            STATE % "initial_state { name: 'i' data_type: TYPE_FP32 dims: [2] zero_data: true }",
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input 'SI'."
            " 1 != 2",
        ),
        (
            STATE % "initial_state { name: 'i' data_type: TYPE_INT32 dims: [2, 2] zero_data: true }",
            "The data type used for 'initial_state' field of state 'SI' does not match the state data type.",
        ),
        (
            STATE % "initial_state { data_type: TYPE_FP32 dims: [2, 2] zero_data: true }",
            "Field 'name' must be set when using initial_state for state input 'SI'.",
        ),
        (
            STATE % "initial_state { name: 'i' data_type: TYPE_FP32 dims: [-1, 2] zero_data: true }",
            "'initial_state' field for state input name 'SI' contains variable dimensions.",
        ),
        (
            STATE % "initial_state { name: 'i' data_type: TYPE_FP32 dims: [2, 3] zero_data: true }",
            "'initial_state' dim for input name 'SI' doesn't match 'state' dim description. 3 != 2",
        ),
        (
            STATE % "initial_state { name: 'i' data_type: TYPE_FP32 dims: [2, 2] }",
            "initial_state setting expects state'SI' to have state_data set",
        ),
        (STATE % "" + STATE % "", "State input name 'SI' specified more than once."),
        (
            "state { input_name: 'SI' data_type: TYPE_FP32 }",
            "sequence batching state must specify 'input_name' and 'output_name' for m, got 'SI' and ''",
        ),
        ("state { input_name: 'a' output_name: 'b' }", "sequence batching state 'a' must specify 'data_type' for m"),
    ],
)
def test_faults_have_tritons_error_texts(batching: str, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        check_readable(config(batching))
    assert (caught.value.code, caught.value.text) == (StatusCode.INVALID_ARGUMENT, text)


def test_controls_and_states_are_no_inputs() -> None:
    for name, what in (("S", "an input and a sequence batching control"), ("SI", "an input and a state input")):
        message = config(START + STATE % "", f"input {{ name: '{name}' data_type: TYPE_FP32 dims: [1] }}")
        with pytest.raises(ServeError, match=f"tensor '{name}' is {what} for m; the server adds controls"):
            check_readable(message)


def test_defaults_are_written() -> None:
    message = config("oldest { }")
    normalise(message, None)
    assert message.sequence_batching.max_sequence_idle_microseconds == 1_000_000
    assert list(message.sequence_batching.oldest.preferred_batch_size) == [4]


def spec(name: str, *shape: int, datatype: DataType = DataType.FP32) -> TensorSpec:
    return TensorSpec(name, datatype, (-1, *shape))


def signature(*more: TensorSpec) -> Signature:
    inputs = (spec("X", 3), spec("SI", -1, 2), *more)
    return Signature(inputs, (spec("Y", 3), spec("SO", -1, 2)), True)


def test_completion_leaves_out_what_the_server_gives() -> None:
    message = config(START + STATE % "")
    autofill(message, signature(spec("S", 1, datatype=DataType.INT32)), 4)
    assert [tensor.name for tensor in message.input] == ["X"]
    assert [tensor.name for tensor in message.output] == ["Y"]
    assert not message.HasField("dynamic_batching")
    assert check_signature(message, signature(spec("S", 1, datatype=DataType.INT32))) == ()
    seen = with_sequence_tensors(to_plain(message, "onnx", {}))
    assert [(entry.name, entry.datatype, entry.dims) for entry in seen.inputs] == [
        ("X", DataType.FP32, (3,)),
        ("S", DataType.INT32, (1,)),
        ("SI", DataType.FP32, (-1, 2)),
    ]
    assert [entry.name for entry in seen.outputs] == ["Y", "SO"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ((), "configuration expects 3 inputs, model provides 2"),
        ((spec("T", 1),), "configuration specified sequence control 'S', but model does not provide that input"),
        ((spec("S", 2),), "sequence control 'S' in model has dims [2] but dims [1] is expected"),
        (
            (spec("S", 1),),
            "sequence control 'S', the model expects data-type FP32 but the model configuration specifies data-type"
            " TYPE_INT32",
        ),
    ],
)
def test_the_model_must_have_its_controls(more: tuple[TensorSpec, ...], text: str) -> None:
    message = config(START + STATE % "")
    autofill(message, signature(), 4)
    with pytest.raises(ServeError) as caught:
        check_signature(message, signature(*more))
    assert text in caught.value.text


def test_the_model_must_have_its_states() -> None:
    message = config("state { input_name: 'SI' output_name: 'SO' data_type: TYPE_INT32 dims: [-1, 2] }")
    autofill(message, signature(), 4)
    with pytest.raises(ServeError, match="configuration expects datatype TYPE_INT32 for input 'SI'"):
        check_signature(message, signature())


def test_initial_states_are_read_from_their_folder(tmp_path: Path) -> None:
    initial = "initial_state { name: 'i' data_type: TYPE_FP32 dims: [1, 2] data_file: '%s' }"
    (tmp_path / "initial_state").mkdir()
    (tmp_path / "initial_state" / "good").write_bytes(bytes(range(12)))
    (tmp_path / "initial_state" / "short").write_bytes(bytes(7))

    def read(file: str) -> object:
        message = config(STATE % (initial % file))
        return read_initial_states(to_plain(message, "onnx", {}), ModelFolder(tmp_path))

    assert read("good") == {"SI": bytes(range(8))}
    with pytest.raises(ServeError, match="expects 8 bytes, but the data provided from shortonly has 7 bytes"):
        read("short")
    with pytest.raises(ServeError, match="the file 'none' of initial state 'i' cannot be read in the model's folder"):
        read("none")
    with pytest.raises(ServeError, match="must be a path within the folder initial_state"):
        read("../config.pbtxt")
