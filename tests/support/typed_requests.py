"""Decodes requests in one call, as the handlers do in steps."""

from __future__ import annotations

from rocserve.core.requests import InferRequest
from rocserve.core.steps import result_of
from rocserve.frontends.grpc.codec import RequestDecoder, TypedRequest


def decoded(decoder: RequestDecoder, data: bytes) -> InferRequest:
    request = decoder.decode_request(data)
    return result_of(request.decode(lambda nbytes: None)) if isinstance(request, TypedRequest) else request
