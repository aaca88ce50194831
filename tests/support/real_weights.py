"""Writes EfficientNet-Lite0 with its real weights as PyTorch files, and photographs: `python real_weights.py MODEL.onnx
FOLDER`.

The files: exported.pt2, quantised.pt2, and photographs.npz with the images, PyTorch's scores of them, and what the
pytorch backend computes from quantised.pt2, in this process, because an import of PyTorch is most of a load.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import onnx
import torch

from rocserve import cli
from rocserve.backends.base import Batch, ModelSource
from rocserve.backends.pytorch import eager
from rocserve.core.model_config import InstanceKind, ModelConfig
from rocserve.core.tensors import tensor_from_numpy

sys.path.insert(0, str(Path(__file__).parents[2] / "clients" / "examples"))
from demo_photos import PHOTOGRAPHS
from quantisation_digits import save_program
from quantisation_photographs import SIDE, as_network

ROUND_IT = 256
"""The shorter side in pixels before the middle is cut out."""


def prepared(photograph: Path) -> np.ndarray:
    image = cv2.cvtColor(cv2.imread(str(photograph)), cv2.COLOR_BGR2RGB)
    scale = ROUND_IT / min(image.shape[:2])
    image = cv2.resize(image, None, fx=scale, fy=scale, interpolation=cv2.INTER_AREA)
    top, left = ((side - SIDE) // 2 for side in image.shape[:2])
    return ((image[top : top + SIDE, left : left + SIDE].astype(np.float32) - 127) / 128).transpose(2, 0, 1)


def served(file: Path, images: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the pytorch backend's scores, and the precision that it tells."""
    model = eager.load(ModelSource("m", 1, file.parent, file.parent, file, ModelConfig("m"), InstanceKind.CPU, None, 1))
    name, output = model.signature.inputs[0].name, model.signature.outputs[0].name
    batch = Batch({name: tensor_from_numpy(name, images)}, (output,), (len(images),))
    return np.array(model.execute(batch).outputs[output]), model.properties.get("precision", "")


def main(model: Path, folder: Path) -> None:
    torch.set_num_threads(1)
    libraries = Path(torch.__file__).parents[1]
    images = np.stack([prepared(libraries / name) for name in PHOTOGRAPHS])
    network = as_network(onnx.load(model))
    with torch.no_grad():
        scores = network(torch.from_numpy(images)).numpy()
    save_program(network, torch.zeros(2, 3, SIDE, SIDE), folder / "exported.pt2")
    np.save(folder / "data.npy", images)
    flags = ("--method=static", f"--data={folder / 'data.npy'}", f"--out={folder / 'quantised'}.pt2")
    assert cli.main(["quantise", str(folder / "exported.pt2"), *flags]) == 0
    quantised, precision = served(folder / "quantised.pt2", images)
    np.savez(folder / "photographs.npz", images=images, scores=scores, quantised=quantised, precision=precision)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
