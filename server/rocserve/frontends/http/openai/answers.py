"""Writes the bodies of answers in OpenAI's form."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from rocserve.core.steps import Steps
from rocserve.frontends.http.json_text import SLICE, SLICE_BYTES, json_bytes
from rocserve.frontends.http.openai.bodies import RerankBody
from rocserve.frontends.http.openai.calls import TextOutputs


def embeddings_answer(model: str, outputs: TextOutputs, is_base64: bool) -> Steps[list[bytes]]:
    """Return the body in pieces. In steps, because a client may ask for millions of numbers."""
    pieces = [b'{"object":"list","data":[']
    # Nine digits tell all values of FP32 apart. The json module writes FP64's seventeen, in three times the time.
    form = f"[{','.join(['%#.9g'] * outputs.values.shape[1])}]"
    written = 0
    for place, vector in enumerate(outputs.values):
        value = b'"%b"' % base64.b64encode(vector.tobytes()) if is_base64 else _numbers(form, vector)
        pieces.append(b'%b{"object":"embedding","index":%d,"embedding":%b}' % (b"," if place else b"", place, value))
        written += len(vector)
        if written >= SLICE:
            written = 0
            yield
    end = {"model": model, "usage": _usage(outputs)}
    pieces.append(b"]," + json_bytes(end)[1:])
    return pieces


def _numbers(form: str, vector: np.ndarray[Any, Any]) -> bytes:
    # Larger numbers may end with their point, which JSON forbids.
    if np.abs(vector).max(initial=0) < 1e8:
        return (form % tuple(vector.tolist())).encode()
    return json_bytes(vector.tolist())


def rerank_answer(model: str, outputs: TextOutputs, body: RerankBody) -> Steps[list[bytes]]:
    """Return the body in pieces: the documents with the highest scores first, of equal ones the first. In steps,
    because documents may be long."""
    scores = outputs.values[:, 0]
    pieces = [b'{"model":' + json_bytes(model) + b',"results":[']
    for rank, place in enumerate(np.argsort(-scores, kind="stable")[: body.top_n].tolist()):
        result = json_bytes({"index": place, "relevance_score": float(scores[place])})
        pieces.append(b"," + result[:-1] if rank else result[:-1])
        if body.returns_documents:
            text = body.documents[place]
            pieces.append(b',"document":{"text":"')
            # JSON escapes each character by itself, so the text may be cut anywhere.
            for begin in range(0, len(text), SLICE_BYTES):
                pieces.append(json_bytes(text[begin : begin + SLICE_BYTES])[1:-1])
                yield
            pieces.append(b'"}')
        pieces.append(b"}")
    # Jina's clients read `usage`, Cohere's `meta`.
    end = {"usage": _usage(outputs), "meta": {"tokens": {"input_tokens": outputs.token_count}}}
    return [*pieces, b"]," + json_bytes(end)[1:]]


def _usage(outputs: TextOutputs) -> dict[str, int]:
    return {"prompt_tokens": outputs.token_count, "total_tokens": outputs.token_count}
