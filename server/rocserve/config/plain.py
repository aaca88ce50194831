"""A validated ModelConfig message as the plain data that the rest of the server acts on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rocserve.config.datatypes import datatype_of_number
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import (
    BatchInput,
    BatchInputKind,
    BatchOutput,
    ControlInput,
    ControlKind,
    DirectStrategy,
    DynamicBatching,
    EnsembleStep,
    ExecutionAccelerator,
    InitialState,
    InputConfig,
    InstanceGroup,
    InstanceKind,
    InstanceRateLimiter,
    ModelConfig,
    OldestStrategy,
    OutputConfig,
    QueuePolicy,
    RateLimiterResource,
    RepositoryAgent,
    SequenceBatching,
    SequenceControl,
    SequenceState,
    TimeoutAction,
    VersionPolicy,
    VersionPolicyKind,
    WarmupInput,
    WarmupSample,
)
from rocserve.core.requests import Signature
from rocserve.protocol import model_config_pb2 as messages
from rocserve.protocol.model_config_pb2 import ModelSequenceBatching

Labels = Mapping[str, tuple[str, ...]]
"""By the output's name."""


def to_plain(message: messages.ModelConfig, backend: str, labels: Labels) -> ModelConfig:
    """The plain form of a normalised and validated message.

    Args:
        backend: the canonical name of the backend, or "ensemble".
        labels: the lines of each output's label file.
    """
    return ModelConfig(
        name=message.name,
        platform=message.platform,
        backend=backend,
        max_batch_size=message.max_batch_size,
        inputs=tuple(_input(tensor) for tensor in message.input),
        outputs=tuple(_output(tensor, labels) for tensor in message.output),
        version_policy=version_policy(message.version_policy),
        instance_groups=tuple(_instance_group(group) for group in message.instance_group),
        dynamic_batching=(
            _dynamic_batching(message.dynamic_batching) if message.HasField("dynamic_batching") else None
        ),
        ensemble_steps=tuple(_step(step) for step in message.ensemble_scheduling.step),
        model_warmup=tuple(_warmup(sample) for sample in message.model_warmup if sample.batch_size > 0),
        default_model_filename=message.default_model_filename,
        graph_level=message.optimization.graph.level,
        operator_libraries=tuple(message.model_operations.op_library_filename),
        parameters={key: value.string_value for key, value in sorted(message.parameters.items())},
        gpu_accelerators=_accelerators(message.optimization.execution_accelerators.gpu_execution_accelerator),
        cpu_accelerators=_accelerators(message.optimization.execution_accelerators.cpu_execution_accelerator),
        decoupled=message.model_transaction_policy.decoupled,
        batch_inputs=tuple(_batch_input(entry) for entry in message.batch_input),
        batch_outputs=tuple(
            BatchOutput(tuple(entry.target_name), tuple(entry.source_input)) for entry in message.batch_output
        ),
        sequence_batching=(
            sequence_batching(message.sequence_batching) if message.HasField("sequence_batching") else None
        ),
        ensemble_max_inflight_requests=message.ensemble_scheduling.max_inflight_requests,
        response_cache=message.response_cache.enable,
        cc_model_filenames=dict(sorted(message.cc_model_filenames.items())),
        metric_tags=dict(sorted(message.metric_tags.items())),
        histogram_buckets={
            control.metric_identifier.family: tuple(control.histogram_options.buckets)
            for control in message.model_metrics.metric_control
        },
        repository_agents=tuple(
            RepositoryAgent(agent.name, dict(sorted(agent.parameters.items())))
            for agent in message.model_repository_agents.agents
        ),
    )


def with_scalars(config: ModelConfig, signature: Signature) -> ModelConfig:
    """The configuration with single values reshaped to the rank 0 that the model has for them.

    config.pbtxt has no word for this outside a batch: such a tensor stands there as dims of ones.
    """
    if config.max_batch_size > 0:
        return config
    scalars = {spec.name for spec in (*signature.inputs, *signature.outputs) if not spec.shape}
    return replace(
        config,
        inputs=tuple(replace(tensor, reshape=()) if tensor.name in scalars else tensor for tensor in config.inputs),
        outputs=tuple(replace(tensor, reshape=()) if tensor.name in scalars else tensor for tensor in config.outputs),
    )


def version_policy(message: messages.ModelVersionPolicy) -> VersionPolicy:
    if message.HasField("specific"):
        return VersionPolicy(VersionPolicyKind.SPECIFIC, specific=tuple(message.specific.versions))
    if message.HasField("latest"):
        return VersionPolicy(VersionPolicyKind.LATEST, latest=message.latest.num_versions)
    # One that says nothing means all of them to Triton.
    return VersionPolicy(VersionPolicyKind.ALL)


def _reshape(tensor: messages.ModelInput | messages.ModelOutput) -> tuple[int, ...] | None:
    return tuple(tensor.reshape.shape) if tensor.HasField("reshape") else None


def _input(tensor: messages.ModelInput) -> InputConfig:
    return InputConfig(
        name=tensor.name,
        datatype=datatype_of_number(tensor.data_type),
        dims=tuple(tensor.dims),
        reshape=_reshape(tensor),
        optional=tensor.optional,
        format=messages.ModelInput.Format.Name(tensor.format),
        allow_ragged_batch=tensor.allow_ragged_batch,
    )


def _output(tensor: messages.ModelOutput, labels: Labels) -> OutputConfig:
    return OutputConfig(
        name=tensor.name,
        datatype=datatype_of_number(tensor.data_type),
        dims=tuple(tensor.dims),
        reshape=_reshape(tensor),
        label_filename=tensor.label_filename,
        labels=labels.get(tensor.name, ()),
    )


