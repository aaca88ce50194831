"""Writes EfficientNet-Lite0 with its real weights as PyTorch files, and photographs: `python real_weights.py MODEL.onnx
FOLDER`.

The files: exported.pt2, quantised.pt2, which `rocserve quantise` writes and compares, and photographs.npz with the
images and PyTorch's scores of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cv2
import numpy as np
import onnx
import torch

from rocserve import cli

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
    np.savez(folder / "photographs.npz", images=images, scores=scores)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
