#!/usr/bin/env bash
# onnxmltools 1.16.0: the import needs the package packaging, which neither onnxmltools nor what it requires asks for. It works
# where another package has brought packaging, and fails in a clean environment: an image or a job that exports a model.
# Seen on 2026-11-29:
#   ModuleNotFoundError: No module named 'packaging'
#   with packaging: 1.16.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    onnxmltools==1.16.0 skl2onnx==1.20.0 scikit-learn==1.9.1 onnx==1.23.2 numpy==2.4.6
seen() {
    "$folder/venv/bin/python" -c "import onnxmltools" 2>&1 | tail -n 1 || true
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check packaging==26.4 2>/dev/null
    "$folder/venv/bin/python" -c "import onnxmltools; print('with packaging:', onnxmltools.__version__)" 2>&1 | tail -n 1
}
diff <(seen) - <<'SEEN'
ModuleNotFoundError: No module named 'packaging'
with packaging: 1.16.0
SEEN
