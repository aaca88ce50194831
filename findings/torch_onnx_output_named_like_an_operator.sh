#!/usr/bin/env bash
# torch 2.13.0 with onnx 1.22.0 and onnxscript 0.7.1, onnxruntime 1.30.0: torch.onnx.export(dynamo=True, the default) names inner
# tensors after their operators ("embedding", "linear", "relu"). An output_names entry with such a name is written without a
# look at them, so that two nodes define one tensor: an encoder whose output the user calls "embedding" is exported without an
# error, and ONNX Runtime refuses the file. The exporter by TorchScript (dynamo=False) writes a valid file.
# Installs PyTorch: gigabytes, where pip takes the build for NVIDIA's GPUs.
# Seen on 2026-11-30:
#   output 'embedding': Gather -> embedding, ReduceSum -> embedding; refused: Duplicate definition of name (embedding).
#   output 'vector': Gather -> embedding, ReduceSum -> vector; loaded
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 onnx==1.22.0 onnxscript==0.7.1 \
  onnxruntime==1.30.0
cat >"$folder/names.py" <<'PYTHON'
import sys

import onnx
import onnxruntime
import torch


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(10, 4)

    def forward(self, ids):
        return self.words(ids).sum(1)


for name in ("embedding", "vector"):
    file = f"{sys.argv[1]}/{name}.onnx"
    ids = torch.ones((2, 3), dtype=torch.int64)
    torch.onnx.export(
        Encoder().eval(), (ids,), file, dynamo=True, input_names=["ids"], output_names=[name], verbose=False
    )
    nodes = ", ".join(f"{node.op_type} -> {node.output[0]}" for node in onnx.load(file).graph.node)
    try:
        onnxruntime.InferenceSession(file)
        result = "loaded"
    except Exception as error:
        result = "refused: " + str(error).partition("Error: ")[2]
    print(f"output '{name}': {nodes}; {result}")
PYTHON
expected="output 'embedding': Gather -> embedding, ReduceSum -> embedding; refused: Duplicate definition of name (embedding).
output 'vector': Gather -> embedding, ReduceSum -> vector; loaded"
found=$("$folder/venv/bin/python" "$folder/names.py" "$folder" 2>/dev/null)
echo "$found"
[ "$found" = "$expected" ]
