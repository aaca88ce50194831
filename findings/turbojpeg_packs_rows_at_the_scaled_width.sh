#!/usr/bin/env bash
# libturbojpeg 2.1 or 3 (TurboJPEG's C API, tjDecompress2) on a valid 64x64 JPEG: asked for 37x37 pixels, it succeeds, although
# no scaling factor gives that size. It decodes at the next smaller one, 32x32, and with pitch 0 packs the rows at that width:
# 1,024 pixels one after another at the beginning of a buffer for 37 in a row, the rest of it untouched. A program that
# reads rows of 37 sees a sheared picture with a tail of old memory, and no error.
# Installs libturbojpeg from Debian's packages (any of its suites) into the temporary folder.
# Seen on 2026-11-28 (2.1.5):
#   status 0, rows lie 32 pixels apart: True, untouched pixels: 345
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
chmod 755 "$folder"
(cd "$folder" && apt-get download -qq libturbojpeg0 2>/dev/null && dpkg -x libturbojpeg0_*.deb .)
library=$(find "$folder/usr" -name 'libturbojpeg.so.0' | head -n 1)
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6 pillow==12.0.0
cat >"$folder/rows.py" <<'PYTHON'
import ctypes
import io
import sys

import numpy
from PIL import Image

ASKED, DECODED, UNTOUCHED = 37, 32, 7
pixels = numpy.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=numpy.uint8)
file = io.BytesIO()
Image.fromarray(pixels).save(file, "JPEG")
jpeg = file.getvalue()
library = ctypes.CDLL(sys.argv[1])
library.tjInitDecompress.restype = ctypes.c_void_p
handle = ctypes.c_void_p(library.tjInitDecompress())


def decoded(side: int) -> tuple[int, numpy.ndarray]:
    buffer = numpy.full((side * side, 3), UNTOUCHED, numpy.uint8)
    pointer = buffer.ctypes.data_as(ctypes.c_void_p)
    return library.tjDecompress2(handle, jpeg, ctypes.c_ulong(len(jpeg)), pointer, side, 0, side, 0, 0), buffer


_, expected = decoded(DECODED)
status, buffer = decoded(ASKED)
packed = (buffer[: DECODED * DECODED] == expected).all()
untouched = (buffer[DECODED * DECODED :] == UNTOUCHED).all(axis=1).sum()
print(f"status {status}, rows lie {DECODED} pixels apart: {packed}, untouched pixels: {untouched}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/rows.py" "$library") - <<'SEEN'
status 0, rows lie 32 pixels apart: True, untouched pixels: 345
SEEN
