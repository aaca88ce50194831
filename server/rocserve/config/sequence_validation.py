"""Checks of `sequence_batching`. Rules and texts are Triton's, where they exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rocserve.protocol import model_config_pb2
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelSequenceBatching

_Control = ModelSequenceBatching.Control


def sequence_tensor_names(message: ModelConfig) -> tuple[frozenset[str], frozenset[str]]:
    """Return the inputs that the server adds, and the outputs that the server keeps."""
    batching = message.sequence_batching
    given = [entry.name for entry in batching.control_input] + [state.input_name for state in batching.state]
    return frozenset(given), frozenset(state.output_name for state in batching.state)


def sequence_faults(message: ModelConfig) -> Iterator[str]:
    """Yield the faults. The caller must stop at the first: each check relies on the earlier ones."""
    batching, model = message.sequence_batching, message.name
    if message.response_cache.enable:
        yield (
            f"Response Cache does not currently support model {model} with sequence batching scheduler. Please disable"
            " the response cache."
        )
    seen: set[str] = set()
    for entry in batching.control_input:
        if not entry.name:
            yield f"sequence batching control tensor must have a name for {model}"
        if entry.name in seen:
            yield f"sequence batching control tensor '{entry.name}' is specified for multiple control kinds for {model}"
        seen.add(entry.name)
    for kind in (
        _Control.CONTROL_SEQUENCE_START,
        _Control.CONTROL_SEQUENCE_END,
        _Control.CONTROL_SEQUENCE_READY,
        _Control.CONTROL_SEQUENCE_CORRID,
    ):
        found = [control for entry in batching.control_input for control in entry.control if control.kind == kind]
        if len(found) > 1:
            yield f"sequence batching specifies multiple {_Control.Kind.Name(kind)} tensors for {model}"
        for control in found:
            yield from _control_faults(control, f"{_Control.Kind.Name(kind)} for {model}")
    if batching.oldest.max_candidate_sequences < 0:
        yield f"sequence batching max candidate sequences must not be negative for {model}"
    for size in batching.oldest.preferred_batch_size:
        if size <= 0:
            yield f"sequence batching preferred batch size must be positive for {model}"
        if size > message.max_batch_size:
            yield f"sequence batching preferred batch size must be <= max batch size for {model}"
    if not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        yield f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {model}"
    for state in batching.state:
        yield from _state_faults(state, model)
    yield from _repetitions(message)


def _control_faults(control: _Control, where: str) -> Iterator[str]:
    lists = ("int32_false_true", "fp32_false_true", "bool_false_true")
    given = [name for name in lists if len(getattr(control, name))]
    either = f"either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for {where}"
    types = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
    if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
        if given:
            yield f"sequence batching must not specify {either}"
        if model_config_pb2.DataType.Name(control.data_type) not in types:
            *others, last = types
            allowed = f"{', '.join(others)} and {last}"
            yield f"unexpected data type for control {where}. Allowed data types are {allowed}"
        return
    if not given:
        yield f"sequence batching must specify {either}"
    if len(given) > 1:
        yield (
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and"
            f" 'bool_false_true' for {where}"
        )
    if len(getattr(control, given[0])) != 2:
        yield f"sequence batching control '{given[0]}' must have exactly 2 entries for {where}"


def _state_faults(state: ModelSequenceBatching.State, model: str) -> Iterator[str]:
    name = state.input_name
    if not name or not state.output_name:
        yield (
            f"sequence batching state must specify 'input_name' and 'output_name' for {model}, got '{name}' and"
            f" '{state.output_name}'"
        )
    if state.data_type == model_config_pb2.TYPE_INVALID:
        yield f"sequence batching state '{name}' must specify 'data_type' for {model}"
    if any(size < 1 and size != -1 for size in state.dims):
        yield (
            f"sequence batching state '{name}' dimension must be integer >= 1, or -1 to indicate a"
            f" variable-size dimension for {model}"
        )
    if (count := len(state.initial_state)) > 1:
        yield (
            f"initial_state field for state input '{name}' must contain exactly one or zero element. Found '{count}'"
            " elements."
        )
    for initial in state.initial_state:
        if initial.data_type != state.data_type:
            yield f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        if not initial.name:
            yield f"Field 'name' must be set when using initial_state for state input '{name}'."
        if len(initial.dims) != len(state.dims):
            yield (
                "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input"
                f" '{name}'. {len(initial.dims)} != {len(state.dims)}"
            )
        for size, expected in zip(initial.dims, state.dims, strict=True):
            if size == -1:
                yield f"'initial_state' field for state input name '{name}' contains variable dimensions."
            if expected not in (-1, size):
                yield (
                    f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {size} !="
                    f" {expected}"
                )
        if initial.WhichOneof("state_data") is None:
            yield f"initial_state setting expects state'{name}' to have state_data set"


def _repetitions(message: ModelConfig) -> Iterator[str]:
    """Yield repeated states, and tensors that are two of: input of requests, control, state."""
    batching = message.sequence_batching
    controls = dict.fromkeys(entry.name for entry in batching.control_input)
    states = Counter(state.input_name for state in batching.state)
    outputs = Counter(state.output_name for state in batching.state)
    for what, counts in (("input", states), ("output", outputs)):
        yield from (f"State {what} name '{name}' specified more than once." for name in counts if counts[name] > 1)
    twofold = [(name, "a sequence batching control and a state input") for name in controls if name in states]
    for tensor in message.input:
        name = tensor.name
        twofold += [(name, "an input and a sequence batching control")] if name in controls else []
        twofold += [(name, "an input and a state input")] if name in states else []
    for name, what in twofold:
        yield (
            f"tensor '{name}' is {what} for {message.name}; the server adds controls and states itself; remove"
            " the tensor from 'input'"
        )
