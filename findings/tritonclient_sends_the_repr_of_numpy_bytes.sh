#!/usr/bin/env bash
# tritonclient 2.73.0: a BYTES tensor from an object array is written element by element; bytes are sent as they are, but a
# numpy.bytes_, which is a subclass of bytes, goes through str() and is sent as its repr: b'cat' arrives as seven characters.
# An object array has such elements when they were taken one by one from an array of dtype "S".
# Seen on 2026-11-28:
#   bytes: b'cat'
#   numpy.bytes_: b"b'cat'"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'tritonclient[http]==2.73.0' numpy==2.4.6
cat >"$folder/bytes.py" <<'PYTHON'
import numpy
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

for name, element in (("bytes", b"cat"), ("numpy.bytes_", numpy.bytes_(b"cat"))):
    sent = serialize_byte_tensor(numpy.array([element], dtype=object)).item()
    print(f"{name}: {deserialize_bytes_tensor(sent)[0]}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/bytes.py") - <<'SEEN'
bytes: b'cat'
numpy.bytes_: b"b'cat'"
SEEN
