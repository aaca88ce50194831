"""Recorded answers: what a check.npz may hold, and what counts as the recorded answer."""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.load_check import RECORDED_FILE, LoadCheckFailed
from rocserve.core.model_config import (
    ControlKind,
    InputConfig,
    ModelConfig,
    OutputConfig,
    SequenceBatching,
    SequenceControl,
    with_sequence_tensors,
)
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.load_check.recorded import (
    RecordedAnswers,
    compare_recorded,
    joined,
    read_recorded,
    recorded_request,
    write_recorded,
)

ROWS = ModelConfig(
    "m",
    max_batch_size=4,
    inputs=(InputConfig("x", DataType.FP32, (2,)), InputConfig("t", DataType.BYTES, (1,), optional=True)),
    outputs=(OutputConfig("y", DataType.FP32, (2,)), OutputConfig("label", DataType.BYTES, (1,))),
)
ONE = ModelConfig("m", inputs=(InputConfig("x", DataType.FP32, (2,)),), outputs=(OutputConfig("y", DataType.FP32, ()),))


def of(datatype: DataType) -> ModelConfig:
    return ModelConfig("m", inputs=ONE.inputs, outputs=(OutputConfig("y", datatype, (-1,)),))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / RECORDED_FILE


def refusal(file: Path) -> str:
    with pytest.raises(LoadCheckFailed) as caught:
        read_recorded(file)
    assert caught.value.kind == "recorded answers"
    assert not caught.value.can_pass
    return caught.value.text


def test_what_is_written_is_read(file: Path) -> None:
    texts = np.array([["grün"], [b"\xff\xd8"]], object)
    answers = RecordedAnswers(
        {"x": np.float32([[1, 2], [3, 4]]), "a/b": texts}, {"file": np.int64([[7], [8]])}, tolerance=0.5
    )
    write_recorded(file, answers)
    found = read_recorded(file)
    assert found.inputs["x"].tolist() == [[1, 2], [3, 4]]
    assert found.inputs["a/b"].tolist() == [["grün".encode()], [b"\xff\xd8"]]
    assert found.outputs["file"].dtype == np.int64
    assert found.tolerance == 0.5
    assert [path.name for path in file.parent.iterdir()] == [RECORDED_FILE]


def test_a_text_that_the_file_cannot_hold_is_not_written(file: Path) -> None:
    with pytest.raises(ValueError, match="a text of 'x' ends with a zero character"):
        write_recorded(file, RecordedAnswers({"x": np.array([b"a\0"], object)}, {}))
    assert not list(file.parent.iterdir())


def test_files_that_hold_no_recorded_answers(file: Path) -> None:
    assert refusal(file) == "check.npz: it cannot be read: No such file or directory"
    file.write_bytes(b"PK no archive")
    assert refusal(file).startswith("check.npz: it is not an archive of numpy's arrays (numpy.savez): ")
    np.savez(file, **{"input.x": np.zeros(2)})
    assert refusal(file) == (
        "check.npz: it has no output; expected at least one array output.NAME with the recorded answer"
    )
    np.savez(file, **{"output.y": np.zeros(2), "x": np.zeros(2)})
    assert refusal(file) == "check.npz: array 'x' is unknown; expected input.NAME, output.NAME and tolerance"
    np.savez(file, **{"output.y": np.array(["text"], object)})
    assert refusal(file).endswith("it holds Python objects; write texts as arrays of str or bytes")
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("output.y", b"no array")
    assert refusal(file) == "check.npz: 'output.y' in it is not a numpy array"
    whole = io.BytesIO()
    np.savez(whole, **{"output.y": np.arange(1000.0)})
    file.write_bytes(whole.getvalue().replace(np.float64(7).tobytes(), np.float64(8).tobytes()))
    assert "Bad CRC-32" in refusal(file)


@pytest.mark.parametrize("tolerance", [-1, math.inf, math.nan, [1, 2], "0.1"])
def test_a_tolerance_is_one_number(file: Path, tolerance: Any) -> None:
    np.savez(file, **{"output.y": np.zeros(2), "tolerance": tolerance})
    assert refusal(file) == "check.npz: 'tolerance' must be one number, 0 or more"


def test_a_file_that_would_unpack_to_too_much_is_not_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocserve.load_check.recorded._MOST_BYTES", 1000)
    np.savez_compressed(file, **{"output.y": np.zeros(1000)})
    assert "1 arrays of 8128 bytes, at most 16384 of 1000 are possible" in refusal(file)


def request_refusal(config: ModelConfig, inputs: dict[str, Any], outputs: dict[str, Any]) -> str:
    with pytest.raises(LoadCheckFailed) as caught:
        recorded_request(RecordedAnswers(inputs, outputs), config)
    return caught.value.text


