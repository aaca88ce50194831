"""The steps of one ensemble, without looking at its members: every tensor is written, read and reachable.

Rules and words are Triton's (its model_config_utils). Checks against the members are in ensemble_checks.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rocserve.core.errors import invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig


@dataclass(slots=True)
class _Tensor:
    is_output: bool = False
    """Whether a step writes it."""
    ready: bool = False
    reads: list[str] = field(default_factory=list)
    """The tensors that the step which writes it reads."""
    feeds: list[str] = field(default_factory=list)
    """The tensors that the steps which read it write."""


def check_ensemble_scheduling(message: ModelConfig) -> None:
    """Raises: ServeError INVALID_ARGUMENT with the first fault of the ensemble's own configuration."""
    _check_other_fields(message)
    tensors = _build_graph(message)
    _mark_ready(message, tensors)
    for output in message.output:
        _check_output(output.name, message, tensors)
    outputs = {output.name for output in message.output}
    for name, tensor in tensors.items():
        if name not in outputs and (not tensor.ready or not tensor.feeds):
            raise invalid_argument(f"ensemble tensor '{name}' is unused in ensemble '{message.name}'")


def _check_other_fields(message: ModelConfig) -> None:
    name = message.name
    if message.instance_group:
        raise invalid_argument(f"instance group should not be specified for ensemble '{name}'")
    if message.HasField("optimization"):
        raise invalid_argument(f"optimization should not be specified for ensemble '{name}'")
    if not message.ensemble_scheduling.step:
        raise invalid_argument(f"must specify 'step' for ensemble '{name}'")


def _build_graph(message: ModelConfig) -> dict[str, _Tensor]:
    tensors: dict[str, _Tensor] = {}
    for index, step in enumerate(message.ensemble_scheduling.step):
        for what, given in (
            ("model_name", step.model_name),
            ("input_map", step.input_map),
            ("output_map", step.output_map),
        ):
            if not given:
                raise invalid_argument(f"must specify '{what}' in step {index} of ensemble '{message.name}'")
        for written in step.output_map.values():
            tensor = tensors.setdefault(written, _Tensor())
            if tensor.is_output:
                raise invalid_argument(
                    f"ensemble tensor '{written}' can appear in an output map only once for ensemble"
                    f" '{message.name}' step {index}"
                )
            tensor.is_output = True
        for read in step.input_map.values():
            source = tensors.setdefault(read, _Tensor())
            for written in step.output_map.values():
                tensors[written].reads.append(read)
                source.feeds.append(written)
    return tensors


def _mark_ready(message: ModelConfig, tensors: dict[str, _Tensor]) -> None:
    pending: list[str] = []
    for ensemble_input in message.input:
        if ensemble_input.name not in tensors:
            raise invalid_argument(f"ensemble input '{ensemble_input.name}' for ensemble {message.name}' is not used")
        tensors[ensemble_input.name].ready = True
        pending.append(ensemble_input.name)
    while pending:
        for name in tensors[pending.pop()].feeds:
            tensor = tensors[name]
            if not tensor.ready and all(tensors[read].ready for read in tensor.reads):
                tensor.ready = True
                pending.append(name)


def _check_output(name: str, message: ModelConfig, tensors: dict[str, _Tensor]) -> None:
    if name not in tensors:
        raise invalid_argument(f"ensemble output '{name}' for ensemble {message.name}' is not used")
    if tensors[name].ready:
        return
    text = f"output '{name}' for ensemble '{message.name}' is not written"
    source = _unready_source(name, tensors)
    if source != name:
        text += f": at least one of its depending tensors, '{source}', is not connected"
    raise invalid_argument(text)


def _unready_source(name: str, tensors: dict[str, _Tensor]) -> str:
    """The furthest tensor up the graph that keeps `name` from being ready; cycles end the search."""
    seen: set[str] = set()
    while True:
        unready = [read for read in tensors[name].reads if not tensors[read].ready and read not in seen]
        if not unready:
            return name
        name = unready[0]
        seen.add(name)
