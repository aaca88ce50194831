"""Which encodings are taken, chosen and undone."""

from __future__ import annotations

import gzip
import zlib

import pytest

from rocserve.core.errors import ServeError
from rocserve.frontends.http.body import compressed, decompressed, request_encoding, response_encoding
from rocserve.frontends.http.request import HttpError


@pytest.mark.parametrize(
    ("accepted", "chosen"),
    [
        (None, "identity"),
        ("", "identity"),
        ("gzip", "gzip"),
        (" gzip", "gzip"),
        ("gzip, deflate", "gzip"),
        ("deflate, gzip", "deflate"),
        ("gzip;q=0.5, deflate", "deflate"),
        ("gzip;q=0", "identity"),
        ("gzip;q=x, deflate;q=0.1", "deflate"),
        ("identity, gzip", "identity"),
        ("br", "identity"),
        ("*", "identity"),
        ("GZIP", "identity"),
    ],
)
def test_the_encoding_of_an_answer(accepted: str | None, chosen: str) -> None:
    assert response_encoding(accepted) == chosen


def test_the_encoding_of_a_request() -> None:
    assert request_encoding("identity") == "identity"
    assert request_encoding("deflate") == "deflate"
    with pytest.raises(HttpError, match="Unsupported compression type") as caught:
        request_encoding("br")
    assert caught.value.status == 501
    assert caught.value.headers == {"Accept-Encoding": "gzip, deflate"}


def test_both_ways() -> None:
    assert gzip.decompress(compressed([b"a", memoryview(b"b")], "gzip")) == b"ab"
    assert zlib.decompress(compressed([b"a", b"b"], "deflate")) == b"ab"
    for encoding in ("gzip", "deflate"):
        assert decompressed(compressed([b"abc"], encoding), 3) == b"abc"
    assert decompressed(gzip.compress(b"abc" * 1000)[:-8], 10_000) == b"abc" * 1000


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "nothing to be decompressed"),
        (b"no gzip", "the request's body is not valid gzip or deflate data: "),
        (
            gzip.compress(bytes(100_000_000)),
            "Decompressed data size exceeds the maximum allowed value of 1000 bytes. Use --http-max-input-size to",
        ),
    ],
)
def test_what_cannot_be_decompressed(data: bytes, text: str) -> None:
    with pytest.raises(ServeError) as caught:
        decompressed(data, 1000)
    assert caught.value.text.startswith(text)
