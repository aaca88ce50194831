"""Bounds the demands of one configuration on the machine: far above the needs of models, below the harm of others.
Settings that cost only when they are used (priority levels, sequence slots, the largest batch) have no bound."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rocserve.config.datatypes import datatype_of_number
from rocserve.core.errors import invalid_argument
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelOutput

MOST_CONFIG_BYTES = 1 << 20
"""Bytes of a configuration. Ensembles of hundreds of steps need a tenth; reading a text of this size takes seconds."""
MOST_LABEL_BYTES = 16 << 20
MOST_LABELS = 1_000_000
"""Lines of a label file, which the server holds in memory. The largest vocabularies of models have a quarter of it."""
MOST_TENSORS = 1024
"""Inputs of a model, and outputs. The layout of a batch must fit into one message to a worker."""
MOST_STEPS = 1024
"""Steps of an ensemble."""
MOST_DIMS = 32
"""NumPy before version 2 supports no more."""
MOST_SAMPLE_BYTES = (1 << 31) - 1
"""Bytes of all warm-up samples, and of a sequence's initial state; no request can be larger either."""


def check_bounds(message: ModelConfig) -> None:
    """Raise ServeError (INVALID_ARGUMENT) with the first exceeded bound and the configured number."""
    name = message.name
    _check_number(f"model '{name}' has", len(message.input), "inputs", MOST_TENSORS)
    _check_number(f"model '{name}' has", len(message.output), "outputs", MOST_TENSORS)
    tensors: tuple[ModelInput | ModelOutput, ...] = (*message.input, *message.output)
    for tensor in tensors:
        what = "input" if isinstance(tensor, ModelInput) else "output"
        who = f"{what} '{tensor.name}' of model '{name}' has"
        for dims in (tensor.dims, tensor.reshape.shape):
            _check_number(who, len(dims), "dims", MOST_DIMS)
            listed = f"dims [{','.join(map(str, dims))}], which are "
            # The limit of 64-bit sizes and offsets.
            _check_number(who, _nbytes(dims, tensor.data_type), "bytes", (1 << 63) - 1, listed)
    total = 0
    for sample in message.model_warmup:
        who = f"warm-up sample '{sample.name}' of model '{name}' has"
        # Each row is a request to the model, and more runs do not make a model warmer.
        _check_number(who, sample.count, "runs", 10_000)
        _check_number(who, sample.batch_size, "rows", 1_000_000)
        for given in sample.inputs.values():
            _check_number(who, len(given.dims), "dims", MOST_DIMS)
            total += _nbytes(given.dims, given.data_type) * max(sample.batch_size, 1)
    _check_number(f"the warm-up samples of model '{name}' have", total, "bytes", MOST_SAMPLE_BYTES)
    for state in message.sequence_batching.state:
        who = f"state '{state.input_name}' of model '{name}' has"
        initial = ((one.dims, one.data_type) for one in state.initial_state)
        for dims, data_type in ((state.dims, state.data_type), *initial):
            _check_number(who, len(dims), "dims", MOST_DIMS)
            _check_number(who, _nbytes(dims, data_type), "bytes", MOST_SAMPLE_BYTES)


def check_config_size(nbytes: int, source: str) -> None:
    """Check the size of a configuration's text. Raises as `check_bounds`."""
    if nbytes > MOST_CONFIG_BYTES:
        raise invalid_argument(f"{source} is larger than the {MOST_CONFIG_BYTES} bytes that a configuration may have")


def check_step_count(message: ModelConfig) -> None:
    """Check an ensemble's number of steps, before its steps are read. Raises as `check_bounds`."""
    _check_number(f"ensemble '{message.name}' has", len(message.ensemble_scheduling.step), "steps", MOST_STEPS)


def _nbytes(dims: Iterable[int], data_type: int) -> int:
    """Return the smallest size of a tensor, with variable dimensions counted as 1."""
    itemsize = datatype_of_number(data_type).itemsize if data_type else 1
    # An element of BYTES: its length and 16 random characters.
    return math.prod(max(dim, 1) for dim in dims) * (itemsize or 20)


def _check_number(who: str, number: int, what: str, most: int, before: str = "") -> None:
    if number > most:
        raise invalid_argument(f"{who} {before}{number} {what}, at most {most} are possible")
