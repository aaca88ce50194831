#!/usr/bin/env bash
# mypyc of mypy 2.3.0: a compiled dataclass keeps the names of its fields, but an annotation that is not a plain class is
# replaced by `type`, and compiled functions have no annotations at all. Code that reads a field's type at run time
# (serialisers, dependency injection, dataclasses.fields) works on the source and misreads the compiled module.
# Needs a C compiler and Python's headers.
# Seen on 2026-11-28:
#   source: float, str | None
#   compiled: float, type
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'mypy[mypyc]==2.3.0' setuptools==80.9.0
cd "$folder"
cat >points.py <<'PYTHON'
from dataclasses import dataclass


@dataclass
class Point:
    x: float
    name: str | None = None
PYTHON
cat >show.py <<'PYTHON'
import dataclasses

import points

kind = "source" if points.__file__.endswith(".py") else "compiled"
types = [getattr(field.type, "__name__", str(field.type)) for field in dataclasses.fields(points.Point)]
print(f"{kind}: {types[0]}, {'type' if types[1] == 'type' else dataclasses.fields(points.Point)[1].type}")
PYTHON
venv/bin/python show.py >seen
venv/bin/mypyc points.py >/dev/null
rm points.py
venv/bin/python show.py >>seen
diff seen - <<'SEEN'
source: float, str | None
compiled: float, type
SEEN
