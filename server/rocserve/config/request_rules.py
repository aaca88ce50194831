"""Rules for load requests: a request may set values, but never choose which code or program runs. Each allowed field of
ModelConfig has a rule here; other fields are refused."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from rocserve.backends.base import BackendSpec
from rocserve.config.model_folder import LABELS_FILENAME
from rocserve.config.pbtxt import messages_in
from rocserve.core.errors import ServeError, StatusCode
from rocserve.protocol.model_config_pb2 import ModelConfig


class Rule(enum.Enum):
    """The permission of a load request for a field."""

    VALUE = "value"
    """Set it. The fields of a message have their own rules."""
    PATH = "path"
    """Name a file in the model's folder."""
    LABELS = "labels"
    """Name a file whose lines clients can read: named by the repository's configuration, or sent with the request."""
    PARAMETERS = "parameters"
    """Set the parameters that the backend opens to requests (BackendSpec.request_parameters)."""
    REPOSITORY = "repository"
    """Repeat the repository's value. If the request omits the field, the repository's value applies."""


_VALUES: Mapping[str, str] = {
    "ModelConfig": (
        "name platform backend version_policy max_batch_size input output batch_input batch_output optimization"
        " dynamic_batching sequence_batching ensemble_scheduling instance_group metric_tags model_warmup"
        " model_transaction_policy response_cache model_metrics"
    ),
    "ModelRateLimiter": "resources priority",
    "ModelRateLimiter.Resource": "name global count",
    "ModelInstanceGroup": "name kind count rate_limiter gpus secondary_devices profile passive host_policy",
    "ModelInstanceGroup.SecondaryDevice": "kind device_id",
    "ModelTensorReshape": "shape",
    "ModelInput": (
        "name data_type format dims reshape is_shape_tensor allow_ragged_batch optional is_non_linear_format_io"
    ),
    "ModelOutput": "name data_type dims reshape is_shape_tensor is_non_linear_format_io",
    "BatchInput": "kind target_name data_type source_input",
    "BatchOutput": "target_name kind source_input",
    "ModelVersionPolicy": "latest all specific",
    "ModelVersionPolicy.Latest": "num_versions",
    "ModelVersionPolicy.Specific": "versions",
    "ModelOptimizationPolicy": (
        "graph priority cuda execution_accelerators input_pinned_memory output_pinned_memory"
        " gather_kernel_buffer_threshold eager_batching"
    ),
    "ModelOptimizationPolicy.Graph": "level",
    "ModelOptimizationPolicy.Cuda": "graphs busy_wait_events graph_spec output_copy_stream",
    "ModelOptimizationPolicy.Cuda.GraphSpec": "batch_size input graph_lower_bound",
    "ModelOptimizationPolicy.Cuda.GraphSpec.Shape": "dim",
    "ModelOptimizationPolicy.Cuda.GraphSpec.LowerBound": "batch_size input",
    "ModelOptimizationPolicy.ExecutionAccelerators": "gpu_execution_accelerator cpu_execution_accelerator",
    "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator": "name",
    "ModelOptimizationPolicy.PinnedMemoryBuffer": "enable",
    "ModelQueuePolicy": "timeout_action default_timeout_microseconds allow_timeout_override max_queue_size",
    "ModelDynamicBatching": (
        "preferred_batch_size max_queue_delay_microseconds preserve_ordering priority_levels default_priority_level"
        " default_queue_policy priority_queue_policy"
    ),
    "ModelSequenceBatching": "direct oldest max_sequence_idle_microseconds control_input state iterative_sequence",
    "ModelSequenceBatching.Control": "kind int32_false_true fp32_false_true bool_false_true data_type",
    "ModelSequenceBatching.ControlInput": "name control",
    "ModelSequenceBatching.InitialState": "data_type dims zero_data name",
    "ModelSequenceBatching.State": (
        "input_name output_name data_type dims initial_state use_same_buffer_for_input_output use_growable_memory"
    ),
    "ModelSequenceBatching.StrategyDirect": "max_queue_delay_microseconds minimum_slot_utilization",
    "ModelSequenceBatching.StrategyOldest": (
        "max_candidate_sequences preferred_batch_size max_queue_delay_microseconds preserve_ordering"
    ),
    "ModelEnsembling": "step max_inflight_requests",
    "ModelEnsembling.Step": "model_name model_version input_map output_map model_namespace",
    "ModelParameter": "string_value",
    "ModelWarmup": "name batch_size inputs count",
    "ModelWarmup.Input": "data_type dims zero_data random_data",
    "ModelTransactionPolicy": "decoupled",
    "ModelResponseCache": "enable",
    "ModelMetrics": "metric_control",
    "ModelMetrics.MetricControl": "metric_identifier histogram_options",
    "ModelMetrics.MetricControl.MetricIdentifier": "family",
    "ModelMetrics.MetricControl.HistogramOptions": "buckets",
}

