#!/usr/bin/env bash
# torch 2.13.0 (2.11.0 too): torch.export.export of a program with two inputs, for which one tensor object is the example of
# both, gives a program that reads only one of them. The other stays in the signature, and callers have to send it, without
# effect; nothing is reported. A tensor of ones is a natural example of token ids and of the attention mask: the exported
# encoder then looks up the mask in its table of words, and answers all texts alike. Two equal tensors give the right program.
# Installs PyTorch: gigabytes, where pip takes the build for NVIDIA's GPUs.
# Seen on 2026-11-29, for 10 * ids + mask with ids 1 and mask 3:
#   one tensor given twice: 33.0
#   two equal tensors: 13.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/twice.py" <<'PYTHON'
import torch


class Sum(torch.nn.Module):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return 10 * ids + mask


example = torch.zeros(1)
for name, examples in (("one tensor given twice", (example, example)), ("two equal tensors", (example, example.clone()))):
    program = torch.export.export(Sum(), examples).module()
    print(f"{name}: {program(torch.tensor([1.0]), torch.tensor([3.0])).item()}")
PYTHON
expected="one tensor given twice: 33.0
two equal tensors: 13.0"
found=$("$folder/venv/bin/python" "$folder/twice.py" 2>/dev/null)
echo "$found"
[ "$found" = "$expected" ]
