"""Holds the answers that clients return."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rocserve.core.parameters import ParameterValue
from rocserve_client.tensors import Array, Classification, parse_classes


@dataclass(frozen=True, slots=True, eq=False)
class InferResult:
    """The answer to an inference request; `result["NAME"]` is the array of an output.

    Arrays are read-only views on the received message, which lives as long as they do; arrays of BYTES are copies.
    """

    model_name: str
    model_version: str
    request_id: str
    parameters: Mapping[str, ParameterValue]
    outputs: Mapping[str, Array]

    @property
    def is_last(self) -> bool:
        """Return whether this is the last answer to a request of a stream. `mark_last` ensures that there is one."""
        return self.parameters.get("triton_final_response") is True

    def __getitem__(self, name: str) -> Array:
        try:
            return self.outputs[name]
        except KeyError:
            raise KeyError(f"no output '{name}' in the answer, which has {sorted(self.outputs)}") from None

    def classes(self, name: str) -> tuple[tuple[Classification, ...], ...]:
        """Return the classes of an output requested with `Output(name, classification=k)`: a row per batch element,
        best class first. A model without batching gives one row. Raises ValueError if the output has no classes."""
        array = self[name]
        try:
            return parse_classes(array)
        except ValueError as error:
            raise ValueError(
                f"output '{name}' holds no classes; ask for it with Output(..., classification=k)"
            ) from error


@dataclass(frozen=True, slots=True)
class ServerMetadata:
    name: str
    version: str
    extensions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorMetadata:
    name: str
    datatype: str
    shape: tuple[int, ...]
    """With the batch dimension; -1 = any size."""


@dataclass(frozen=True, slots=True)
class ModelMetadata:
    name: str
    versions: tuple[str, ...]
    platform: str
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    properties: Mapping[str, str] = field(default_factory=dict)
    """How the version runs: `engine`, `engine_reason`, and what the engine reports."""


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One model version in the repository index. If a model was never loaded, version and state are ""."""

    name: str
    version: str
    state: str
    """UNKNOWN, LOADING, CHECKING, READY, UNLOADING or UNAVAILABLE."""
    reason: str


@dataclass(frozen=True, slots=True)
class Duration:
    """The number of times that something happened, and the total time that it took."""

    count: int = 0
    ns: int = 0

    @property
    def mean_us(self) -> float:
        """Mean in microseconds; 0 if the count is 0."""
        return self.ns / self.count / 1000 if self.count else 0.0


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """Executions of one batch size."""

    batch_size: int
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration


@dataclass(frozen=True, slots=True)
class ModelStatistics:
    """The counters of one model version since its load."""

    name: str
    version: str
    last_inference_ms: int
    """Milliseconds since the epoch; 0 = never."""
    inference_count: int
    """Batch elements that the model ran."""
    execution_count: int
    """Batches that the model ran."""
    success: Duration
    fail: Duration
    queue: Duration
    compute_input: Duration
    compute_infer: Duration
    compute_output: Duration
    cache_hit: Duration
    cache_miss: Duration
    batches: tuple[BatchStatistics, ...] = field(default=())
