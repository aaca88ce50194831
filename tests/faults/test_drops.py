"""Whatever is dropped into the repository, the served versions go on without one failed request."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import pytest
from support.load import ConstantLoad
from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.repository_index import index_of, reason_of
from support.server import RocserveProcess, Start
from support.waiting import wait_until

SETTLE_SECONDS = 0.5


def is_unavailable_with_a_reason(server: RocserveProcess, version: str) -> bool:
    state, reason = index_of(server, "m").get(version, ("", ""))
    return state == "UNAVAILABLE" and bool(reason)


def wait_until_state(server: RocserveProcess, version: str, state: str) -> None:
    wait_until(lambda: index_of(server, "m").get(version, ("", ""))[0] == state, f"version {version} {state}")


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    repository = tmp_path_factory.mktemp("drops") / "repository"
    drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    return start(repository, f"--repository-settle-secs={SETTLE_SECONDS}")


def test_drops_under_load_hurt_nobody(server: RocserveProcess, tmp_path: Path):
    repository = server.repositories[0]
    model = repository / "m"
    with ConstantLoad(server.address, "m", {1.0, 2.0, 3.0, 5.0, 6.0}, pause_seconds=0.05) as load:
        load.wait_until_answered_by(1.0)

        # A good version, written in one go.
        drop(repository, "m", add_constant(2.0), version=2)
        wait_until_state(server, "2", "READY")
        load.wait_until_answered_by(2.0)

        # A broken ONNX file as version 3: the index shows the reason, version 2 goes on.
        drop(repository, "m", b"this is no ONNX file", version=3)
        wait_until(lambda: is_unavailable_with_a_reason(server, "3"), "the reason of version 3")
        load.wait_until_answered_by(2.0)
        shutil.rmtree(model / "3")

        # A typo in the configuration: the reason names its line and column.
        (model / "config.pbtxt").write_text(ADD_CONSTANT_CONFIG.replace("max_batch_size", "max_batchsize"))
        wait_until(lambda: re.search(r"\b3:.*max_batchsize", reason_of(server, "m")), "the reason of the typo")
        load.wait_until_answered_by(2.0)
        (model / "config.pbtxt").write_text(ADD_CONSTANT_CONFIG)
        wait_until(lambda: "max_batchsize" not in reason_of(server, "m"), "the end of the typo")

        # A version that is copied byte by byte over 2 s: no partial file is ever loaded.
        content = add_constant(5.0)
        (model / "4").mkdir()
        with (model / "4" / "model.onnx").open("wb", buffering=0) as file:
            for position in range(len(content)):
                file.write(content[position : position + 1])
                time.sleep(2.0 / len(content))
        wait_until_state(server, "4", "READY")
        load.wait_until_answered_by(5.0)

        # A new folder by rename, as deployments do it: version 5.
        staged = drop(tmp_path, "staged", add_constant(6.0), version=5)
        shutil.move(staged / "5", model / "5")
        wait_until_state(server, "5", "READY")
        load.wait_until_answered_by(6.0)

    assert load.failures == []
    assert load.wrong == []
    assert set(load.answered) == {1.0, 2.0, 5.0, 6.0}
    assert "max_batchsize" in server.log_text


def test_a_folder_that_is_renamed_and_renamed_back_within_the_settle_time_is_no_change(
    serve, repository: Path, tmp_path: Path
):
    model = drop(repository, "m", add_constant(1.0), ADD_CONSTANT_CONFIG)
    server = serve(repository, "--repository-settle-secs=20", "--repository-poll-secs=1")
    with ConstantLoad(server.address, "m", {1.0}, threads=2) as load:
        load.wait_until_answered_by(1.0)
        shutil.move(model, tmp_path / "elsewhere")
        time.sleep(2.0)  # Scans find no folder.
        shutil.move(tmp_path / "elsewhere", model)
        time.sleep(2.0)
        load.wait_until_answered_by(1.0)
    assert load.failures == load.wrong == []
