"""What `sequence_batching` must fulfil. Rules and words are Triton's, where it has them."""

from __future__ import annotations

from collections.abc import Iterable

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.protocol import model_config_pb2
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelSequenceBatching

_Control = ModelSequenceBatching.Control
_CORRELATION_ID = _Control.CONTROL_SEQUENCE_CORRID
_CORRELATION_ID_TYPES = (
    model_config_pb2.TYPE_UINT64,
    model_config_pb2.TYPE_INT64,
    model_config_pb2.TYPE_UINT32,
    model_config_pb2.TYPE_INT32,
    model_config_pb2.TYPE_STRING,
)
_LISTS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_VARIABLE = -1


def check_sequence_batching(message: ModelConfig) -> None:
    """Raises: ServeError: INVALID_ARGUMENT with the first fault."""
    batching = message.sequence_batching
    if message.response_cache.enable:
        raise invalid_argument(
            f"Response Cache does not currently support model {message.name} with sequence batching scheduler. Please"
            " disable the response cache."
        )
    _check_control_names(batching, message.name)
    for kind in (_Control.CONTROL_SEQUENCE_START, _Control.CONTROL_SEQUENCE_END, _Control.CONTROL_SEQUENCE_READY):
        for control in _only_one(batching, kind, message.name):
            _check_lists(control, message.name)
    for control in _only_one(batching, _CORRELATION_ID, message.name):
        where = f"{_kind_name(control.kind)} for {message.name}"
        if any(len(getattr(control, name)) for name in _LISTS):
            raise invalid_argument(
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
                f" for {where}"
            )
        if control.data_type not in _CORRELATION_ID_TYPES:
            raise invalid_argument(
                f"unexpected data type for control {where}. Allowed data types are TYPE_UINT64, TYPE_INT64,"
                " TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
    if batching.oldest.max_candidate_sequences < 0:
        raise invalid_argument(f"sequence batching max candidate sequences must not be negative for {message.name}")
    for size in batching.oldest.preferred_batch_size:
        if size <= 0:
            raise invalid_argument(f"sequence batching preferred batch size must be positive for {message.name}")
        if size > message.max_batch_size:
            raise invalid_argument(
                f"sequence batching preferred batch size must be <= max batch size for {message.name}"
            )
    if not 0.0 <= batching.direct.minimum_slot_utilization <= 1.0:
        raise invalid_argument(
            f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {message.name}"
        )
    for state in batching.state:
        _check_state(state, message.name)
    _check_tensors_apart(message)


def sequence_tensor_names(message: ModelConfig) -> tuple[frozenset[str], frozenset[str]]:
    """The inputs that the server gives the model of itself, and the outputs that it keeps for itself."""
    batching = message.sequence_batching
    given = [entry.name for entry in batching.control_input] + [state.input_name for state in batching.state]
    return frozenset(given), frozenset(state.output_name for state in batching.state)


def _check_control_names(batching: ModelSequenceBatching, model: str) -> None:
    seen: set[str] = set()
    for entry in batching.control_input:
        if not entry.name:
            raise invalid_argument(f"sequence batching control tensor must have a name for {model}")
        if entry.name in seen:
            raise invalid_argument(
                f"sequence batching control tensor '{entry.name}' is specified for multiple control kinds for {model}"
            )
        seen.add(entry.name)


def _only_one(batching: ModelSequenceBatching, kind: int, model: str) -> list[_Control]:
    """The control of a kind, or none."""
    found = [control for entry in batching.control_input for control in entry.control if control.kind == kind]
    if len(found) > 1:
        raise invalid_argument(f"sequence batching specifies multiple {_kind_name(kind)} tensors for {model}")
    return found


def _check_lists(control: _Control, model: str) -> None:
    where = f"for {_kind_name(control.kind)} for {model}"
    given = [name for name in _LISTS if len(getattr(control, name))]
    if not given:
        raise invalid_argument(
            f"sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' {where}"
        )
    if len(given) > 1:
        raise invalid_argument(
            "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and"
            f" 'bool_false_true' {where}"
        )
    if len(getattr(control, given[0])) != 2:
        raise invalid_argument(f"sequence batching control '{given[0]}' must have exactly 2 entries {where}")


def _check_state(state: ModelSequenceBatching.State, model: str) -> None:
    if not state.input_name or not state.output_name:
        raise invalid_argument(
            f"sequence batching state must specify 'input_name' and 'output_name' for {model}, got"
            f" '{state.input_name}' and '{state.output_name}'"
        )
    name = state.input_name
    if state.data_type == model_config_pb2.TYPE_INVALID:
        raise invalid_argument(f"sequence batching state '{name}' must specify 'data_type' for {model}")
    if any(size < 1 and size != _VARIABLE for size in state.dims):
        raise invalid_argument(
            f"sequence batching state '{name}' dimension must be integer >= 1, or {_VARIABLE} to indicate a"
            f" variable-size dimension for {model}"
        )
    if len(state.initial_state) > 1:
        raise invalid_argument(
            f"initial_state field for state input '{name}' must contain exactly one or zero element. Found"
            f" '{len(state.initial_state)}' elements."
        )
    for initial in state.initial_state:
        _check_initial_state(initial, state)


def _check_initial_state(initial: ModelSequenceBatching.InitialState, state: ModelSequenceBatching.State) -> None:
    name = state.input_name
    if initial.data_type != state.data_type:
        raise invalid_argument(
            f"The data type used for 'initial_state' field of state '{name}' does not match the state data type."
        )
    if not initial.name:
        raise invalid_argument(f"Field 'name' must be set when using initial_state for state input '{name}'.")
    if len(initial.dims) != len(state.dims):
        raise invalid_argument(
            f"Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions for state input"
            f" '{name}'. {len(initial.dims)} != {len(state.dims)}"
        )
    for size, expected in zip(initial.dims, state.dims, strict=True):
        if size == _VARIABLE:
            raise invalid_argument(f"'initial_state' field for state input name '{name}' contains variable dimensions.")
        if expected not in (_VARIABLE, size):
            raise invalid_argument(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim description. {size} !="
                f" {expected}"
            )
    if initial.WhichOneof("state_data") is None:
        raise invalid_argument(f"initial_state setting expects state'{name}' to have state_data set")


def _check_tensors_apart(message: ModelConfig) -> None:
    """Each tensor of the model is one of the requests', a control, or a state."""
    batching = message.sequence_batching
    controls = [entry.name for entry in batching.control_input]
    inputs = [state.input_name for state in batching.state]
    _check_once("State input name", inputs)
    _check_once("State output name", [state.output_name for state in batching.state])
    for name in controls:
        if name in inputs:
            raise _twofold(name, "a sequence batching control and a state input", message.name)
    for tensor in message.input:
        if tensor.name in controls:
            raise _twofold(tensor.name, "an input and a sequence batching control", message.name)
        if tensor.name in inputs:
            raise _twofold(tensor.name, "an input and a state input", message.name)


def _check_once(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise invalid_argument(f"{what} '{name}' specified more than once.")
        seen.add(name)


def _twofold(tensor: str, what: str, model: str) -> ServeError:
    return invalid_argument(
        f"tensor '{tensor}' is {what} for {model}; the server gives the model its controls and states, leave the"
        " tensor out of 'input'"
    )


def _kind_name(kind: int) -> str:
    return _Control.Kind.Name(kind)
