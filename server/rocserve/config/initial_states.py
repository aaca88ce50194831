"""The files that the states of sequences begin with."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rocserve.config.model_folder import ModelFolder
from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import InitialState, ModelConfig

INITIAL_STATE_FOLDER = "initial_state"


def read_initial_states(config: ModelConfig, folder: ModelFolder) -> Mapping[str, bytes]:
    """By the state's input name, what its `initial_state` names in the model's folder; none for zeros.

    Raises:
        ServeError: INVALID_ARGUMENT, a file is missing, elsewhere, or too short.
    """
    batching = config.sequence_batching
    if batching is None:
        return {}
    return {
        state.input_name: _content(initial, folder)
        for state in batching.states
        for initial in state.initial_states
        if initial.data_file
    }


def _content(initial: InitialState, folder: ModelFolder) -> bytes:
    path = folder.resolve(initial.data_file, f"initial state '{initial.name}'", INITIAL_STATE_FOLDER)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise invalid_argument(
            f"the file '{initial.data_file}' of initial state '{initial.name}' cannot be read in the model's folder"
            f" '{INITIAL_STATE_FOLDER}': {error.strerror}"
        ) from None
    if initial.datatype is DataType.BYTES:
        return content
    expected = math.prod(initial.dims) * initial.datatype.itemsize
    if len(content) < expected:
        raise invalid_argument(
            f"initial_state setting expects {expected} bytes, but the data provided from {initial.data_file}only has"
            f" {len(content)} bytes."
        )
    return content[:expected]
