"""Checks that docs/reference/model-configuration.md says for every field what the server does with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocserve.backends.registry import discover_backends
from rocserve.config.definition import FolderReading
from rocserve.core.errors import ServeError, StatusCode
from rocserve.protocol.model_config_pb2 import ModelConfig

PAGE = Path(__file__).parents[3] / "docs/reference/model-configuration.md"
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: 1 } output { name: "y" data_type: TYPE_FP32 dims: 1 }'


REFUSALS = (
    ("input.is_shape_tensor", "onnx", TENSORS.replace("dims: 1 }", "dims: 1 is_shape_tensor: true }", 1), "shape"),
    (
        "input.is_non_linear_format_io",
        "onnx",
        TENSORS.replace("dims: 1 }", "dims: 1 is_non_linear_format_io: true }", 1),
        "Non-linear IO format is only supported for the TensorRT platform",
    ),
    (
        "output.is_shape_tensor",
        "onnx",
        'output { name: "y" data_type: TYPE_FP32 dims: 1 is_shape_tensor: true }',
        "shape tensors are only supported for TensorRT platform",
    ),
    (
        "output.is_non_linear_format_io",
        "onnx",
        'output { name: "y" data_type: TYPE_FP32 dims: 1 is_non_linear_format_io: true }',
        "Non-linear IO format is only supported for the TensorRT platform",
    ),
    (
        "input.allow_ragged_batch",
        "migraphx",
        TENSORS.replace("dims: 1 }", "dims: 1 allow_ragged_batch: true }", 1),
        "allow_ragged_batch of input 'x' is not supported",
    ),
    (
        "batch_input",
        "rocal",
        TENSORS + 'batch_input { target_name: "n" data_type: TYPE_INT32 source_input: "x" }',
        "batch_input is not supported",
    ),
    (
        "model_operations",
        "tensorflow",
        'model_operations { op_library_filename: "a.so" }',
        "model_operations.op_library_filename is not supported",
    ),
    (
        "model_transaction_policy",
        "onnx",
        "model_transaction_policy { decoupled: true }",
        "model_transaction_policy.decoupled is not supported",
    ),
    (
        "model_repository_agents",
        "onnx",
        'model_repository_agents { agents { name: "unpack" } }',
        "for repo agent 'unpack'",
    ),
)
"""By a field's path: a backend, a configuration that uses the field, and the refusal."""


def fields(descriptor: Any, prefix: str = "") -> Iterator[str]:
    """The paths of all fields; a map is one field, with the fields of its values under it."""
    for field in descriptor.fields:
        yield prefix + field.name
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            message = message.fields_by_name["value"].message_type
        if message is not None:
            yield from fields(message, f"{prefix}{field.name}.")


def documented() -> dict[str, str]:
    """By the field's path, what the table says of it: its row, else the row of the longest `x.*` that holds it."""
    section = PAGE.read_text().partition("\n## Fields\n")[2].partition("\n## ")[0]
    rows: dict[str, str] = {}
    messages: dict[str, str] = {}
    for line in section.splitlines():
        if not line.startswith("| `"):
            continue
        names, effect = line.strip("| ").split(" | ", 1)
        first, *others = re.findall(r"`([\w.*]+)`", names)
        for name in (first, *others):
            path = first + name if name.startswith(".") else name
            kept = messages if path.endswith(".*") else rows
            path = path.removesuffix(".*")
            assert path not in kept, f"{path} stands twice"
            kept[path] = effect
    for message in sorted(messages, key=len, reverse=True):
        held = [path for path in fields(ModelConfig.DESCRIPTOR) if f"{path}.".startswith(f"{message}.")]
        assert held, f"{message} is not a field"
        for path in held:
            rows.setdefault(path, messages[message])
    return rows


def test_the_table_has_every_field_and_no_other() -> None:
    assert set(documented()) == set(fields(ModelConfig.DESCRIPTOR))


@pytest.mark.parametrize(("path", "backend", "text", "fault"), REFUSALS)
def test_what_the_table_calls_refused_is_refused(
    path: str, backend: str, text: str, fault: str, tmp_path: Path
) -> None:
    assert "refused" in documented()[path]
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'backend: "{backend}" max_batch_size: 2 {text}')
    with pytest.raises(ServeError) as raised:
        FolderReading(folder, discover_backends()).definitions()
    assert raised.value.code in (StatusCode.INVALID_ARGUMENT, StatusCode.UNIMPLEMENTED)
    assert fault in raised.value.text


def test_every_refusal_of_the_table_is_tested() -> None:
    tested = {path for path, *_ in REFUSALS}
    refused = {path for path, effect in documented().items() if "refused" in effect}
    # test_backend_choice.py tests other servers' platforms.
    assert {path if path in tested else path.split(".")[0] for path in refused} - {"platform", "backend"} == tested
