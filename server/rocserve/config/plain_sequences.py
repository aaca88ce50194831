"""`sequence_batching` of a validated ModelConfig message as plain data."""

from __future__ import annotations

from rocserve.config.datatypes import datatype_of_number
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import (
    ControlInput,
    ControlKind,
    DirectStrategy,
    InitialState,
    OldestStrategy,
    SequenceBatching,
    SequenceControl,
    SequenceState,
)
from rocserve.protocol.model_config_pb2 import ModelSequenceBatching


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
