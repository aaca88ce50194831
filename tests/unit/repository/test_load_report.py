"""What a report on a failed load says of the model's folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocserve.core.errors import invalid_argument
from rocserve.protocol.page_pb2 import LoadReportResponse
from rocserve.repository.load_report import MOST_CONFIG_BYTES, MOST_FILES, LastLoad, make_report
from rocserve.repository.retries import Failure
from rocserve.repository.scan import ModelScan, scan_model
from rocserve.settings import RepositorySettings

CONFIG = "max_batch_size: 4\n\nmax_batch_sise: 5\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "repository" / "m"
    for path in ("1/model.onnx", "2/model.onnx", "2/parts/a.bin", "labels.txt"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(path)
    (folder / "config.pbtxt").write_text(CONFIG)
    return folder


def scan(folder: Path) -> ModelScan:
    return scan_model(ModelScan("m", folder, folder.parent), (folder.parent.resolve(),), 1000)


def report(folder: Path, version: int | None = 2, text: str = "", served_change_ns: int = 0) -> LoadReportResponse:
    failure = Failure(invalid_argument(text)) if text else None
    load = LastLoad(scan(folder), version, failure, served_change_ns=served_change_ns)
    return make_report(load, RepositorySettings(roots=(folder.parent,)))


def paths(found: LoadReportResponse) -> set[str]:
    return {mark.path for mark in found.files if not mark.path.endswith("/")}


def test_the_files_are_those_that_a_load_of_the_version_reads(folder: Path) -> None:
    of_all = {"config.pbtxt", "labels.txt"}
    assert paths(report(folder)) == of_all | {"2/model.onnx", "2/parts/a.bin"}
    assert paths(report(folder, version=1)) == of_all | {"1/model.onnx"}
    assert report(folder, version=1).file_count == 3
    assert paths(report(folder, version=None)) == of_all | {"1/model.onnx", "2/model.onnx", "2/parts/a.bin"}


def test_the_last_changed_files_come_first_and_are_bounded(folder: Path) -> None:
    for number in range(MOST_FILES + 20):
        (folder / "2" / f"{number}.bin").touch()
    (folder / "labels.txt").write_text("last")
    found = report(folder)
    assert (found.files[0].path, len(found.files), found.file_count) == ("labels.txt", MOST_FILES, MOST_FILES + 24)


def test_what_has_changed_since_the_version_that_is_served(folder: Path) -> None:
    served = scan(folder)
    (folder / "2" / "model.onnx").write_text("other")
    (folder / "labels.txt").unlink()
    found = report(folder, served_change_ns=served.changed_ns)
    assert found.is_served
    assert {mark.path for mark in found.files if mark.is_changed} == {"2/model.onnx", "./"}


def test_the_place_of_the_fault_in_the_configuration(folder: Path) -> None:
    found = report(folder, text="config.pbtxt:3:1: unknown field 'max_batch_sise' of ModelConfig")
    written = (found.config_file, found.config_text, found.config_line, found.config_is_cut)
    assert written == ("config.pbtxt", CONFIG, 3, False)
    for text in ("other_config.pbtxt:3:1: no", "model.onnx: no", ""):
        assert report(folder, text=text).config_line == 0


def test_a_chosen_configuration_is_shown(folder: Path) -> None:
    (folder / "configs").mkdir()
    (folder / "configs" / "small.pbtxt").write_text("# small")
    load = LastLoad(scan(folder), 1)
    settings = RepositorySettings(roots=(folder.parent,), model_config_name="small")
    found = make_report(load, settings)
    assert (found.config_file, found.config_text) == ("configs/small.pbtxt", "# small")


def test_a_long_configuration_is_cut_and_no_text_stays_readable(folder: Path) -> None:
    (folder / "config.pbtxt").write_bytes(b"\xff#" * MOST_CONFIG_BYTES)
    found = report(folder)
    assert found.config_is_cut
    assert found.config_text == r"\xff#" * (MOST_CONFIG_BYTES // 2)


def test_a_configuration_out_of_the_repository_is_not_read(folder: Path) -> None:
    secret = folder.parents[1] / "secret"
    secret.write_text("secret")
    (folder / "config.pbtxt").unlink()
    (folder / "config.pbtxt").symlink_to(secret)
    found = report(folder)
    assert found.config_text == ""
    assert all(mark.bytes != len("secret") for mark in found.files if mark.path == "config.pbtxt")


def test_a_model_that_is_gone_has_no_files() -> None:
    found = make_report(LastLoad(None, 1), RepositorySettings())
    assert (len(found.files), found.config_file) == (0, "")