def test_a_recorded_request_is_one_of_a_client() -> None:
    answers = RecordedAnswers(
        {"x": np.float32([[1, 2], [3, 4]]), "t": np.array([["a"], ["bc"]])}, {"y": np.float32([[0, 0], [0, 0]])}
    )
    request = recorded_request(answers, ROWS)
    assert [(entry.name, entry.shape) for entry in request.plan.inputs] == [("x", (2, 2)), ("t", (2, 1))]
    assert request.data[1] == b"\1\0\0\0a\2\0\0\0bc"
    assert request.plan.outputs == ("y",)
    assert request.plan.batch_size == 2


X, Y = np.float32([[1, 2]]), np.float32([[1, 2]])


@pytest.mark.parametrize(
    ("inputs", "outputs", "text"),
    [
        ({"x": X, "z": X}, {"y": Y}, "unexpected inference input 'z' for model 'm'; its inputs are: t, x"),
        ({"x": X}, {"z": Y}, "unexpected inference output 'z' for model 'm'; its outputs are: label, y"),
        ({}, {"y": Y}, "missing required input(s) ['x']"),
        (
            {"x": np.zeros((1, 3), np.float32)},
            {"y": Y},
            "unexpected shape for input 'x' for model 'm'. Expected [-1,2]",
        ),
        ({"x": np.zeros((5, 2), np.float32)}, {"y": Y}, "batch-size must be <= 4 for 'm'"),
        ({"x": np.zeros((1, 2))}, {"y": Y}, "array 'input.x' has the dtype float64, expected float32 for FP32"),
        ({"x": X}, {"y": np.zeros((1, 2))}, "array 'output.y' has the dtype float64, expected float32 for FP32"),
        ({"x": X}, {"label": Y}, "array 'output.label' has the dtype float32, expected str or bytes for BYTES"),
        ({"x": X, "t": X}, {"y": Y}, "array 'input.t' has the dtype float32, expected str or bytes for BYTES"),
    ],
)
def test_a_recorded_request_that_does_not_fit(inputs: dict[str, Any], outputs: dict[str, Any], text: str) -> None:
    found = request_refusal(ROWS, inputs, outputs)
    assert found.startswith("check.npz: ")
    assert text in found


def test_bfloat16_is_recorded_by_its_bits_or_as_floats() -> None:
    config = ModelConfig(
        "m", inputs=(InputConfig("x", DataType.BF16, (3,)),), outputs=(OutputConfig("y", DataType.BF16, (3,)),)
    )
    values = np.float32([1.0, -2.5, 3.0078125])
    bits = np.uint16([0x3F80, 0xC020, 0x4040])
    for inputs in (values, bits):
        request = recorded_request(RecordedAnswers({"x": inputs}, {"y": values}), config)
        assert bytes(request.data[0]) == np.uint16([0x3F80, 0xC020, 0x4040]).tobytes()
    given = Tensor("y", DataType.BF16, (3,), bits.tobytes())
    found = compare_recorded(RecordedAnswers({}, {"y": values}), {"y": given}, config)
    assert found == "recorded answers agree, largest difference 0.0026"


def test_controls_of_sequences_are_zeros_unless_recorded() -> None:
    start = SequenceControl("START", ControlKind.START, DataType.INT32)
    config = with_sequence_tensors(
        ModelConfig(
            "m",
            max_batch_size=4,
            inputs=(InputConfig("x", DataType.FP32, (2,)),),
            outputs=(OutputConfig("y", DataType.FP32, (2,)),),
            sequence_batching=SequenceBatching(controls=(start,)),
        )
    )
    rows = np.zeros((2, 2), np.float32)
    request = recorded_request(RecordedAnswers({"x": rows}, {"y": rows}), config)
    assert [(entry.name, entry.shape) for entry in request.plan.inputs] == [("x", (2, 2)), ("START", (2, 1))]
    assert request.data[1] == bytes(8)
    recorded = {"x": rows, "START": np.int32([[1], [0]])}
    request = recorded_request(RecordedAnswers(recorded, {"y": rows}), config)
    assert bytes(request.data[1]) == np.int32([1, 0]).tobytes()


def found(config: ModelConfig, recorded: Any, given: Any, tolerance: float | None = None) -> str:
    """What is found, or the fault without its beginning."""
    try:
        return compare_recorded(RecordedAnswers({}, {"y": recorded}, tolerance), {"y": given}, config)
    except LoadCheckFailed as failure:
        return failure.text.removeprefix("it does not answer as check.npz says: ")


FLOATS = np.float32([1, 2, 4])


@pytest.mark.parametrize(
    ("datatype", "near", "far"),
    [(DataType.FP32, 4.002, 4.02), (DataType.FP64, 4.002, 4.02), (DataType.FP16, 4.04, 4.2)],
)
def test_engines_may_differ_as_the_precision_allows(datatype: DataType, near: float, far: float) -> None:
    dtype = datatype.numpy_dtype
    recorded = FLOATS.astype(dtype)
    assert found(of(datatype), recorded, recorded) == "recorded answers are equal"
    agrees = found(of(datatype), recorded, np.array([1, 2, near], dtype))
    assert agrees.startswith("recorded answers agree, largest difference ")
    differs = found(of(datatype), recorded, np.array([1, 2, far], dtype))
    assert differs.startswith("output 'y' differs by ")
    assert f"at [2] the model gives {dtype.type(far):.7g}, recorded is 4" in differs