def _instance_group(group: messages.ModelInstanceGroup) -> InstanceGroup:
    return InstanceGroup(
        name=group.name,
        kind=InstanceKind(messages.ModelInstanceGroup.Kind.Name(group.kind)),
        count=group.count,
        gpus=tuple(group.gpus),
        passive=group.passive,
        rate_limiter=_rate_limiter(group.rate_limiter),
        host_policy=group.host_policy,
    )


def _rate_limiter(limiter: messages.ModelRateLimiter) -> InstanceRateLimiter:
    resources = tuple(
        RateLimiterResource(resource.name, resource.count, getattr(resource, "global"))
        for resource in limiter.resources
    )
    return InstanceRateLimiter(resources, limiter.priority)


def _batch_input(entry: messages.BatchInput) -> BatchInput:
    return BatchInput(
        kind=BatchInputKind(messages.BatchInput.Kind.Name(entry.kind)),
        target_names=tuple(entry.target_name),
        datatype=datatype_of_number(entry.data_type),
        source_inputs=tuple(entry.source_input),
    )


def _dynamic_batching(batching: messages.ModelDynamicBatching) -> DynamicBatching:
    return DynamicBatching(
        preferred_batch_sizes=tuple(sorted(set(batching.preferred_batch_size))),
        max_queue_delay_microseconds=batching.max_queue_delay_microseconds,
        preserve_ordering=batching.preserve_ordering,
        priority_levels=batching.priority_levels,
        default_priority_level=batching.default_priority_level,
        default_queue_policy=_queue_policy(batching.default_queue_policy),
        priority_queue_policy={
            level: _queue_policy(policy) for level, policy in sorted(batching.priority_queue_policy.items())
        },
    )


def _queue_policy(policy: messages.ModelQueuePolicy) -> QueuePolicy:
    return QueuePolicy(
        timeout_action=TimeoutAction(messages.ModelQueuePolicy.TimeoutAction.Name(policy.timeout_action)),
        default_timeout_microseconds=policy.default_timeout_microseconds,
        allow_timeout_override=policy.allow_timeout_override,
        max_queue_size=policy.max_queue_size,
    )


def _accelerators(
    accelerators: Iterable[messages.ModelOptimizationPolicy.ExecutionAccelerators.Accelerator],
) -> tuple[ExecutionAccelerator, ...]:
    return tuple(ExecutionAccelerator(entry.name, dict(sorted(entry.parameters.items()))) for entry in accelerators)


def _step(step: messages.ModelEnsembling.Step) -> EnsembleStep:
    return EnsembleStep(
        model_name=step.model_name,
        # The text format cannot tell 0 from left out; the highest ready version serves both.
        model_version=step.model_version or -1,
        input_map=dict(sorted(step.input_map.items())),
        output_map=dict(sorted(step.output_map.items())),
        model_namespace=step.model_namespace,
    )


def _warmup(sample: messages.ModelWarmup) -> WarmupSample:
    return WarmupSample(
        name=sample.name,
        batch_size=sample.batch_size,
        inputs={name: _warmup_input(tensor) for name, tensor in sorted(sample.inputs.items())},
        count=max(sample.count, 1),
    )


def _warmup_input(tensor: messages.ModelWarmup.Input) -> WarmupInput:
    choice = tensor.WhichOneof("input_data_type")
    source = {"zero_data": "zero", "random_data": "random"}.get(choice or "", f"file:{tensor.input_data_file}")
    return WarmupInput(datatype=datatype_of_number(tensor.data_type), dims=tuple(tensor.dims), source=source)


def sequence_batching(message: ModelSequenceBatching) -> SequenceBatching:
    return SequenceBatching(
        direct=None if message.HasField("oldest") else _direct(message.direct),
        oldest=_oldest(message.oldest) if message.HasField("oldest") else None,
        max_sequence_idle_microseconds=message.max_sequence_idle_microseconds,
        control_inputs=tuple(
            ControlInput(entry.name, tuple(_control(control) for control in entry.control))
            for entry in message.control_input
        ),
        states=tuple(_state(state) for state in message.state),
        iterative=message.iterative_sequence,
    )


def _direct(message: ModelSequenceBatching.StrategyDirect) -> DirectStrategy:
    return DirectStrategy(message.max_queue_delay_microseconds, message.minimum_slot_utilization)


def _oldest(message: ModelSequenceBatching.StrategyOldest) -> OldestStrategy:
    return OldestStrategy(
        max_candidate_sequences=message.max_candidate_sequences,
        preferred_batch_sizes=tuple(sorted(set(message.preferred_batch_size))),
        max_queue_delay_microseconds=message.max_queue_delay_microseconds,
        preserve_ordering=message.preserve_ordering,
    )


def _control(message: ModelSequenceBatching.Control) -> SequenceControl:
    kind = ControlKind(ModelSequenceBatching.Control.Kind.Name(message.kind))
    if kind is ControlKind.CORRELATION_ID:
        return SequenceControl(kind, datatype_of_number(message.data_type))
    if message.fp32_false_true:
        no, yes = message.fp32_false_true
        return SequenceControl(kind, DataType.FP32, no, yes)
    if message.bool_false_true:
        no, yes = message.bool_false_true
        return SequenceControl(kind, DataType.BOOL, float(no), float(yes))
    no, yes = message.int32_false_true
    return SequenceControl(kind, DataType.INT32, no, yes)


def _state(message: ModelSequenceBatching.State) -> SequenceState:
    return SequenceState(
        input_name=message.input_name,
        output_name=message.output_name,
        datatype=datatype_of_number(message.data_type),
        dims=tuple(message.dims),
        initial_states=tuple(
            InitialState(entry.name, datatype_of_number(entry.data_type), tuple(entry.dims), entry.data_file)
            for entry in message.initial_state
        ),
    )
