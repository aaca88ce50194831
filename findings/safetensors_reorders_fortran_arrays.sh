#!/usr/bin/env bash
# safetensors 0.8.0: safetensors.numpy's save and save_file write an array in Fortran order as it lies in memory, with the shape
# of the array: it loads with its values at other places, and nothing is said. Such an array is contiguous and dense, which is
# what the documentation asks for; a transposed table of embeddings is one. Version 0.7.0 wrote it right.
# Seen on 2026-11-29:
#   0.7.0: save gives back [[0, 1, 2], [3, 4, 5]], save_file [[0, 1, 2], [3, 4, 5]]
#   0.8.0: save gives back [[0, 3, 1], [4, 2, 5]], save_file [[0, 3, 1], [4, 2, 5]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
cat >"$folder/order.py" <<'PYTHON'
import sys

import numpy
import safetensors
from safetensors.numpy import load, load_file, save, save_file

table = numpy.asfortranarray([[0, 1, 2], [3, 4, 5]])
save_file({"table": table}, sys.argv[1])
in_memory, in_a_file = load(save({"table": table}))["table"].tolist(), load_file(sys.argv[1])["table"].tolist()
print(f"{safetensors.__version__}: save gives back {in_memory}, save_file {in_a_file}")
PYTHON
seen() {
    for version in 0.7.0 0.8.0; do
        "$folder/venv/bin/pip" install --quiet --disable-pip-version-check "safetensors==$version" numpy==2.4.6
        "$folder/venv/bin/python" "$folder/order.py" "$folder/table.safetensors"
    done
}
diff <(seen 2>/dev/null) - <<'SEEN'
0.7.0: save gives back [[0, 1, 2], [3, 4, 5]], save_file [[0, 1, 2], [3, 4, 5]]
0.8.0: save gives back [[0, 3, 1], [4, 2, 5]], save_file [[0, 3, 1], [4, 2, 5]]
SEEN
