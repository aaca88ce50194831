"""Bodies that another call takes."""

from __future__ import annotations

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.errors import internal
from rocserve.core.model_config import InputConfig, ModelConfig
from rocserve.frontends.http.misdirected import advised

PHOTOS = ModelConfig("m", inputs=(InputConfig("ENCODED", DataType.BYTES, (1,)),))
IMAGE = ModelConfig("m", inputs=(InputConfig("x", DataType.FP32, (3, 8, 8)),))
PIXELS = ModelConfig("a b", inputs=(InputConfig("x", DataType.FP32, (3, 8, 8)), InputConfig("y", DataType.FP32, (1,))))


@pytest.mark.parametrize(
    ("body", "config", "advice"),
    [
        (b"\xff\xd8\xff\xe0..", PHOTOS, "the body is a JPEG file: send it in a form, curl -F ENCODED=@FILE"),
        (b"\x89PNG\r\n", PHOTOS, "the body is a PNG file: send it in a form, curl -F ENCODED=@FILE"),
        (b"\x89PNG\r\n", PIXELS, "the body is a PNG file, and the model takes x FP32 [3,8,8], y FP32 [1]"),
        (
            b"RIFF\x0a\0\0\0WEBPVP8 ",
            IMAGE,
            "the body is a WebP file, and the model takes x FP32 [3,8,8]: --preprocess, or the parameter `preprocess`,"
            " generates a model that takes pictures",
        ),
        (b"RIFF\x0a\0\0\0WAVEfmt ", IMAGE, ""),
        (b'{"x": [1]}', PIXELS, "the form of the generate call: send it to /v2/models/a%20b/generate"),
        (b'{"x": [1], "inputs": []}', PIXELS, ""),
        (b'{"z": [1]}', PIXELS, ""),
        (b'["x"]', PIXELS, ""),
        (b"{}", PIXELS, ""),
        (b"", PIXELS, ""),
        (b"x=1", PIXELS, ""),
        (b"[" * 100_000, PIXELS, ""),
    ],
)
def test_the_call_that_takes_the_body_is_named(body: bytes, config: ModelConfig, advice: str) -> None:
    text = advised(internal("no request"), body, config).text
    assert text.startswith("no request; " if advice else "no request")
    assert advice in text
    assert bool(advice) == (text != "no request")
