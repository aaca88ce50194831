"""Decoding JPEGs: sizes, colours, and refused images. Hundreds of damaged files: each gives its own pixels or an error
that names the fault."""

from __future__ import annotations

import io
import itertools
import struct
import zlib
from collections.abc import Callable

import cv2
import numpy as np
import pytest
import turbojpeg
from PIL import Image
from support import pictures
from support.pictures import jpeg

from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.image_file import ImageError, ImageFile
from rocserve.backends.rocal.decoding.libturbojpeg import read_jpeg
from rocserve.backends.rocal.decoding.options import ColorFormat, DecoderOptions

UNSCALED = DecoderOptions(0, 0)


def with_frame(
    jpeg: bytes, width: int, height: int, precision: int = 8, components: int = 3, marker: int = 0xC0
) -> bytes:
    """The same JPEG with other numbers in its frame header."""
    header = jpeg.index(b"\xff\xc0")
    frame = struct.pack(">BHHB", precision, height, width, components)
    return jpeg[: header + 1] + bytes([marker]) + jpeg[header + 2 : header + 4] + frame + jpeg[header + 10 :]


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((500, 375), (1000, 1000), (2, 1)),
        ((1200, 800), (1000, 1000), (3, 4)),
        ((501, 10), (1000, 1000), (15, 8)),
        ((1000, 1000), (1000, 1000), (1, 1)),
        ((1001, 1), (1000, 1000), (7, 8)),
        ((8000, 8000), (1000, 1000), (1, 8)),
        ((300, 4000), (0, 1000), (1, 4)),
        ((300, 4000), (0, 0), (1, 1)),
    ],
)
def test_scaling_factor_is_the_largest_that_fits(
    size: tuple[int, int], limits: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert DecoderOptions(*limits).scaling_factor(*size) == expected


def test_sizes_are_rounded_up() -> None:
    decoder = Decoder(ColorFormat.RGB24, DecoderOptions(50, 50))
    # 7/8 of 57 and 33 is 49.875 and 28.875.
    assert decoder.decode(jpeg(57, 33)).pixels.shape == (29, 50, 3)


def test_an_image_that_not_even_an_eighth_fits_is_refused() -> None:
    with pytest.raises(ImageError, match="does not fit the decoder's 10x10"):
        Decoder(ColorFormat.RGB24, DecoderOptions(10, 10)).decode(jpeg(100, 100))


def test_unscaled_decoding_equals_pillow() -> None:
    encoded = jpeg(61, 43)
    decoded = Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded).pixels
    np.testing.assert_array_equal(decoded, np.asarray(Image.open(io.BytesIO(encoded))))


def test_color_formats() -> None:
    encoded = jpeg()
    rgb = Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded).pixels
    bgr = Decoder(ColorFormat.BGR24, UNSCALED).decode(encoded).pixels
    grey = Decoder(ColorFormat.U8, UNSCALED).decode(encoded).pixels
    np.testing.assert_array_equal(rgb[:, :, ::-1], bgr)
    assert grey.shape == (40, 60, 1)
    luma = rgb @ np.array([0.299, 0.587, 0.114])
    assert np.abs(grey[:, :, 0] - luma).mean() < 1.5


def test_grey_is_replicated_to_the_colour_channels() -> None:
    pixels = Decoder(ColorFormat.RGB24, UNSCALED).decode(jpeg(mode="L")).pixels
    assert pixels.shape == (40, 60, 3)
    np.testing.assert_array_equal(pixels[:, :, 0], pixels[:, :, 2])


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": 0}, {"restart_marker_rows": 1}])
def test_kinds_of_jpeg_that_must_work(options: dict[str, object]) -> None:
    pixels = Decoder(ColorFormat.RGB24, UNSCALED).decode(jpeg(**options)).pixels
    plain = Decoder(ColorFormat.RGB24, UNSCALED).decode(jpeg()).pixels
    assert np.abs(pixels.astype(int) - plain).mean() < 2


@pytest.mark.parametrize("name", ["444", "422", "420", "440", "411"])
def test_every_subsampling_of_chroma(name: str) -> None:
    encoded = turbojpeg.TurboJPEG().encode(
        pictures.colours(97, 71), pixel_format=turbojpeg.TJPF_RGB, jpeg_subsample=getattr(turbojpeg, f"TJSAMP_{name}")
    )
    decoded = Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded).pixels
    np.testing.assert_array_equal(decoded, np.asarray(Image.open(io.BytesIO(encoded))))


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_any_buffer_is_taken(wrap: Callable[[bytes], object]) -> None:
    assert Decoder(ColorFormat.RGB24, UNSCALED).decode(wrap(jpeg())).pixels.shape == (40, 60, 3)


