#!/usr/bin/env bash
# torchao 0.18.0, torch 2.13.0: prepare_qat_pt2e replaces Conv2d with BatchNorm2d by a graph that has PyTorch's default eps,
# 1e-05, whatever the layer's eps is, in the normalisation and in the scale of the weights. Channels with a small variance then
# have another scale: the prepared model in evaluation mode, before any training, is far from the float one, without a warning.
# Installs PyTorch: gigabytes, where pip takes the build for NVIDIA's GPUs.
# Seen on 2026-11-29 (differences of 0.010 and 0.726 of the largest value):
#   eps 1e-05: the graph has 1e-05, 1e-05; off by more than 10 %: False
#   eps 0.1: the graph has 1e-05, 1e-05; off by more than 10 %: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 torchao==0.18.0 numpy==2.4.6
cat >"$folder/eps.py" <<'PYTHON'
import torch
from torchao.quantization.pt2e import move_exported_model_to_eval
from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as quantizers

for eps in (1e-5, 0.1):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4, eps=eps))
    model[1].running_var.fill_(0.05)
    x = torch.randn(2, 3, 8, 8)
    expected = model.eval()(x).detach()
    graph = torch.export.export(model.train(), (x,)).module()
    quantizer = quantizers.X86InductorQuantizer()
    quantizer.set_global(quantizers.get_default_x86_inductor_quantization_config(is_qat=True))
    prepared = prepare_qat_pt2e(graph, quantizer)
    written = [node.args[-2] for node in prepared.graph.nodes if "batch_norm" in str(node.target)]
    written += [node.args[1] for node in prepared.graph.nodes if str(node.target) == "aten.add.Tensor"]
    constants = ", ".join(str(number) for number in written if isinstance(number, float))
    move_exported_model_to_eval(prepared)
    difference = (prepared(x).detach() - expected).abs().max() / expected.abs().max()
    print(f"eps {eps}: the graph has {constants}; off by more than 10 %: {bool(difference > 0.1)}")
PYTHON
diff <("$folder/venv/bin/python" "$folder/eps.py" 2>/dev/null) - <<'SEEN'
eps 1e-05: the graph has 1e-05, 1e-05; off by more than 10 %: False
eps 0.1: the graph has 1e-05, 1e-05; off by more than 10 %: True
SEEN
