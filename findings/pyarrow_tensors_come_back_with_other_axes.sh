#!/usr/bin/env bash
# pyarrow 26.0.1: FixedShapeTensorArray.from_numpy_ndarray takes a batch of arrays whose axes were transposed (images that lie in
# memory channels first, seen as channels last) and writes a type with a permutation. Neither way back gives the batch, and nothing
# is said. to_numpy_ndarray applies the inverse permutation: the shape differs, and with sides of one length the axes change
# places unseen; only permutations that are their own inverse come back. to_numpy of one tensor computes the strides from the
# shape in the wrong order of axes: it reads some values twice and others never. Batches in C order come back right.
# Seen on 2026-11-30:
#   C order: the batch comes back: True, a tensor of it: True
#   last two axes exchanged: the batch comes back: True, a tensor of it: False, 10 of 12 values
#   channels last: (2, 4, 5, 3) comes back as (2, 5, 3, 4)
#   channels last, three channels, sides of 3: (2, 3, 3, 3) comes back as (2, 3, 3, 3), equal: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check pyarrow==26.0.1 numpy==2.4.6
cat >"$folder/axes.py" <<'PYTHON'
import numpy
from pyarrow import FixedShapeTensorArray


def counted(*shape):
    return numpy.arange(numpy.prod(shape)).reshape(shape)


exchanged = counted(2, 3, 4).transpose(0, 2, 1)
for name, batch in {"C order": counted(2, 3, 4), "last two axes exchanged": exchanged}.items():
    tensors = FixedShapeTensorArray.from_numpy_ndarray(batch)
    first = tensors[0].to_numpy()
    whole, one = numpy.array_equal(tensors.to_numpy_ndarray(), batch), numpy.array_equal(first, batch[0])
    values = "" if one else f", {len(numpy.unique(first))} of {batch[0].size} values"
    print(f"{name}: the batch comes back: {whole}, a tensor of it: {one}{values}")

images = counted(2, 3, 4, 5).transpose(0, 2, 3, 1)
back = FixedShapeTensorArray.from_numpy_ndarray(images).to_numpy_ndarray()
print(f"channels last: {images.shape} comes back as {back.shape}")
images = counted(2, 3, 3, 3).transpose(0, 2, 3, 1)
back = FixedShapeTensorArray.from_numpy_ndarray(images).to_numpy_ndarray()
equal = numpy.array_equal(images, back)
print(f"channels last, three channels, sides of 3: {images.shape} comes back as {back.shape}, equal: {equal}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/axes.py" 2>/dev/null) - <<'SEEN'
C order: the batch comes back: True, a tensor of it: True
last two axes exchanged: the batch comes back: True, a tensor of it: False, 10 of 12 values
channels last: (2, 4, 5, 3) comes back as (2, 5, 3, 4)
channels last, three channels, sides of 3: (2, 3, 3, 3) comes back as (2, 3, 3, 3), equal: False
SEEN
