"""Damaged files by the hundred: each gives its own pixels or an error that names the fault, nothing else."""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from support import pictures

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.header import ImageError
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions

SEEDS = {
    "baseline": pictures.jpeg(90, 70),
    "progressive": pictures.jpeg(90, 70, progressive=True),
    "grey": pictures.jpeg(90, 70, mode="L"),
    "inks": pictures.ycck_jpeg(90, 70),
    "restarts": pictures.jpeg(90, 70, restart_marker_rows=1),
    "turned": pictures.turned_jpeg(6, 90, 70),
    "png": pictures.saved(pictures.colours(90, 70), "PNG"),
    "palette": pictures.saved(pictures.colours(90, 70), "PNG", mode="P"),
    "interlaced": pictures.interlaced_png(pictures.colours(90, 70)),
}
ROUNDS = 60

Mutation = Callable[[bytes, np.random.Generator], bytes]


def change_bytes(data: bytes, random: np.random.Generator) -> bytes:
    changed = bytearray(data)
    for place in random.integers(len(data), size=random.integers(1, 9)):
        changed[place] = random.integers(256)
    return bytes(changed)


def change_header(data: bytes, random: np.random.Generator) -> bytes:
    changed = bytearray(data)
    changed[random.integers(2, min(len(data), 700))] = random.integers(256)
    return bytes(changed)


def cut_off(data: bytes, random: np.random.Generator) -> bytes:
    return data[: random.integers(len(data))] + bytes(random.integers(2) * 100)


def cut_out(data: bytes, random: np.random.Generator) -> bytes:
    start = random.integers(len(data))
    return data[:start] + data[start + random.integers(1, 60) :]


def repeat(data: bytes, random: np.random.Generator) -> bytes:
    start = random.integers(len(data))
    end = start + random.integers(1, 60)
    return data[:end] + data[start:end] + data[end:]


def sealed(data: bytes, change: Callable[[bytes, bytes], bytes]) -> bytes:
    """A PNG with chunks changed (by name and body) and their checksums right again, so that libpng gets to see them."""
    parts, position = [data[:8]], 8
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        name, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        parts.append(pictures.png_chunk(name, change(name, body)))
        position += 12 + length
    return b"".join(parts)


def change_sealed_header(data: bytes, random: np.random.Generator) -> bytes:
    """Sides stay small enough to be decoded."""

    def change(name: bytes, body: bytes) -> bytes:
        if name != b"IHDR":
            return body
        place = random.choice([3, 7, 8, 9, 12])
        return body[:place] + bytes([random.integers(17)]) + body[place + 1 :]

    return sealed(data, change)


def change_sealed_data(data: bytes, random: np.random.Generator) -> bytes:
    return sealed(data, lambda name, body: change_bytes(body, random) if name in (b"IDAT", b"PLTE") else body)


def change_rows(data: bytes, random: np.random.Generator) -> bytes:
    """Within the compressed stream, which stays sound: filters and levels, and more or fewer of them."""

    def change(name: bytes, body: bytes) -> bytes:
        if name != b"IDAT":
            return body
        mutation = (change_bytes, cut_out, repeat)[random.integers(3)]
        return zlib.compress(mutation(zlib.decompress(body), random))

    return sealed(data, change)


PNG_SEEDS = ("png", "palette", "interlaced")


@pytest.mark.parametrize(
    ("seed", "mutation"),
    [
        *itertools.product(SEEDS, (change_bytes, change_header, cut_off, cut_out, repeat)),
        *itertools.product(PNG_SEEDS, (change_sealed_header, change_sealed_data, change_rows)),
    ],
)
def test_a_damaged_file_gives_its_own_pixels_or_an_error(seed: str, mutation: Mutation) -> None:
    options = DecoderOptions(max_pixels=2_000_000, exif=True)
    decoder = Decoder(ColorFormat.RGB24, options)
    good = SEEDS[seed]
    expected = decoder.decode(good).pixels
    random = np.random.default_rng(list(seed.encode()))
    outcomes = {"pixels": 0, "error": 0}
    for _ in range(ROUNDS):
        damaged = mutation(good, random)
        try:
            first = decoder.decode(damaged).pixels
        except ImageError as error:
            assert str(error)
            outcomes["error"] += 1
        else:
            # What is left in memory by another picture must not show: the same file gives the same again.
            decoder.decode(SEEDS["inks"])
            np.testing.assert_array_equal(decoder.decode(damaged).pixels, first)
            assert first.shape[2] == 3
            outcomes["pixels"] += 1
    assert outcomes["error"]
    np.testing.assert_array_equal(decoder.decode(good).pixels, expected)
