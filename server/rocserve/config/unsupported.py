"""Parts of ModelConfig that a backend does not serve: refused where answers would change, else named once."""

from __future__ import annotations

from collections.abc import Iterator

from rocserve.backends.base import BackendSpec
from rocserve.core.errors import unimplemented
from rocserve.core.latencies import DEFAULT_BUCKETS
from rocserve.protocol.model_config_pb2 import ModelConfig

_SILENT = {"input_pinned_memory", "output_pinned_memory", "execution_accelerators"}
"""The first two are written into every configuration that Triton prints; there is nothing to tell about them. Of the
last the engines say themselves what they cannot have."""


def check_supported(message: ModelConfig, backend: BackendSpec | None) -> tuple[str, ...]:
    """One warning that names the settings without effect, or none.

    Args:
        backend: None of an ensemble.

    Raises:
        ServeError: UNIMPLEMENTED for a setting without which the model would answer differently.
    """
    for setting, advice in _refused(message, backend):
        raise unimplemented(f"model '{message.name}': {setting} is not supported by this version of rocserve; {advice}")
    ignored = tuple(_ignored(message, backend))
    if not ignored:
        return ()
    return (f"model '{message.name}': settings without effect in this version of rocserve: {', '.join(ignored)}",)


def _refused(message: ModelConfig, backend: BackendSpec | None) -> Iterator[tuple[str, str]]:
    """The settings that cannot be honoured, each with what to do."""
    if backend is not None:
        if message.model_transaction_policy.decoupled and not backend.answers_requests:
            yield (
                "model_transaction_policy.decoupled",
                "only models of the backend 'python' answer with any number of responses",
            )
        if message.model_operations.op_library_filename and not (backend.takes_operators or backend.answers_requests):
            yield (
                "model_operations.op_library_filename",
                "only models of the backend 'onnx' can have custom operators (on ONNX Runtime)",
            )
        if not backend.takes_ragged_batches:
            for setting in _ragged(message):
                yield (
                    setting,
                    "requests of different shapes can share a batch only on the backends 'onnx' (ONNX Runtime) and"
                    " 'python'",
                )


def _ragged(message: ModelConfig) -> Iterator[str]:
    for setting in ("batch_input", "batch_output"):
        if getattr(message, setting):
            yield setting
    for tensor in message.input:
        if tensor.allow_ragged_batch:
            yield f"allow_ragged_batch of input '{tensor.name}'"


def _ignored(message: ModelConfig, backend: BackendSpec | None) -> Iterator[str]:
    takes_operators = backend is not None and backend.takes_operators
    for field, _ in message.optimization.ListFields():
        # Where a graph can be given operators, it can be optimised too.
        if field.name not in _SILENT and not (field.name == "graph" and takes_operators):
            yield f"optimization.{field.name}"
    for setting in ("secondary_devices", "profile"):
        if any(getattr(group, setting) for group in message.instance_group):
            yield f"instance_group.{setting}"
    if backend is not None and backend.answers_requests:
        # Its models see each request with its own shape.
        yield from (setting for setting in ("batch_input", "batch_output") if getattr(message, setting))
    if message.model_operations.op_library_filename and not takes_operators:
        yield "model_operations.op_library_filename"
    if message.runtime:
        yield "runtime"
    for control in message.model_metrics.metric_control:
        if control.metric_identifier.family not in DEFAULT_BUCKETS:
            yield f"model_metrics of '{control.metric_identifier.family}'"