RULES: Mapping[str, Rule] = {
    **{f"{message}.{name}": Rule.VALUE for message, names in _VALUES.items() for name in names.split()},
    "ModelConfig.default_model_filename": Rule.PATH,
    "ModelConfig.cc_model_filenames": Rule.PATH,
    "ModelSequenceBatching.InitialState.data_file": Rule.PATH,
    "ModelWarmup.Input.input_data_file": Rule.PATH,
    "ModelOutput.label_filename": Rule.LABELS,
    "ModelConfig.parameters": Rule.PARAMETERS,
    "ModelOptimizationPolicy.ExecutionAccelerators.Accelerator.parameters": Rule.PARAMETERS,
    "ModelConfig.runtime": Rule.REPOSITORY,
    "ModelConfig.model_operations": Rule.REPOSITORY,
    "ModelOperations.op_library_filename": Rule.REPOSITORY,
    "ModelConfig.model_repository_agents": Rule.REPOSITORY,
    "ModelRepositoryAgents.agents": Rule.REPOSITORY,
    "ModelRepositoryAgents.Agent.name": Rule.REPOSITORY,
    "ModelRepositoryAgents.Agent.parameters": Rule.REPOSITORY,
}
""""<message>.<field>" -> rule."""

_HELD_FIELDS = tuple(
    entry.name for entry in ModelConfig.DESCRIPTOR.fields if RULES.get(f"ModelConfig.{entry.name}") is Rule.REPOSITORY
)


class RequestRefused(ServeError):
    """A load request asks for something that clients may not decide. Nothing has been changed."""

    def __init__(self, text: str) -> None:
        super().__init__(StatusCode.PERMISSION_DENIED, text)


@dataclass(frozen=True, slots=True)
class ConfigRequest:
    """A load request's configuration, and the repository's configuration that limits it."""

    json: str
    own: ModelConfig = field(default_factory=ModelConfig)
    """The repository's configuration of the model; empty if there is none or it is unreadable."""
    own_backend: str = ""
    """Name of the backend of the repository's model; "" = none."""
    brings_files: bool = False
    """The request sends files, which replace the model's folder."""

    def apply_rules(self, message: ModelConfig, backend: BackendSpec | None) -> None:
        """Refuse settings that the request may not make, and write the repository's values of such fields into
        `message`, which is the request's. `backend`: the request's choice; None for an ensemble. Raises
        RequestRefused."""
        is_data = backend is None or backend.models_are_data
        if backend is not None and not is_data and (self.brings_files or backend.name != self.own_backend):
            why = "not from files in a request" if self.brings_files else "where the model is one of that backend"
            raise RequestRefused(
                f"failed to load '{message.name}', models of backend '{backend.name}' are only loaded from the"
                f" repository, {why}"
            )
        own = self.own
        if self.brings_files:
            # The repository's configuration describes its own files, and does not apply to those of a request. Only
            # its agents check both.
            own = ModelConfig()
            if self.own.HasField("model_repository_agents"):
                own.model_repository_agents.CopyFrom(self.own.model_repository_agents)
        # For models that are programs, the model's file chooses the code that runs.
        kept = _HELD_FIELDS if is_data else (*_HELD_FIELDS, "default_model_filename", "cc_model_filenames")
        given, written = ({entry.name for entry, _ in one.ListFields()} for one in (message, own))
        for name in kept:
            if name in given and getattr(message, name) != getattr(own, name):
                raise _refused(message.name, name, "it chooses the code that runs")
            message.ClearField(name)
            if name in written:
                message.MergeFrom(ModelConfig(**{name: getattr(own, name)}))
        opened = frozenset() if backend is None else backend.request_parameters
        for name, parameter in own.parameters.items():
            if name not in opened and name not in message.parameters:
                message.parameters[name].CopyFrom(parameter)
        # Clients send completed configurations back, and these name the file of the labels.
        labels = None if self.brings_files else {LABELS_FILENAME, *(output.label_filename for output in own.output)}
        _check(message, own, opened, labels, kept)


def _check(
    message: ModelConfig, own: ModelConfig, opened: frozenset[str], labels: set[str] | None, settled: tuple[str, ...]
) -> None:
    """Check each field against its rule. `opened`: parameters that may be set. `labels`: label files that may be named;
    None = any in the model's folder. `settled`: fields that have the repository's value. Raises RequestRefused."""
    for where, rule, value in _settings(message):
        if where in settled:
            continue
        if rule is Rule.REPOSITORY:
            raise _refused(message.name, where, "only the repository may set it")
        if rule is Rule.PARAMETERS:
            known = own.parameters if where == "parameters" else {}
            for name, given in value.items():
                if name not in opened and (name not in known or known[name] != given):
                    why = "it may choose the code that runs, or name a file"
                    raise _refused(message.name, f"{where}['{name}']", why)
        elif rule is Rule.PATH or (rule is Rule.LABELS and labels is None):
            for text in value.values() if where == "cc_model_filenames" else (value,):
                pure = PurePosixPath(text)
                if pure.is_absolute() or ".." in pure.parts or "\0" in text:
                    raise _refused(message.name, where, f"'{text}' leads out of the model's folder")
        elif rule is Rule.LABELS and labels is not None and value not in labels:
            raise _refused(message.name, where, "clients could read that file")


def _settings(message: Any, path: str = "") -> Iterator[tuple[str, Rule, Any]]:
    """Yield each set field, including those of nested messages: its path, rule and value."""
    kind = message.DESCRIPTOR.full_name.removeprefix("inference.")
    for entry, value in message.ListFields():
        where, rule = f"{path}{entry.name}", RULES.get(f"{kind}.{entry.name}", Rule.REPOSITORY)
        yield where, rule, value
        for part in messages_in(entry, value) if rule is Rule.VALUE else ():
            yield from _settings(part, f"{where}.")


def _refused(model: str, where: str, why: str) -> RequestRefused:
    return RequestRefused(
        f"failed to load '{model}', a load request may not set '{where}': {why}. Set it in the model's"
        " configuration in the repository, and remove it from the request"
    )
