"""Answers the calls of /v1."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np

from rocserve.core.errors import ServeError, internal
from rocserve.core.request_memory import Holding
from rocserve.core.steps import Steps
from rocserve.frontends.http.divided_call import MOST_IN_FLIGHT, read_body, send_json
from rocserve.frontends.http.inference import HttpParts, request_timeout
from rocserve.frontends.http.json_text import json_bytes
from rocserve.frontends.http.openai.answers import embeddings_answer, rerank_answer
from rocserve.frontends.http.openai.bodies import (
    EmbeddingsBody,
    Fault,
    RerankBody,
    attempted,
    read_embeddings,
    read_rerank,
)
from rocserve.frontends.http.openai.calls import (
    Rows,
    TextOutputs,
    rows_of_ids,
    rows_of_texts,
    run_texts,
)
from rocserve.frontends.http.openai.errors import FieldFault, openai_error
from rocserve.frontends.http.openai.models import TextModel, TextModels, TextOutput
from rocserve.frontends.http.request import JSON, Request, Response

_Body = TypeVar("_Body")


_Work = tuple[TextModel, Iterator[Rows], Callable[[TextOutputs], Steps[list[bytes]]]]
"""A call's model, its infer requests, and what writes the body of the answer, which may raise ServeError."""


@dataclass(eq=False)
class OpenAiService:
    """Answers in the form of OpenAI's API. On the event loop."""

    _parts: HttpParts
    _models: TextModels
    _most_in_flight: int = MOST_IN_FLIGHT
    """Infer requests of one call at once."""

    async def list_models(self) -> Response:
        """Answer in both forms that this URL has: OpenAI's list of the models of text, and KServe's of all names."""
        names = await self._models.names()
        entries = await self._models.entries(names)
        return Response(200, json_bytes({"object": "list", "data": entries, "models": names}), JSON)

    async def embed(self, request: Request) -> Response | None:
        return await self._answer(request, read_embeddings, self._embedding)

    async def rerank(self, request: Request) -> Response | None:
        return await self._answer(request, read_rerank, self._reranking)

    async def _answer(
        self,
        request: Request,
        read: Callable[[Mapping[str, Any]], _Body],
        prepare: Callable[[_Body], Awaitable[_Work]],
    ) -> Response | None:
        """Returns None if the answer has been sent."""
        parts, headers = self._parts, request.head.headers
        holding = Holding()
        try:
            try:
                timeout = request_timeout(headers, parts.settings.request_timeout_seconds)
                body = await read_body(parts, request, holding, partial(attempted, read))
                if isinstance(body, Fault):
                    raise FieldFault(body.member, body.text)
                model, shares, write = await prepare(body)
            except ServeError as error:
                parts.inference.refuse(error, str)
                raise
            outputs = await run_texts(parts, request, timeout, self._most_in_flight, model, shares)
            return await send_json(parts, request, outputs.values.nbytes, write(outputs))
        except ServeError as error:
            return openai_error(error)
        finally:
            parts.memory.requests.release(holding)

    async def _embedding(self, body: EmbeddingsBody) -> _Work:
        """Raises ServeError."""
        model = await self._models.find(body.model, TextOutput.EMBEDDING)
        _check_dimensions(model, model.width, body.dimensions)
        if body.ids and not model.takes_ids:
            raise FieldFault(
                "input",
                f"model '{model.config.name}': expected texts as input, got token ids; send the texts"
                " (LangChain's OpenAIEmbeddings: check_embedding_ctx_length=False)",
            )

        def write(outputs: TextOutputs) -> Steps[list[bytes]]:
            _check_dimensions(model, outputs.values.shape[1], body.dimensions)
            if body.dimensions is not None:
                outputs = _cut(outputs, body.dimensions)
            return embeddings_answer(model.config.name, outputs, body.is_base64)

        shares = rows_of_ids(model, body.ids) if body.ids else rows_of_texts(model, body.texts)
        return model, shares, write

    async def _reranking(self, body: RerankBody) -> _Work:
        """Raises ServeError."""
        model = await self._models.find(body.model, TextOutput.SCORE)
        self._check_query(body)
        _check_most_tokens(model, body.most_tokens)
        shares = rows_of_texts(model, body.documents, body.query)
        return model, shares, lambda outputs: rerank_answer(model.config.name, outputs, body)

    def _check_query(self, body: RerankBody) -> None:
        """Raise FieldFault if a small body would become a large one, because each document gets a copy of the query."""
        count, length = len(body.documents), len(body.query.encode())
        most = max(self._parts.settings.max_input_size // count, 1)
        if length > most:
            raise FieldFault(
                "query",
                f"query: expected at most {most} bytes with {count} documents (the model reads it with each), got"
                f" {length}; send fewer documents, or raise --http-max-input-size",
            )


def _check_most_tokens(model: TextModel, wanted: int | None) -> None:
    """Raise FieldFault if a client wants documents cut before the model cuts them."""
    # Parameter of a model: the number of tokens beyond which it cuts a text, or a query with its document.
    own = model.config.parameters.get("max_tokens", "")
    if wanted is None or (own.isdecimal() and wanted >= int(own)):
        return
    expected = f"at least {own}, where" if own.isdecimal() else "nothing, as only"
    raise FieldFault(
        "max_tokens_per_doc",
        f"max_tokens_per_doc: expected {expected} model '{model.config.name}' cuts a query with its document, got"
        f" {wanted}; leave it out, or set the encoder's parameter 'max_tokens'",
    )


def _check_dimensions(model: TextModel, width: int, wanted: int | None) -> None:
    """Raise FieldFault if the vectors of a model do not have, and may not be cut to, the length that a client wants.
    `width`: their length; -1 = not known yet."""
    if wanted is None or width in (-1, wanted):
        return
    # Parameter of a model: the lengths to which its vectors may be cut, or "any".
    allowed = model.config.parameters.get("matryoshka", "")
    lengths: list[int] = []
    if allowed and allowed != "any":
        try:
            lengths = [int(length) for length in allowed.split(",")]
        except ValueError:
            raise internal(
                f"model '{model.config.name}': parameter 'matryoshka': expected comma-separated numbers or 'any',"
                f" got '{allowed}'"
            ) from None
    if wanted < width and (allowed == "any" or wanted in lengths):
        return
    expected = f"at most {width}" if allowed == "any" else " or ".join(map(str, sorted({*lengths, width})))
    reason = "" if allowed else "; its files do not say that they may be cut (config.json: matryoshka_dimensions)"
    raise FieldFault(
        "dimensions",
        f"dimensions: expected {expected}, the length of the vectors of model '{model.config.name}', got"
        f" {wanted}{reason}",
    )


def _cut(outputs: TextOutputs, length: int) -> TextOutputs:
    """Cut vectors, and scale them to length 1 again; a vector of zeros stays unchanged."""
    if length == outputs.values.shape[1]:
        return outputs
    values = outputs.values[:, :length]
    norms = np.sqrt(np.square(values).sum(axis=1, keepdims=True))
    norms[norms == 0] = 1
    return TextOutputs(values / norms, outputs.token_count)
