#!/usr/bin/env bash
# mlserver 1.7.1: NumpyCodec writes a one-dimensional array of n elements as shape [n, 1], and a scalar as [1]; arrays of more
# dimensions keep their shape. So a request made by this codec does not fit a model whose input has shape [n], and a round
# trip through the codec changes the array's shape.
# Seen on 2026-11-28:
#   (3,) is sent as [3, 1] and comes back as (3, 1)
#   (2, 3) is sent as [2, 3] and comes back as (2, 3)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mlserver==1.7.1
cat >"$folder/shapes.py" <<'PYTHON'
import numpy
from mlserver.codecs import NumpyCodec

for shape in ((3,), (2, 3)):
    entry = NumpyCodec.encode_input("x", numpy.zeros(shape, numpy.float32))
    print(f"{shape} is sent as {entry.shape} and comes back as {NumpyCodec.decode_input(entry).shape}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/shapes.py") - <<'SEEN'
(3,) is sent as [3, 1] and comes back as (3, 1)
(2, 3) is sent as [2, 3] and comes back as (2, 3)
SEEN
