"""The messages between the server and a worker. Each is a frozen dataclass; `wire.py` says how they travel.

Control messages go over the worker's control socket, one at a time: Load -> Loaded | LoadFailed,
WarmUp -> WarmedUp | LoadFailed, Unload -> (the worker ends). Execute and its answers go over the channel of an
instance; their tensors lie in the channel's shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InstanceKind, ModelConfig, WarmupSample
from rocserve.core.requests import Signature


@dataclass(frozen=True, slots=True)
class Load:
    """Load a model version. The config may lack inputs and outputs, to be completed from the signature."""

    model_name: str
    version: int
    model_folder: str
    version_folder: str
    model_file: str
    engine: str
    """The engine's module."""
    config: ModelConfig
    instance_kind: InstanceKind
    device: int | None
    instance_count: int


@dataclass(frozen=True, slots=True)
class Loaded:
    signature: Signature
    load_ns: int


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Loading or warming up failed; the worker ends by itself."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Run the samples (or, without any, what the engine chooses); the config is now complete."""

    config: ModelConfig
    samples: tuple[WarmupSample, ...]


@dataclass(frozen=True, slots=True)
class WarmedUp:
    warm_up_ns: int


@dataclass(frozen=True, slots=True)
class Unload:
    """End, after the batch in hand."""


@dataclass(frozen=True, slots=True)
class TensorExtent:
    """A tensor in shared memory."""

    name: str
    datatype: DataType
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the channel's input or output memory."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the inputs of a batch lie and what is wanted of it; equal for every batch of the same shapes."""

    inputs: tuple[TensorExtent, ...]
    requested_outputs: tuple[str, ...]
    request_sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Execute:
    batch_id: int
    layout: BatchLayout


@dataclass(frozen=True, slots=True)
class RequestFailure:
    request_index: int
    code: int
    text: str


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """Where the outputs of a batch lie."""

    outputs: tuple[TensorExtent, ...]
    element_offsets: tuple[tuple[int, ...], ...] = ()
    """For each BYTES output of several requests: the byte offset at which each one's part begins, and the end."""
    failures: tuple[RequestFailure, ...] = ()


@dataclass(frozen=True, slots=True)
class Executed:
    batch_id: int
    input_end_ns: int
    """time.monotonic_ns() when the engine began."""
    output_start_ns: int
    """... when it ended."""
    compute_end_ns: int
    """... when the outputs lay in shared memory."""
    layout: ResultLayout


@dataclass(frozen=True, slots=True)
class ExecuteFailed:
    """The whole batch failed; the worker goes on."""

    batch_id: int
    code: int
    text: str


ControlRequest = Load | WarmUp | Unload
ControlReply = Loaded | LoadFailed | WarmedUp
ExecutionReply = Executed | ExecuteFailed
