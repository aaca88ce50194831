#!/usr/bin/env bash
# numpy 2.4.6 on glibc (2.36): a program that allocates sixteen arrays of 1 MiB for each batch and frees them touches new pages
# in every batch, for ever. glibc raises its threshold for returning memory only to twice the largest block that was freed
# (2 MiB here), so the end of each batch returns all of it to the kernel, and the next batch takes 4,096 page faults to get
# it again. MALLOC_TRIM_THRESHOLD_ alone does not help: setting it also switches off the growth of the other threshold, and
# each array becomes a separate mapping. Only both together keep the pages.
# Seen on 2026-11-28 (page faults of a batch of 4,096 pages):
#   default: thousands
#   trim threshold: thousands
#   both thresholds: few
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check numpy==2.4.6
cat >"$folder/faults.py" <<'PYTHON'
import resource
import sys

import numpy


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    batch = [numpy.ones(1 << 18, numpy.float32) for _ in range(16)]
    del batch
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


batches = [faults() for _ in range(30)]
print(f"{sys.argv[1]}: {'thousands' if sum(batches[10:]) / 20 > 2000 else 'few'}")
PYTHON
python=$folder/venv/bin/python
large=1000000000
diff <(
  "$python" "$folder/faults.py" default
  MALLOC_TRIM_THRESHOLD_=$large "$python" "$folder/faults.py" "trim threshold"
  MALLOC_TRIM_THRESHOLD_=$large MALLOC_MMAP_THRESHOLD_=$large "$python" "$folder/faults.py" "both thresholds"
) - <<'SEEN'
default: thousands
trim threshold: thousands
both thresholds: few
SEEN