def test_a_recorded_tolerance_replaces_the_datatypes() -> None:
    given = np.float32([1, 2, 4.4])
    assert found(of(DataType.FP32), FLOATS, given, 0.1) == "recorded answers agree, largest difference 0.091"
    assert found(of(DataType.FP32), FLOATS, given, 0.05) == (
        "output 'y' differs by 0.091 of its largest value, the tolerance is 0.05: at [2] the model gives 4.4, recorded"
        " is 4"
    )
    levels = np.uint8([100, 200])
    assert found(of(DataType.UINT8), levels, np.uint8([101, 200]), 0.01).startswith("recorded answers agree")


def test_whole_numbers_must_be_equal() -> None:
    assert found(of(DataType.INT64), np.int64([1, 10**6]), np.int64([1, 10**6 + 1])) == (
        "output 'y' differs by 1e-06 of its largest value, the tolerance is 0: at [1] the model gives 1000001, recorded"
        " is 1000000"
    )


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ([1, math.nan, 4], "at [1] the model gives nan, recorded is 2"),
        ([math.inf, 2, 4], "at [0] the model gives inf, recorded is 1"),
        ([1, 2, 4, 5], "has the shape [4], recorded is [3]"),
    ],
)
def test_no_tolerance_covers_a_missing_number(given: list[float], place: str) -> None:
    assert place in found(of(DataType.FP32), FLOATS, np.float32(given), 1e9)


def test_numbers_that_are_recorded_as_missing() -> None:
    assert found(of(DataType.FP32), np.float32([math.nan, -math.inf]), np.float32([math.nan, -math.inf])) == (
        "recorded answers are equal"
    )


def test_another_dtype_is_another_answer() -> None:
    assert found(of(DataType.FP32), FLOATS, FLOATS.astype(np.float64)) == (
        "output 'y' has the dtype float64, recorded is float32"
    )


@pytest.mark.parametrize("recorded", [np.array(["cat", "grün"]), np.array([b"cat", "grün".encode()])])
def test_texts_must_be_equal(recorded: Any) -> None:
    config = of(DataType.BYTES)
    assert found(config, recorded, np.array(["cat", "grün"], object)) == "recorded answers are equal"
    assert found(config, recorded, np.array([b"cat", "grün".encode()], object)) == "recorded answers are equal"
    assert found(config, recorded, tensor_from_numpy("y", np.array(["cat", "grün"], object))) == (
        "recorded answers are equal"
    )
    assert found(config, recorded, np.array([b"cat", b"dog"], object)) == (
        "output 'y' differs: at [1] the model gives 'dog', recorded is 'grün'"
    )


def test_sizes_of_1_that_the_model_drops_are_clients_sizes() -> None:
    assert found(ONE, np.float32([3]), np.float32(3)) == "recorded answers are equal"


def test_reshaped_outputs_are_recorded_as_clients_get_them() -> None:
    output = OutputConfig("y", DataType.FP32, (2, 2), reshape=(4,))
    config = ModelConfig("m", max_batch_size=2, inputs=ONE.inputs, outputs=(output,))
    assert found(config, np.float32([[[1, 2], [3, 4]]]), np.float32([[1, 2, 3, 4]])) == "recorded answers are equal"


def test_inputs_may_be_recorded_as_the_model_sees_them() -> None:
    entry = InputConfig("x", DataType.FP32, (1,), reshape=())
    config = ModelConfig("m", max_batch_size=4, inputs=(entry,), outputs=ROWS.outputs)
    for given in (np.float32([1, 2]), np.float32([[1], [2]])):
        request = recorded_request(RecordedAnswers({"x": given}, {"y": np.zeros((2, 2), np.float32)}), config)
        assert request.head.inputs[0].shape == (2, 1)
        assert request.plan.inputs[0].shape == (2,)


def test_an_output_that_the_model_does_not_give() -> None:
    with pytest.raises(LoadCheckFailed, match=r"the model gives no output 'y', which check\.npz has recorded"):
        compare_recorded(RecordedAnswers({}, {"y": FLOATS}), {}, of(DataType.FP32))


def test_responses_of_a_decoupled_model_are_joined() -> None:
    parts = [tensor_from_numpy("y", np.float32([1, 2])), tensor_from_numpy("y", np.float32([3]))]
    assert joined([[part] for part in parts])["y"].tolist() == [1, 2, 3]
    odd = tensor_from_numpy("y", np.zeros((1, 2), np.float32))
    with pytest.raises(LoadCheckFailed, match=r"parts of output 'y' cannot be joined: \[2\], \[1, 2\]"):
        joined([[parts[0]], [odd]])
