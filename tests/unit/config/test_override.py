"""What load requests may set: every field of ModelConfig has a rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import json_format

from rocserve.backends.registry import discover_backends
from rocserve.config import request_rules
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.request_rules import RULES, ConfigRequest, RequestRefused
from rocserve.config.sources import parse_override
from rocserve.core.errors import ServeError, StatusCode
from rocserve.protocol.model_config_pb2 import ModelConfig


def test_both_spellings_of_names_and_numbers() -> None:
    message = parse_override(
        json.dumps(
            {
                "backend": "onnxruntime",
                "maxBatchSize": 4,
                "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": ["-1", 3]}],
                "version_policy": {"specific": {"versions": ["2"]}},
                "parameters": {"k": {"string_value": "v"}},
            }
        )
    )
    assert message.max_batch_size == 4
    assert list(message.input[0].dims) == [-1, 3]
    assert list(message.version_policy.specific.versions) == [2]


def test_what_the_server_prints_can_be_sent_back() -> None:
    message = parse_model_config('name: "m" max_batch_size: 2 dynamic_batching { }', "config.pbtxt")
    assert parse_override(json_format.MessageToJson(message)) == message


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "{",
            "Invalid config override: not JSON: Expecting property name enclosed in double quotes at line 1 column 2",
        ),
        ("[1]", "Invalid config override: expected a JSON object of ModelConfig's fields, got list"),
        (f'{{"max_batch_size": {"9" * 5000}}}', "Invalid config override: a number has too many digits"),
        (
            '{"max_batch_sise": 1}',
            "Invalid config override: unknown field 'max_batch_sise' of ModelConfig; did you mean 'max_batch_size'?",
        ),
        (
            '{"input": [{"nam": "x"}]}',
            "Invalid config override: unknown field 'nam' of ModelInput at ModelConfig.input[0]; did you mean 'name'?",
        ),
    ],
)
def test_errors_say_what_and_where(text: str, error: str) -> None:
    with pytest.raises(ServeError) as raised:
        parse_override(text)
    assert raised.value.text == error
    assert raised.value.code is StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "text",
    ['{"max_batch_size": "x"}', '{"input": 3}', '{"platform": 1}', '{"input": [{"data_type": "FP32"}]}', "[" * 100_000],
)
def test_wrong_values_are_refused(text: str) -> None:
    with pytest.raises(ServeError, match=r"^Invalid config override: ."):
        parse_override(text)


def test_one_element_stands_for_a_list_of_one() -> None:
    message = parse_override('{"input": {"name": "x", "reshape": {"shape": [1]}}, "instance_group": {"count": 2}}')
    assert [tensor.name for tensor in message.input] == ["x"]
    assert [group.count for group in message.instance_group] == [2]


def test_a_list_is_no_message() -> None:
    with pytest.raises(ServeError) as raised:
        parse_override('{"optimization": []}')
    assert raised.value.text == "Invalid config override: expected an object for 'optimization', got a list"


REGISTRY = discover_backends()


def fields(descriptor: Any, seen: set[str]) -> Iterator[str]:
    """All fields of a message and of the messages in it, as RULES names them."""
    if descriptor.full_name in seen:
        return
    seen.add(descriptor.full_name)
    for field in descriptor.fields:
        yield f"{descriptor.full_name.removeprefix('inference.')}.{field.name}"
        inner = field.message_type
        if inner is not None and inner.GetOptions().map_entry:
            inner = inner.fields_by_name["value"].message_type
        if inner is not None:
            yield from fields(inner, seen)


def settled(message: ModelConfig, backend: str = "onnx", **request: Any) -> ModelConfig:
    copy = ModelConfig()
    copy.CopyFrom(message)
    ConfigRequest("", **request).apply_rules(copy, REGISTRY.find(backend, ""))
    return copy


def test_every_field_has_a_rule() -> None:
    """A new field fails here until somebody has decided whether a client may set it."""
    found = list(fields(ModelConfig.DESCRIPTOR, set()))
    assert len(found) == len(set(found))
    assert set(found) == set(RULES)


def test_a_field_without_a_rule_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = {name: rule for name, rule in RULES.items() if name != "ModelInstanceGroup.count"}
    monkeypatch.setattr(request_rules, "RULES", rules)
    with pytest.raises(RequestRefused, match=r"may not set 'instance_group\.count'"):
        settled(ModelConfig(instance_group=[{"count": 2}]))


@pytest.mark.parametrize("spec", REGISTRY.backends, ids=lambda spec: spec.name)
def test_no_parameter_of_a_request_names_what_could_run(spec: Any) -> None:
    """Judged by their names; each was examined when it was added to the list."""
    words = ("path", "env", "library", "script", "file", "dir", "plugin", "module", "exec", "command", "load_config")
    passed_over = {name for name in spec.request_parameters if name.startswith("migraphx_")}
    doubtful = {name for name in spec.request_parameters - passed_over if any(word in name.lower() for word in words)}
    assert not doubtful - {"execution_mode"}


def test_what_the_repository_says_stays() -> None:
    own = ModelConfig()
    own.model_operations.op_library_filename.append("operators.so")
    own.parameters["session.external"].string_value = "folder"
    own.parameters["threads"].string_value = "4"
    own.output.add(name="Y", label_filename="labels.txt")
    request = ModelConfig(max_batch_size=3)
    request.output.add(name="Y", label_filename="labels.txt")
    found = settled(request, own=own, own_backend="onnx")
    assert list(found.model_operations.op_library_filename) == ["operators.so"]
    assert found.parameters["session.external"].string_value == "folder"
    assert found.max_batch_size == 3
    request.output[0].label_filename = "secret.txt"
    with pytest.raises(RequestRefused, match=r"output\.label_filename"):
        settled(request, own=own, own_backend="onnx")


def test_a_completed_configuration_may_come_back_with_the_labels_that_it_names() -> None:
    """labels.txt is completed, so the repository's own configuration does not name it."""
    request = ModelConfig(output=[{"name": "Y", "label_filename": "labels.txt"}])
    assert settled(request, own=ModelConfig(), own_backend="onnx").output == request.output


def test_libraries_of_the_repository_are_none_of_files_that_a_request_brings() -> None:
    own = ModelConfig()
    own.model_operations.op_library_filename.append("operators.so")
    own.model_repository_agents.agents.add(name="checksum")
    found = settled(ModelConfig(), own=own, own_backend="onnx", brings_files=True)
    assert not found.HasField("model_operations")
    assert found.model_repository_agents.agents[0].name == "checksum", "what checks files goes on checking them"
    with pytest.raises(RequestRefused, match="model_operations"):
        settled(ModelConfig(model_operations=own.model_operations), own=own, own_backend="onnx", brings_files=True)
    labelled = ModelConfig(output=[{"name": "Y", "label_filename": "labels.txt"}])
    assert settled(labelled, brings_files=True) == labelled


@pytest.mark.parametrize("spec", REGISTRY.backends, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    "name",
    [
        "load_timeout_secs",
        "request_timeout_secs",
        "hang_timeout_secs",
        "worker_memory_bytes",
        "worker_tasks",
        "worker_file_bytes",
    ],
)
def test_the_limits_of_a_model_are_the_repository_s(spec: Any, name: str) -> None:
    message = ModelConfig(parameters={name: {"string_value": "0"}})
    with pytest.raises(RequestRefused, match=rf"may not set 'parameters\['{name}'\]'"):
        settled(message, spec.name, own_backend=spec.name)
    assert settled(message, spec.name, own_backend=spec.name, own=message) == message
