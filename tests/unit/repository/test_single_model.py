"""What `rocserve serve WHAT` finds at a path, and which files belong to the model."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rocserve.backends.registry import discover_backends
from rocserve.config.model_folder import FlatModel
from rocserve.repository.scan import ModelScan
from rocserve.repository.scanner import RepositoryScanner, find_single_model
from rocserve.settings import RepositorySettings
from rocserve.settings.repository import SingleModel, WhatKind

REGISTRY = discover_backends()


def make(folder: Path, *files: str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)
    return folder


def scanner_of(single: SingleModel) -> RepositoryScanner:
    return RepositoryScanner(RepositorySettings((single.folder,), single=single), REGISTRY, logging.getLogger("test"))


def scanned(what: Path, name: str = "") -> ModelScan | None:
    single = find_single_model(what, name, REGISTRY)
    assert single is not None
    scan = scanner_of(single).scan()
    assert scan.unreadable == {}
    return next(iter(scan.models.values()), None)


@pytest.mark.parametrize(
    ("files", "kind", "name"),
    [
        (["resnet.onnx", "config.json", "labels.txt", "export.py"], WhatKind.FILES, "resnet"),
        (["resnet.onnx", "resnet.onnx.data"], WhatKind.FILES, "resnet"),
        (["model.onnx", "model_quantized.onnx", "config.json", "tokenizer.json"], WhatKind.FILES, "w"),
        (["onnx/model.onnx", "onnx/model_fp16.onnx", "config.json", "tokenizer.json"], WhatKind.FILES, "w"),
        (["encoder.onnx", "config.json", "tokenizer.json"], WhatKind.FILES, "encoder"),
        (["Net.MXR"], WhatKind.FILES, "Net"),
        (["graph.pb"], WhatKind.FILES, "graph"),
        (["model.py", "helpers.py"], WhatKind.FILES, "w"),
        (["decode.json"], WhatKind.FILES, "decode"),
        (["a.onnx", "b.onnx"], WhatKind.FILES, "w"),
        (["config.pbtxt", "resnet.onnx"], WhatKind.FILES, "resnet"),
        (["config.pbtxt", "1/model.onnx"], WhatKind.MODEL, "w"),
        (["config.pbtxt"], WhatKind.MODEL, "w"),
        (["1/model.onnx"], WhatKind.MODEL, "w"),
    ],
)
def test_a_folder_that_is_one_model(tmp_path: Path, files: list[str], kind: WhatKind, name: str) -> None:
    single = find_single_model(make(tmp_path / "w", *files), "", REGISTRY)
    assert single is not None
    assert (single.kind, single.name) == (kind, name)


def test_the_model_of_an_export_for_several_engines_lies_below(tmp_path: Path) -> None:
    scan = scanned(make(tmp_path / "w", "onnx/model.onnx", "tokenizer.json", "config.json"))
    assert scan is not None
    assert scan.flat == FlatModel("onnx/model.onnx")
    assert not scan.refusal


def test_a_tokenizer_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    scan = scanned(make(tmp_path / "w", "tokenizer.json", "config.json", "model.safetensors"))
    assert scan is not None
    assert "holds tokenizer.json but no model: expected model.onnx, onnx/model.onnx or model.pt2" in scan.refusal


@pytest.mark.parametrize("files", [["m/1/model.onnx"], ["m/config.pbtxt", "stray.onnx"], ["README.md"]])
def test_a_folder_that_is_a_repository(tmp_path: Path, files: list[str]) -> None:
    assert find_single_model(make(tmp_path, *files), "", REGISTRY) is None


def test_a_file_is_called_as_it_is_unless_a_name_is_given(tmp_path: Path) -> None:
    file = make(tmp_path, "resnet.onnx") / "resnet.onnx"
    found, named = find_single_model(file, "", REGISTRY), find_single_model(file, "mine", REGISTRY)
    assert found is not None
    assert named is not None
    assert (found.kind, found.name, named.name) == (WhatKind.FILE, "resnet", "mine")


def test_of_a_file_among_others_only_what_is_its_own_counts(tmp_path: Path) -> None:
    make(tmp_path, "resnet.onnx", "resnet.onnx.data", "labels.txt", "other.onnx", "deep/resnet.onnx")
    before = scanned(tmp_path / "resnet.onnx")
    assert before is not None
    assert before.version_folder(1) == tmp_path
    make(tmp_path, "third.onnx", "resnet50.onnx", "resnet.onnx.part", "deep/more")
    (tmp_path / "other.onnx").write_text("changed")
    assert scanned(tmp_path / "resnet.onnx") == before
    (tmp_path / "resnet.onnx.data").write_text("changed")
    assert scanned(tmp_path / "resnet.onnx") != before
    (tmp_path / "resnet.onnx").unlink()
    assert scanned(tmp_path / "resnet.onnx") is None


def test_what_the_server_writes_into_a_models_folder_is_no_change_of_it(tmp_path: Path) -> None:
    make(tmp_path, "1/model.onnx")
    code = f"""
from pathlib import Path
from rocserve.repository.scan import ModelScan, scan_model
def scan(): return scan_model(ModelScan("m", Path({str(tmp_path)!r}), Path({str(tmp_path)!r})), (), 100)
before = scan()
print("served", flush=True)
print(scan() == before, flush=True)
Path({str(tmp_path)!r}, "other.log").touch()
print(scan() == before)
"""
    with (tmp_path / "server.log").open("w") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "server.log").read_text().split() == ["served", "True", "False"]


def test_a_file_that_is_a_link_to_elsewhere_is_followed(tmp_path: Path) -> None:
    make(tmp_path, "blobs/0a1b", "snapshots/main/other")
    (tmp_path / "snapshots/main/net.onnx").symlink_to("../../blobs/0a1b")
    scan = scanned(tmp_path / "snapshots/main/net.onnx")
    assert scan is not None
    assert scan.versions[1].refusal == ""


def test_a_folder_whose_model_may_be_one_or_the_other_is_refused_until_it_is_one(tmp_path: Path) -> None:
    make(tmp_path, "a.onnx")
    single = find_single_model(tmp_path, "", REGISTRY)
    assert single is not None
    scanner = scanner_of(single)
    assert scanner.scan().models["a"].refusal == ""
    make(tmp_path, "b.onnx")
    assert "several files that may be the model: a.onnx, b.onnx; name the one" in scanner.scan().models["a"].refusal
    (tmp_path / "a.onnx").unlink()
    scan = scanner.scan().models["a"]
    assert scan.refusal == ""
    assert scan.flat is not None
    assert scan.flat.file == "b.onnx"
