"""Texts to vectors: which model makes them, in which requests, and the answers in the order of the texts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np

from rocserve.protocol import model_config_pb2 as pb
from rocserve_client import calls
from rocserve_client.errors import DeadlineExceeded, Internal, InvalidArgument
from rocserve_client.messages import RequestOptions
from rocserve_client.results import InferResult
from rocserve_client.tensors import Array

REQUESTS_AT_ONCE = 8
"""Requests of one call that the server has at once: enough that tokenizer, encoder and pooling work at the same time,
and so few that one call does not fill a model's queue."""
_TEXT, _EMBEDDING = "TEXT", "EMBEDDING"
_EXPECTED = "input TEXT (BYTES [1]) and output EMBEDDING (FP32 [width])"


def generated_name(model: str) -> str:
    """Return the name of the ensemble that `preprocess: text` generates for an encoder."""
    return f"{model}_text"


def makes_vectors(config: pb.ModelConfig) -> bool:
    """Return whether a model takes a text alone, and returns its vector."""
    text = any(entry.name == _TEXT and _is(entry, pb.TYPE_STRING) and list(entry.dims) == [1] for entry in config.input)
    others = any(entry.name != _TEXT and not entry.optional for entry in config.input)
    vector = any(
        entry.name == _EMBEDDING and _is(entry, pb.TYPE_FP32) and len(entry.dims) == 1 for entry in config.output
    )
    return text and vector and not others


def no_vectors(config: pb.ModelConfig) -> InvalidArgument:
    """Return the error for a model that does not make vectors, and for which no ensemble does."""
    inputs = ", ".join(entry.name for entry in config.input)
    outputs = ", ".join(entry.name for entry in config.output)
    return InvalidArgument(
        f"model '{config.name}' does not turn texts into vectors: expected {_EXPECTED}, got inputs {inputs} and outputs"
        f" {outputs}; beside a tokenizer.json the parameter `preprocess: text` makes such a model of an encoder"
    )


class Embedding:
    """The requests for the vectors of some texts. The clients send them, and give the results in their order."""

    def __init__(self, config: pb.ModelConfig, texts: str | Sequence[str], options: RequestOptions) -> None:
        """`config`: of a model that makes vectors. Raises InvalidArgument if something else than texts is given."""
        self._config = config
        self._options = options
        self._is_one = isinstance(texts, str)
        self._texts = [texts] if isinstance(texts, str) else list(texts)
        for place, text in enumerate(self._texts):
            if not isinstance(text, str):
                raise InvalidArgument(f"texts[{place}] is a {type(text).__name__}, expected a str")
        # The encoder sees each row padded to its request's longest, so texts of like length go together.
        order = sorted(range(len(self._texts)), key=lambda place: len(self._texts[place]))
        rows = max(config.max_batch_size, 1)
        self._shares = [order[begin : begin + rows] for begin in range(0, len(order), rows)]
        self._order = order

    def calls(self) -> Iterator[calls.UnaryCall[InferResult]]:
        """Raises InvalidArgument if a text has no UTF-8 form."""
        batches = self._config.max_batch_size > 0
        for share in self._shares:
            rows = np.array([self._texts[place] for place in share], dtype=object)
            inputs = {_TEXT: rows[:, np.newaxis] if batches else rows}
            yield calls.infer(self._config.name, inputs, [_EMBEDDING], self._options)

    def vectors(self, results: Sequence[InferResult]) -> Array:
        """Return the vector of the text, or a row for each text. Raises Internal if an answer has other rows."""
        if not results:
            width = next(entry.dims[0] for entry in self._config.output if entry.name == _EMBEDDING)
            return np.empty((0, max(width, 0)), np.float32)
        parts = []
        for share, result in zip(self._shares, results, strict=True):
            part = result.outputs.get(_EMBEDDING, np.empty(0))
            if not part.size or part.size % len(share):
                raise Internal(f"model '{self._config.name}' gave {part.size} numbers for {len(share)} texts")
            parts.append(part.reshape(len(share), -1))
        found = np.concatenate(parts)
        ordered = np.empty_like(found)
        ordered[self._order] = found
        return ordered[0] if self._is_one else ordered


class TimeLeft:
    """The time of a call that sends several requests."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def seconds(self) -> float | None:
        """Return the timeout of the next request. Raises DeadlineExceeded if no time is left."""
        if self._end is None:
            return None
        left = self._end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("Deadline Exceeded")
        return left


def _is(entry: pb.ModelInput | pb.ModelOutput, datatype: pb.DataType) -> bool:
    return entry.data_type == datatype
