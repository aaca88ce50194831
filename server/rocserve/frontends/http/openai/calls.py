"""Sends the texts of one call to a model as infer requests, several rows in each, and collects their outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from rocserve.core.errors import internal
from rocserve.core.parameters import NO_PARAMETERS
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput
from rocserve.core.responses import InferResponse
from rocserve.core.tensors import Buffer, encode_bytes_elements
from rocserve.frontends.http.divided_call import divide
from rocserve.frontends.http.inference import HttpParts, with_forwarded_headers
from rocserve.frontends.http.openai.bodies import Ids
from rocserve.frontends.http.openai.models import IDS, QUERY, TEXT, TOKEN_COUNT, TextModel
from rocserve.frontends.http.request import Request


@dataclass(frozen=True, slots=True)
class TextOutputs:
    """The outputs for all texts of a call, in the order of the texts."""

    values: np.ndarray[Any, np.dtype[np.float32]]
    """A row for each text."""
    token_count: int
    """Tokens of all texts; 0 if the model does not count them."""


@dataclass(frozen=True, slots=True)
class Rows:
    """One infer request: which texts it has, and its inputs."""

    places: Sequence[int]
    """Indices of the texts in the call."""
    inputs: Sequence[tuple[str, str, tuple[int, ...], Buffer]]
    """Name, datatype, shape of one row, elements of all rows."""


def rows_of_texts(model: TextModel, texts: Sequence[str], query: str | None = None) -> Iterator[Rows]:
    """Share texts among requests. Texts of like length go together: the encoder sees each row padded to the request's
    longest."""
    ordered = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    for places in _shares(model, ordered):
        inputs = [(TEXT, "BYTES", (1,), encode_bytes_elements(texts[place] for place in places))]
        if query is not None:
            inputs.append((QUERY, "BYTES", (1,), encode_bytes_elements([query] * len(places))))
        yield Rows(places, inputs)


def rows_of_ids(model: TextModel, ids: Sequence[Ids]) -> Iterator[Rows]:
    """Share arrays of token ids among requests. Only arrays of equal length share a request."""
    ordered = sorted(range(len(ids)), key=lambda place: len(ids[place]))
    for length, group in groupby(ordered, lambda place: len(ids[place])):
        for places in _shares(model, list(group)):
            elements = np.stack([ids[place] for place in places]).tobytes()
            yield Rows(places, [(IDS, "INT64", (length,), elements)])


def _shares(model: TextModel, places: Sequence[int]) -> Iterator[Sequence[int]]:
    most = max(model.config.max_batch_size, 1)
    return (places[begin : begin + most] for begin in range(0, len(places), most))


async def run_texts(
    parts: HttpParts,
    request: Request,
    timeout: float | None,
    most_in_flight: int,
    model: TextModel,
    shares: Iterable[Rows],
) -> TextOutputs:
    """Return the outputs for all texts of a call. Parameters as those of `divide`. Raises the ServeError of the first
    infer request that failed."""
    sent: deque[Rows] = deque()
    outcomes: list[tuple[Rows, np.ndarray[Any, np.dtype[np.float32]]]] = []
    tokens = 0

    def requests() -> Iterator[InferRequest]:
        for rows in shares:
            sent.append(rows)
            yield infer_request(parts, request, model, rows)

    def take(answer: InferResponse) -> None:
        nonlocal tokens
        rows = sent.popleft()
        outcomes.append((rows, _values(model, answer, len(rows.places))))
        if model.counts_tokens:
            tokens += int(np.frombuffer(_output(answer, TOKEN_COUNT), "<i4").sum())

    await divide(parts, request, timeout, most_in_flight, requests(), take)
    if len({part.shape[1] for _, part in outcomes}) > 1:
        raise internal(f"model '{model.config.name}' gave vectors of different lengths for the texts of one call")
    values = np.concatenate([part for _, part in outcomes])
    order = np.concatenate([rows.places for rows, _ in outcomes])
    ordered = np.empty_like(values)
    ordered[order] = values
    return TextOutputs(ordered, tokens)


def infer_request(parts: HttpParts, request: Request, model: TextModel, rows: Rows) -> InferRequest:
    """Return the infer request of some rows of a call."""
    config = model.config
    lead = (len(rows.places),) if config.max_batch_size > 0 else ()
    inputs = [InputHead(name, datatype, (*lead, *shape), NO_PARAMETERS) for name, datatype, shape, _ in rows.inputs]
    names = [model.output.value, *([TOKEN_COUNT] if model.counts_tokens else [])]
    outputs = [RequestedOutput(name, NO_PARAMETERS) for name in names]
    head = with_forwarded_headers(parts.reader.head(config.name, "", inputs, outputs), parts.forwarding, request)
    return InferRequest(head, "", [elements for *_, elements in rows.inputs])


def _values(model: TextModel, answer: InferResponse, count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    values = np.frombuffer(_output(answer, model.output.value), "<f4")
    if not values.size or values.size % count:
        raise internal(f"model '{model.config.name}' gave {values.size} elements for {count} texts")
    if not np.isfinite(values).all():
        raise internal(
            f"model '{model.config.name}' gave NaN or infinity, which JSON cannot represent; the encoder overflows its"
            " precision, or its weights are damaged"
        )
    return values.reshape(count, -1)


def _output(answer: InferResponse, name: str) -> Buffer:
    return next(data for head, data in zip(answer.head.outputs, answer.data, strict=True) if head.name == name)
