"""The wire codec: inference messages between bytes and plain data."""

from __future__ import annotations

from rocserve.frontends.grpc.request_codec import RequestDecoder
from rocserve.frontends.grpc.response_codec import ResponseEncoder


class InferCodec:
    """Decodes requests and encodes responses; its caches live as long as it does. Callable from several threads."""

    def __init__(self) -> None:
        decoder, encoder = RequestDecoder(), ResponseEncoder()
        # The methods themselves, so that each message pays for one call and not for two.
        self.decode_request = decoder.decode_request
        self.parts = encoder.parts
        self.stream_parts = encoder.stream_parts
        self.encode_stream_response = encoder.encode_stream_response
        self.encode_stream_error = encoder.encode_stream_error
