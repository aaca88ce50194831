"""What load requests may say: every field of ModelConfig has a rule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rocserve.backends.registry import discover_backends
from rocserve.config import request_rules
from rocserve.config.request_rules import RULES, ConfigRequest, RequestRefused
from rocserve.protocol.model_config_pb2 import ModelConfig

REGISTRY = discover_backends()


def fields(descriptor: Any, seen: set[str]) -> Iterator[str]:
    """All fields of a message and of those within it, as RULES names them."""
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
    ConfigRequest("", **request).settle(copy, REGISTRY.find(backend, ""))
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
    """By what the names say; each was looked at when it was put on the list."""
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
