"""Parts of ModelConfig that this version does not serve: refused where answers would change, else named once."""

from __future__ import annotations

from collections.abc import Iterator

from rocserve.core.errors import ServeError, unimplemented
from rocserve.protocol.model_config_pb2 import ModelConfig

_SILENT = {"input_pinned_memory", "output_pinned_memory", "execution_accelerators"}
"""The first two are written into every configuration that Triton prints; there is nothing to tell about them. Of the
last the engines say themselves what they cannot have."""


def check_supported(
    message: ModelConfig, may_be_decoupled: bool = False, may_be_ragged: bool = False
) -> tuple[str, ...]:
    """One warning that names the settings without effect, or none.

    Args:
        may_be_decoupled: the backend's models answer each request for itself, with any number of responses.
        may_be_ragged: requests of different shapes may share a batch of the backend's models.

    Raises:
        ServeError: UNIMPLEMENTED for a setting without which the model would answer differently.
    """
    for setting, advice in _refused(message, may_be_decoupled):
        raise _not_supported(message.name, setting, advice)
    if not may_be_ragged:
        for setting in _ragged(message):
            raise _not_supported(
                message.name,
                setting,
                "requests of different shapes can share a batch only on the"
                " backends 'onnx' (ONNX Runtime) and 'python'",
            )
    ignored = tuple(_ignored(message))
    if not ignored:
        return ()
    return (f"model '{message.name}': settings without effect in this version of rocserve: {', '.join(ignored)}",)


def _not_supported(model: str, setting: str, advice: str) -> ServeError:
    return unimplemented(f"model '{model}': {setting} is not supported by this version of rocserve; {advice}")


def _refused(message: ModelConfig, may_be_decoupled: bool) -> Iterator[tuple[str, str]]:
    """The settings that cannot be honoured, each with what to do."""
    if message.HasField("sequence_batching"):
        yield "sequence_batching", "remove it if requests of the model do not depend on each other"
    if message.model_transaction_policy.decoupled:
        if not may_be_decoupled:
            yield (
                "model_transaction_policy.decoupled",
                "only models of the backend 'python' answer with any number of responses",
            )
    if message.model_operations.op_library_filename:
        yield "model_operations.op_library_filename", "custom operators cannot be loaded"
    if message.model_repository_agents.agents:
        yield "model_repository_agents", "remove it, and prepare the model's files before they are dropped"
    for step in message.ensemble_scheduling.step:
        if step.model_namespace:
            yield f"model_namespace of the step '{step.model_name}'", "model names are unique in the whole server"
    for group in message.instance_group:
        if group.secondary_devices:
            yield f"secondary_devices of instance group '{group.name}'", "remove it"


def _ragged(message: ModelConfig) -> Iterator[str]:
    for setting in ("batch_input", "batch_output"):
        if getattr(message, setting):
            yield setting
    for tensor in message.input:
        if tensor.allow_ragged_batch:
            yield f"allow_ragged_batch of input '{tensor.name}'"


def _ignored(message: ModelConfig) -> Iterator[str]:
    for field, _ in message.optimization.ListFields():
        if field.name not in _SILENT:
            yield f"optimization.{field.name}"
    if any(group.host_policy for group in message.instance_group):
        yield "instance_group.host_policy"
    for setting in ("runtime", "cc_model_filenames", "metric_tags"):
        if getattr(message, setting):
            yield setting
    if message.HasField("model_metrics"):
        yield "model_metrics"
