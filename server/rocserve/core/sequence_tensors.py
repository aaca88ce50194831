"""The tensors that the server adds to the requests of a sequence model, and those that it takes out of the answers."""

from __future__ import annotations

from dataclasses import replace

from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig, SequenceBatching


def control_inputs(batching: SequenceBatching) -> tuple[InputConfig, ...]:
    """One value a row each."""
    return tuple(
        InputConfig(entry.name, entry.controls[0].datatype, (1,)) for entry in batching.control_inputs if entry.controls
    )


def state_inputs(batching: SequenceBatching) -> tuple[InputConfig, ...]:
    return tuple(InputConfig(state.input_name, state.datatype, state.dims) for state in batching.states)


def state_outputs(batching: SequenceBatching) -> tuple[OutputConfig, ...]:
    return tuple(OutputConfig(state.output_name, state.datatype, state.dims) for state in batching.states)


def with_sequence_tensors(config: ModelConfig) -> ModelConfig:
    """The configuration as the model itself sees it: controls and states are inputs and outputs like all others.

    Where the inputs or outputs are to be completed from the model, they stay empty.
    """
    batching = config.sequence_batching
    if batching is None:
        return config
    added = (*control_inputs(batching), *state_inputs(batching)) if config.inputs else ()
    named = {output.name for output in config.outputs}
    kept = tuple(output for output in state_outputs(batching) if output.name not in named) if config.outputs else ()
    return replace(config, inputs=(*config.inputs, *added), outputs=(*config.outputs, *kept))