def test_zeros_and_stray_bytes_around_the_end_are_harmless() -> None:
    encoded = jpeg()
    decoder = Decoder(ColorFormat.RGB24, UNSCALED)
    expected = decoder.decode(encoded).pixels
    for ending in (bytes(500), b"\0\0text", jpeg(20, 20)):
        np.testing.assert_array_equal(decoder.decode(encoded + ending).pixels, expected)
    np.testing.assert_array_equal(decoder.decode(encoded[:-2] + b"\x12\x34" + encoded[-2:]).pixels, expected)


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda data: b"", "it is empty; a JPEG or a PNG is expected"),
        (lambda data: b"\xde\xad", r"its format is unknown \(it starts with 0xde 0xad\); a JPEG or a PNG is expected"),
        (lambda data: b"\xff\xd8", "Premature end"),
        (lambda data: b"\xff\xd8\xff\xd9", "no image in it"),
        (lambda data: b"\xff\xd8\xff\xd8" + data, "marker 0xd8 at byte 2"),
        (lambda data: b"\xff\xd8" + bytes(20), "expected a marker at byte 2, found 0x00 0x00"),
        (lambda data: b"\xff\xd8\xff\xe1\0\0" + data, "0xe1 has a length of 0"),
        (lambda data: b"\xff\xd8" + b"\xff\xfe\0\2" * 20_000, "more than 10000 segments"),
        (lambda data: data[:300], "Premature end"),
        (lambda data: data[: len(data) * 3 // 4], "Premature end"),
        (lambda data: data[: len(data) * 3 // 4] + bytes(30), "Premature end"),
        (lambda data: data[: len(data) * 3 // 4] + bytes(100_000), "Premature end"),
        (lambda data: data[: len(data) * 3 // 4] + b"\xff\xd9", "premature end of data segment"),
        (lambda data: data[:-1], "Premature end"),
        (lambda data: (encoded := jpeg(progressive=True))[: len(encoded) * 2 // 3], "Premature end"),
        (lambda data: with_frame(data, 240, 4000), "premature end of data"),
        (lambda data: with_frame(data, 0, 40), "Empty JPEG image: its header says 0x40"),
        (lambda data: with_frame(data, 65000, 65000), "65000x65000 pixels are more than the 100000000"),
        (lambda data: with_frame(data, 65_535, 1000), "65535x1000 pixels; libjpeg reads sides of 65500"),
        (lambda data: with_frame(data, 240, 160, precision=12), "12 bits a sample"),
        (lambda data: with_frame(data, 240, 160, marker=0xC3), r"lossless or hierarchical JPEG .*0xc3"),
        (lambda data: with_frame(data, 240, 160, components=2), "2 components"),
    ],
)
def test_a_bad_image_is_refused_with_its_fault(damage: Callable[[bytes], bytes], fault: str) -> None:
    with pytest.raises(ImageError, match=fault):
        Decoder(ColorFormat.RGB24, UNSCALED).decode(damage(jpeg(240, 160)))


@pytest.mark.parametrize("encoded", [pictures.jpeg(mode="CMYK"), pictures.ycck_jpeg()], ids=["CMYK", "YCCK"])
def test_four_inks_become_the_colours_that_others_show(encoded: bytes) -> None:
    rgb = Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded).pixels
    pillow = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB")).astype(int)
    opencv = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)[:, :, ::-1].astype(int)
    assert np.abs(rgb - pillow).max() <= 1
    assert np.abs(rgb - opencv).max() <= 2
    assert np.abs(rgb - pictures.colours().astype(int)).mean() < 3
    bgr = Decoder(ColorFormat.BGR24, UNSCALED).decode(encoded).pixels
    np.testing.assert_array_equal(bgr[:, :, ::-1], rgb)
    grey = Decoder(ColorFormat.U8, UNSCALED).decode(encoded).pixels
    assert np.abs(grey[:, :, 0] - rgb @ np.array([0.299, 0.587, 0.114])).max() <= 1


def test_a_jpeg_that_holds_rgb() -> None:
    encoded = jpeg(keep_rgb=True)
    rgb = Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded).pixels
    np.testing.assert_array_equal(rgb, np.asarray(Image.open(io.BytesIO(encoded))))
    grey = Decoder(ColorFormat.U8, UNSCALED).decode(encoded).pixels
    assert np.abs(grey[:, :, 0] - rgb @ np.array([0.299, 0.587, 0.114])).max() <= 1


def test_scaled_four_inks() -> None:
    decoded = Decoder(ColorFormat.RGB24, DecoderOptions(45, 45)).decode(jpeg(60, 40, mode="CMYK"))
    assert decoded.pixels.shape == (30, 45, 3)
    assert (decoded.original_height, decoded.original_width) == (40, 60)


def test_pixel_limit_is_inclusive() -> None:
    encoded = jpeg(60, 40)
    assert Decoder(ColorFormat.RGB24, UNSCALED.at_most(2400)).decode(encoded).pixels.shape == (40, 60, 3)
    with pytest.raises(ImageError, match="60x40 pixels are more than the 2399"):
        Decoder(ColorFormat.RGB24, UNSCALED.at_most(2399)).decode(encoded)


@pytest.mark.parametrize(
    ("encoded", "components", "scans"),
    [
        (pictures.jpeg(), 3, 1),
        (pictures.jpeg(progressive=True), 3, 10),
        (pictures.jpeg(mode="L"), 1, 1),
        (pictures.jpeg(mode="CMYK"), 4, 1),
    ],
)
def test_header(encoded: bytes, components: int, scans: int) -> None:
    expected = ImageFile(60, 40, components, 1, scans, encoded)
    assert read_jpeg(memoryview(encoded + bytes(7))) == expected


def with_color_transform(jpeg: bytes, transform: int) -> bytes:
    """Adobe's segment replaces JFIF's, which would override it."""
    segment = b"\xff\xee\0\x0eAdobe\0\x64\0\0\0\0" + bytes([transform])
    return jpeg[:2] + segment + jpeg[4 + int.from_bytes(jpeg[4:6], "big") :]


def with_scan_parameters(jpeg: bytes, parameters: bytes) -> bytes:
    scan = jpeg.index(b"\xff\xda")
    end = scan + 2 + int.from_bytes(jpeg[scan + 2 : scan + 4], "big")
    return jpeg[: end - 3] + parameters + jpeg[end:]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: with_color_transform(data, 7),
        lambda data: with_scan_parameters(data, b"\0\0\0").replace(b"JFIF\0\1", b"JFIF\0\2"),
        lambda data: with_scan_parameters(data, b"\0\0\0"),
        lambda data: with_scan_parameters(with_color_transform(data, 7), b"\1\2\3"),
        lambda data: data[:-2] + b"\x12\x34\xff\0" + data[-2:],
        lambda data: with_scan_parameters(data[:-2] + b"\x12\x34" + data[-2:] + b"\0text", b"\0\0\0"),
    ],
)
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_harmless_fault_is_forgiven_and_hides_no_other(change: Callable[[bytes], bytes], restarts: int) -> None:
    decoder = Decoder(ColorFormat.RGB24, UNSCALED)
    good = jpeg(240, 160, restart_marker_rows=restarts)
    np.testing.assert_array_equal(decoder.decode(change(good)).pixels, decoder.decode(good).pixels)
    cut = good[: len(good) * 3 // 4] + b"\xff\xd9"
    with pytest.raises(ImageError, match="Corrupt JPEG data"):
        decoder.decode(change(cut))


def test_all_harmless_faults_in_one_file() -> None:
    good = pictures.ycck_jpeg()
    place = good.index(b"Adobe") + 11
    jfif = b"\xff\xe0\0\x10JFIF\0\2\1\0\0\1\0\1\0\0"
    faulty = good[:2] + jfif + good[2:place] + b"\7" + good[place + 1 : -2] + b"\x12\x34" * 8 + good[-2:]
    decoder = Decoder(ColorFormat.RGB24, UNSCALED)
    np.testing.assert_array_equal(
        decoder.decode(with_scan_parameters(faulty, b"\0\0\0")).pixels, decoder.decode(good).pixels
    )


@pytest.mark.parametrize("place", [0, 1, 7])
def test_a_lost_restart_marker_is_no_harmless_fault(place: int) -> None:
    encoded = jpeg(240, 160, restart_marker_rows=1)
    marker = encoded.index(bytes([0xFF, 0xD0 + place]))
    with pytest.raises(ImageError, match=f"found marker 0xd9 instead of RST{place}"):
        Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded[:marker] + b"\x12\x34\xff\xd9")


@pytest.mark.parametrize("progressive", [True, False])
def test_a_small_file_cannot_ask_for_hundreds_of_passes_over_a_large_image(progressive: bool) -> None:
    """Of a sequential image only if its first scan does not have all components."""
    encoded = jpeg(progressive=progressive)
    last = encoded.rindex(b"\xff\xda")
    scan = encoded[last:-2] if progressive else b"\xff\xda\0\x08\1\1\0\0\x3f\0"
    many = encoded[:last] + scan * (91 if progressive else 100) + b"\xff\xd9"
    # 2,400 pixels a hundred times are twenty times 12,000.
    with pytest.raises(ImageError, match=r"goes 100 times over 60x40 pixels; 20 times over the 11999 that"):
        Decoder(ColorFormat.RGB24, UNSCALED.at_most(11_999)).decode(many)
    assert read_jpeg(memoryview(many)).scans == 100


def test_a_sequential_image_with_a_scan_for_each_component() -> None:
    planes = np.asarray(Image.fromarray(pictures.colours()).convert("YCbCr"))
    files = [pictures.saved(np.ascontiguousarray(planes[:, :, place]), "JPEG", quality=95) for place in range(3)]
    # All use the tables of the first image; of the second and the third only the data is used, under other numbers.
    frame, scan = files[0].index(b"\xff\xc0"), files[0].index(b"\xff\xda")
    components = b"".join(bytes([number, 0x11, 0]) for number in (1, 2, 3))
    header = b"\xff\xc0\0\x11" + files[0][frame + 4 : frame + 9] + b"\3" + components
    rest = files[0][frame + 2 + int.from_bytes(files[0][frame + 2 : frame + 4], "big") : scan]
    encoded = files[0][:frame] + header + rest
    for number, file in enumerate(files, 1):
        encoded += b"\xff\xda\0\x08\1" + bytes([number]) + b"\0\0\x3f\0" + file[file.index(b"\xff\xda") + 10 : -2]
    encoded += b"\xff\xd9"
    assert read_jpeg(memoryview(encoded)) == ImageFile(60, 40, 3, 1, 3, encoded)
    given = Decoder(ColorFormat.RGB24, UNSCALED).decode(encoded).pixels
    np.testing.assert_array_equal(given, np.asarray(Image.open(io.BytesIO(encoded))))
    assert np.abs(given.astype(int) - pictures.colours()).mean() < 3


def test_no_more_than_500_scans_are_read() -> None:
    encoded = pictures.jpeg(progressive=True)
    many = encoded[:-2] + encoded[encoded.rindex(b"\xff\xda") : -2] * 500 + b"\xff\xd9"
    with pytest.raises(ImageError, match="more than 500 scans"):
        Decoder(ColorFormat.RGB24, UNSCALED).decode(many)


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
    """A PNG with changed chunks (by name and body) and right checksums, so that libpng reads them."""
    parts, position = [data[:8]], 8
    while position < len(data):
        (length,) = struct.unpack_from(">I", data, position)
        name, body = data[position + 4 : position + 8], data[position + 8 : position + 8 + length]
        parts.append(pictures.png_chunk(name, change(name, body)))
        position += 12 + length
    return b"".join(parts)


def change_sealed_header(data: bytes, random: np.random.Generator) -> bytes:
    """Change the header; the sides stay small enough to be decoded."""

    def change(name: bytes, body: bytes) -> bytes:
        if name != b"IHDR":
            return body
        place = random.choice([3, 7, 8, 9, 12])
        return body[:place] + bytes([random.integers(17)]) + body[place + 1 :]

    return sealed(data, change)


def change_sealed_data(data: bytes, random: np.random.Generator) -> bytes:
    return sealed(data, lambda name, body: change_bytes(body, random) if name in (b"IDAT", b"PLTE") else body)


def change_rows(data: bytes, random: np.random.Generator) -> bytes:
    """Change filters, levels and the number of rows within a valid compressed stream."""

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
            # Pixels that another picture left in memory must not show: the same file gives the same result again.
            decoder.decode(SEEDS["inks"])
            np.testing.assert_array_equal(decoder.decode(damaged).pixels, first)
            assert first.shape[2] == 3
            outcomes["pixels"] += 1
    assert outcomes["error"]
    np.testing.assert_array_equal(decoder.decode(good).pixels, expected)
