#!/usr/bin/env bash
# onnxruntime 1.32.0 and onnxruntime-migraphx 1.27.1 in one environment: both distributions own the folder onnxruntime/, with
# extension modules of different file names. Python imports the one with its ABI tag, onnxruntime's, in either order of
# installation. MIGraphX's provider is on the disk and never offered, the version that is printed is the other package's
# where that came last, and pip finds nothing broken.
# Seen on 2026-11-28:
#   onnxruntime 1.27.1: MIGraphX is offered: False, its library is installed: True
#   No broken requirements found.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
for package in onnxruntime==1.32.0 onnxruntime-migraphx==1.27.1; do
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "$package"
done
cat >"$folder/providers.py" <<'PYTHON'
from pathlib import Path

import onnxruntime

offered = any("MIGraphX" in name for name in onnxruntime.get_available_providers())
library = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_migraphx.so"
print(
    f"onnxruntime {onnxruntime.__version__}: MIGraphX is offered: {offered},"
    f" its library is installed: {library.exists()}"
)
PYTHON
diff <(
  "$folder/venv/bin/python" "$folder/providers.py"
  "$folder/venv/bin/pip" --disable-pip-version-check check
) - <<'SEEN'
onnxruntime 1.27.1: MIGraphX is offered: False, its library is installed: True
No broken requirements found.
SEEN
