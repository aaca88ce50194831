"""Quantised programs in a repository: served, they recognise as many digits as bare ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.migraphx_serving import config, place
from support.pytorch import NO_PYTORCH
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

from rocserve import cli
from rocserve_client import Client


def quantised(folder: Path, method: str, out: str) -> bytes:
    flags = (f"--method={method}", f"--data={folder / 'images.npy'}", f"--out={folder / out}")
    assert cli.main(["quantise", str(folder / "digits.pt2"), *flags]) == 0
    return (folder / out).read_bytes()


def test_served_as_bare(serve: Callable[..., RocserveProcess], migraphx_root: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason=NO_PYTORCH)
    networks = pytest.importorskip("support.torch_networks", reason=NO_PYTORCH)
    images, labels = networks.held_out_digits()
    np.save(tmp_path / "images.npy", images)
    networks.save_program(networks.digits_network(), tmp_path / "digits.pt2", 1, 16, 16)
    repository = tmp_path / "repository"
    static = quantised(tmp_path, "static", "static.pt2")
    place(repository, "static", "model.pt2", static, "")
    on_migraphx = config(30, "pytorch_libtorch", engine="migraphx-onnx", batch_sizes=30)
    place(repository, "static_mgx", "model.pt2", static, on_migraphx)
    place(repository, "dynamic_onnx", "model.onnx", quantised(tmp_path, "dynamic", "dynamic.onnx"), "")
    server = serve(repository, flags=(f"--migraphx-root={migraphx_root}", f"--cache-directory={tmp_path / 'cache'}"))
    bare = torch.export.load(tmp_path / "static.pt2").module()
    with torch.no_grad():
        right = (bare(torch.from_numpy(images)).argmax(1).numpy() == labels).sum()
    with Client(server.address) as client:
        for model, engine in (("static", "eager"), ("static_mgx", "migraphx-onnx"), ("dynamic_onnx", "onnxruntime")):
            client.wait_until_ready(PATIENCE_SECONDS, model=model)
            properties = client.model_metadata(model).properties
            assert properties["engine"] == engine
            assert engine != "migraphx-onnx" or properties["precision"] == "int8"
            answers = [
                client.infer(model, {"input": batch})["OUTPUT__0"] for batch in np.split(images, len(images) // 30)
            ]
            read = (np.concatenate(answers).argmax(1) == labels).sum()
            # Another engine may round a tie to the other whole number.
            assert abs(read - right) <= (0 if engine == "eager" else 1)
