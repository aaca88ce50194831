"""`rocserve convert-mar`: the folders that it writes, and its refusals. Nothing here needs PyTorch."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import pytest

from rocserve import cli
from rocserve.config.pbtxt import parse_model_config


def archive(*names: str) -> bytes:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as file:
        for name in names:
            file.writestr(name, f"the content of {name}")
    return written.getvalue()


SCRIPT = archive("m/constants.pkl", "m/data.pkl", "m/code/__torch__.py")
EXPORTED = archive("m/models/model.json", "m/data/weights/weight_0")
PICKLE = archive("m/data.pkl")


def convert(folder: Path, file: str, content: bytes, *flags: str, labels: object = None, **manifest: str) -> int:
    model = {"modelName": "m", "modelVersion": "2.1", "serializedFile": file, **manifest}
    with zipfile.ZipFile(folder / "m.mar", "w") as written:
        written.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": model}))
        written.writestr(file, content)
        if labels is not None:
            written.writestr("index_to_name.json", json.dumps(labels))
    return cli.main(["convert-mar", str(folder / "m.mar"), f"--model-repository={folder / 'models'}", *flags])


def files(folder: Path) -> dict[str, bytes]:
    models = folder / "models"
    return {str(file.relative_to(models)): file.read_bytes() for file in models.rglob("*") if file.is_file()}


def test_an_image_classifier_has_its_preprocessing_and_labels(tmp_path: Path) -> None:
    labels = {"0": ["n1", "cat"], "1": "dog"}
    assert convert(tmp_path, "net.pt", SCRIPT, handler="image_classifier", labels=labels) == 0
    found = files(tmp_path)
    assert found["m/2/model.pt"] == SCRIPT
    assert found["m/labels.txt"] == b"cat\ndog\n"
    assert found["m/config.pbtxt"].decode().splitlines() == [
        'platform: "pytorch_libtorch"',
        "max_batch_size: 8",
        'input { name: "INPUT__0" data_type: TYPE_FP32 dims: [3, 224, 224] }',
        'parameters { key: "preprocess" value { string_value: "imagenet" } }',
        'output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" }',
    ]


@pytest.mark.parametrize(("file", "content"), [("net.pt2", EXPORTED), ("net.onnx", b"onnx")])
def test_an_image_classifier_that_says_its_inputs_has_its_labels_too(tmp_path: Path, file: str, content: bytes) -> None:
    labels = {"0": "cat", "1": "hot\ndog"}
    assert convert(tmp_path, file, content, handler="image_classifier", labels=labels) == 0
    found = files(tmp_path)
    assert found["m/labels.txt"] == b"cat\nhot dog\n"
    assert found["m/config.pbtxt"] == b'parameters { key: "preprocess" value { string_value: "imagenet" } }\n'


def test_inputs_of_torchscript_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--input=x:INT64:-1", "--input=words:BYTES:1", "--max-batch-size=4")
    assert convert(tmp_path, "net.pt", SCRIPT, *flags, handler="own.py") == 0
    assert files(tmp_path)["m/config.pbtxt"].decode().splitlines()[1:] == [
        "max_batch_size: 4",
        'input { name: "x" data_type: TYPE_INT64 dims: [-1] }',
        'input { name: "words" data_type: TYPE_STRING dims: [1] }',
    ]
    assert "handler 'own.py' is not converted" in capsys.readouterr().out


def test_an_inputs_name_may_have_quotes(tmp_path: Path) -> None:
    assert convert(tmp_path, "net.pt", SCRIPT, '--input="x":FP32:3') == 0
    written = files(tmp_path)["m/config.pbtxt"].decode()
    assert parse_model_config(written, "config.pbtxt").input[0].name == '"x"'


@pytest.mark.parametrize("text", [":FP32:3", "x:FP32:0", "x:FP32:3,-2", "x:FP31:3", "x"])
def test_what_is_no_input(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        convert(tmp_path, "net.pt", SCRIPT, f"--input={text}")
    assert f"expected NAME:DATATYPE:DIMS such as INPUT__0:FP32:3,224,224, got '{text}'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").write_text("no folder")
    assert convert(tmp_path, "net.onnx", b"onnx") == 1
    assert f"cannot write {tmp_path}/models/m: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(("file", "content"), [("net.pt2", EXPORTED), ("net.onnx", b"onnx")])
def test_what_says_its_inputs_needs_no_configuration(tmp_path: Path, file: str, content: bytes) -> None:
    assert convert(tmp_path, file, content) == 0
    assert files(tmp_path) == {f"m/2/model{Path(file).suffix}": content}


@pytest.mark.parametrize(
    ("file", "content", "manifest", "text"),
    [
        ("net.pt", SCRIPT, {}, "TorchScript does not name its inputs: name each, as in --input=INPUT__0:FP32:3,224"),
        ("net.pth", PICKLE, {"modelFile": "model.py"}, "model.pt holds a pickle of weights or of a module, not a"),
        ("net.bin", b"", {}, "model 'm' has the file 'net.bin'; expected TorchScript, a program of"),
        ("net.onnx", b"", {"modelName": "../m"}, "'../m' cannot be the name of a folder"),
        ("net.onnx", b"", {"modelVersion": "beta"}, "expected an archive of torch-model-archiver, with MAR-INF/"),
        ("net.onnx", b"", {"modelVersion": "-1"}, "model 'm' has the version -1; a folder's is from 0 up to 63 bits"),
        ("net.onnx", b"", {"modelVersion": "9" * 20}, f"model 'm' has the version {'9' * 20}; a folder's is from"),
        ("net.onnx", b"", {"modelName": 7}, "expected an archive of torch-model-archiver, with MAR-INF/"),
        ("net.onnx", b"", {"modelVersion": ["1"] * 10}, "expected an archive of torch-model-archiver, with MAR-INF/"),
        ("../../net.pt", SCRIPT, {}, "TorchScript does not name its inputs"),
    ],
)
def test_what_cannot_be_converted_leaves_nothing(
    tmp_path: Path, file: str, content: bytes, manifest: dict[str, str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, file, content, **manifest) == 1
    assert text in capsys.readouterr().err
    assert not files(tmp_path)


@pytest.mark.parametrize("labels", [{"1": "cat"}, {"0": []}, {"0": 7}, [["cat"]]])
def test_labels_that_cannot_be_read_leave_nothing(
    tmp_path: Path, labels: object, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, "net.pt", SCRIPT, handler="image_classifier", labels=labels) == 1
    assert 'index_to_name.json is expected to name each class, as in {"0": "cat", ' in capsys.readouterr().err
    assert not files(tmp_path)


@pytest.mark.parametrize("manifest", [b"[]", b'{"model": []}', b"[" * 100_000, b"\xff"])
def test_a_manifest_that_is_none(tmp_path: Path, manifest: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with zipfile.ZipFile(tmp_path / "m.mar", "w") as archive:
        archive.writestr("MAR-INF/MANIFEST.json", manifest)
    assert cli.main(["convert-mar", str(tmp_path / "m.mar"), f"--model-repository={tmp_path}"]) == 1
    assert "expected an archive of torch-model-archiver" in capsys.readouterr().err


def test_an_archive_that_unpacks_to_100_gigabytes_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(tmp_path, "net.onnx", b"onnx") == 0
    content = bytearray((tmp_path / "m.mar").read_bytes())
    entry = content.rindex(b"PK\x01\x02")
    content[entry + 24 : entry + 28] = (3 << 30).to_bytes(4, "little")
    (tmp_path / "m.mar").write_bytes(content)
    assert cli.main(["convert-mar", str(tmp_path / "m.mar"), f"--model-repository={tmp_path / 'other'}"]) == 1
    assert "m.mar unpacks to 3072 MiB, at most 1024 MiB are possible for its size" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_another_file_is_no_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.mar").write_bytes(b"no zip")
    assert cli.main(["convert-mar", str(tmp_path / "m.mar"), f"--model-repository={tmp_path}"]) == 1
    assert "expected an archive of torch-model-archiver" in capsys.readouterr().err
