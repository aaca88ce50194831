"""Texts for clients and operators: paths, hints after unknown names, numbers of bytes."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.printable import names_hint, readable_size
from rocserve.core.private_paths import PrivatePaths


@pytest.fixture
def known(tmp_path: Path) -> Path:
    folder = tmp_path / "my models"
    folder.mkdir()
    return folder


def test_what_clients_may_know_stays(known: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(known)
    paths = PrivatePaths([link])
    for folder in (known, link):
        assert (
            paths.hide(f"cannot read '{folder}/m/1/model.onnx': is a folder")
            == "cannot read 'm/1/model.onnx': is a folder"
        )
        assert paths.hide(f"{folder} is not there") == "the model repository is not there"
    assert paths.hide(f"{link}-other/x") == ".../x"
    private = f"{tempfile.gettempdir()}/rocserve-model-a1_b2/m"
    assert paths.hide(f'File "{private}/1/model.py", line 3') == 'File "m/1/model.py", line 3'


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("/usr/lib/x/libhip.so.6: cannot open", ".../libhip.so.6: cannot open"),
        ("At:\n  /tmp/a/model.py(5): initialize", "At:\n  .../model.py(5): initialize"),
        (
            "[Errno 2] No such file or directory: '/etc/app/key.pem'",
            "[Errno 2] No such file or directory: '.../key.pem'",
        ),
        ("see file:///usr/share/x.txt", "see file://.../x.txt"),
        (f"{sys.prefix}/lib/python3/site.py:12: error", ".../site.py:12: error"),
        ("--log-file=/var/log/server.log", "--log-file=.../server.log"),
        ("folder /usr/lib/", "folder .../"),
    ],
)
def test_of_other_files_the_name_stays(text: str, hidden: str) -> None:
    assert PrivatePaths().hide(text) == hidden


@pytest.mark.parametrize(
    "text",
    [
        "node /backbone/layer1/Conv failed",
        "expected 1/2 of it",
        "unexpected inference input '/features/0/input'",
        "Method '/inference.GRPCInferenceService/No' and http://host/v2/usr/lib",
        "models/m/1/model.onnx",
        "Unable to open shared memory region: '/key'",
        "and/or",
        "",
    ],
)
def test_what_is_no_path_of_the_machine_stays(text: str) -> None:
    assert PrivatePaths([Path("/nonexistent-models")]).hide(text) == text


def test_errors_keep_their_code() -> None:
    error = ServeError(StatusCode.UNAVAILABLE, "no /usr/lib/x.so")
    hidden = PrivatePaths().without(error)
    assert (hidden.code, hidden.text) == (StatusCode.UNAVAILABLE, "no .../x.so")
    plain = ServeError(StatusCode.UNAVAILABLE, "busy")
    assert PrivatePaths().without(plain) is plain


def test_the_names_that_there_are_and_the_one_that_was_meant() -> None:
    assert names_hint("its inputs are", "image", ["size", "images"]) == (
        "; its inputs are: images, size; did you mean 'images'?"
    )
    assert names_hint("its inputs are", "x", ["images", "size"]) == "; its inputs are: images, size"
    assert names_hint("its inputs are", "image", ["images"]) == "; its inputs are: images"
    assert names_hint("its inputs are", "image", []) == ""


def test_of_many_names_some_are_listed_and_few_compared() -> None:
    many = [f"model_{number:03}" for number in range(100)]
    assert names_hint("served are", "model_01", many) == (
        "; served are: model_000, model_001, model_002, model_003, model_004, model_005, model_006, model_007, and 92"
        " more; did you mean 'model_015'?"
    )
    assert "did you mean" not in names_hint("served are", "x" * 100_000, many)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        (12 << 30, "12.00 GiB"),
        (5 << 38, "1.25 TiB"),
        (3 << 52, "12288.00 TiB"),
    ],
)
def test_sizes(count: int, text: str) -> None:
    assert readable_size(count) == text
