#!/usr/bin/env bash
# torch 2.13.0: the program that torch.export.export gives of a model which updates its buffers (a counter; BatchNorm in training
# mode, with its running statistics) says in graph_signature.buffers_to_mutate that it updates none, also after save and load.
# Each call of program.module() updates them nevertheless: the counter's answers depend on earlier calls. Only
# run_decompositions() fills the list. A server that asks the signature whether a program keeps state gets the answer no.
# Installs PyTorch: gigabytes, where pip takes the build for NVIDIA's GPUs.
# Seen on 2026-11-29:
#   Counter: says 0 updated, does 1, after run_decompositions 1
#   BatchNorm: says 0 updated, does 3, after run_decompositions 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6
cat >"$folder/buffers.py" <<'PYTHON'
import io

import torch


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x + self.calls


x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
for name, model in (("Counter", Counter()), ("BatchNorm", torch.nn.BatchNorm1d(2).train())):
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (x,)), file)
    file.seek(0)
    program = torch.export.load(file)
    module = program.module()
    before = {key: buffer.clone() for key, buffer in module.named_buffers()}
    module(x)
    updated = sum(not buffer.equal(before[key]) for key, buffer in module.named_buffers())
    told, decomposed = (
        len(one.graph_signature.buffers_to_mutate) for one in (program, program.run_decompositions())
    )
    print(f"{name}: says {told} updated, does {updated}, after run_decompositions {decomposed}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/buffers.py" 2>/dev/null) - <<'SEEN'
Counter: says 0 updated, does 1, after run_decompositions 1
BatchNorm: says 0 updated, does 3, after run_decompositions 3
SEEN
