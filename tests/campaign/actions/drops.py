"""Broken drops: files that are not models. The served versions go on, the index shows the reason, and when the files
are right again everything is as before."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.models import add_constant
from support.repository_index import index_of, reason_of, rows_of
from support.waiting import PATIENCE_SECONDS, wait_until

from campaign import models
from campaign.action import Kind
from campaign.actions.floods import remove_model
from campaign.actions.swaps import file_of, newest_version
from campaign.stage import Stage

NOTICED_SECONDS = PATIENCE_SECONDS
SEEN_SECONDS = 1.5
"""Long enough for the server to scan, if the action has nothing to wait for."""
MANY_FOLDERS = 40


@contextmanager
def replaced_text(path: Path, text: str) -> Iterator[None]:
    before = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(before)


def wait_until_well(stage: Stage, model: str) -> None:
    wait_until(
        lambda: ("READY", "") in index_of(stage.poll, model).values(), f"{model} well again", seconds=NOTICED_SECONDS
    )


def typo(stage: Stage, random: random.Random) -> None:
    model = random.choice(models.COPIED)
    with stage.locks[model]:
        wrong = random.choice(("max_batchsize: 8", "max_batch_size: 8 }", 'input { name: "X"', "max_batch_size: x"))
        with replaced_text(stage.copied / model / "config.pbtxt", models.CONSTANT_CONFIG + wrong):
            wait_until(
                lambda: reason_of(stage.poll, model), f"the reason of a typo in {model}", seconds=NOTICED_SECONDS
            )
        wait_until_well(stage, model)


def cut_config(stage: Stage, random: random.Random) -> None:
    """Cut or empty the config.pbtxt of a Python model, whose file does not tell its inputs."""
    with stage.locks[models.PYTHON]:
        config = stage.copied / models.PYTHON / "config.pbtxt"
        content = config.read_text()
        with replaced_text(config, content[: random.choice((0, random.randrange(len(content))))]):
            time.sleep(SEEN_SECONDS)
        wait_until_well(stage, models.PYTHON)


def cut_version(stage: Stage, random: random.Random) -> None:
    """Add a higher version whose file is empty, cut or noise; then remove the version."""
    model = random.choice(models.COPIED)
    with stage.locks[model]:
        folder = stage.copied / model
        number = newest_version(folder) + 1
        content = add_constant(models.FIRST)
        staged = stage.staging / f"cut-{model}"
        staged.mkdir()
        broken = random.choice((b"", content[: random.randrange(1, len(content) - 20)], random.randbytes(400)))
        (staged / "model.onnx").write_bytes(broken)
        staged.rename(folder / str(number))

        def is_told() -> bool:
            return index_of(stage.poll, model).get(str(number), ("", ""))[0] == "UNAVAILABLE"

        wait_until(is_told, f"the reason of the broken version {number} of {model}", seconds=NOTICED_SECONDS)
        shutil.rmtree(folder / str(number))
        wait_until_well(stage, model)


def cut_file(stage: Stage, random: random.Random) -> None:
    """Cut the served file for a while."""
    model = random.choice(models.COPIED)
    with stage.locks[model]:
        file = file_of(stage, model)
        content = file.read_bytes()
        file.write_bytes(content[: random.randrange(len(content) - 20)])
        time.sleep(SEEN_SECONDS)
        file.write_bytes(content)
        wait_until_well(stage, model)


def vanished(stage: Stage, random: random.Random) -> None:
    """Move a folder away and back before the server can notice: it stands still meanwhile."""
    model = random.choice(models.COPIED)
    with stage.locks[model]:
        server = stage.poll.server_process()
        server.suspend()
        try:
            (stage.copied / model).rename(stage.staging / model)
            (stage.staging / model).rename(stage.copied / model)
        finally:
            server.resume()
        wait_until_well(stage, model)


def no_model(stage: Stage, random: random.Random) -> None:
    """Add many folders without a model, and one good model among them, which is soon served."""
    prefix = f"none_{random.getrandbits(32):x}"
    folders = [stage.copied / f"{prefix}_{number}" for number in range(MANY_FOLDERS)]
    for folder in folders:
        (folder / "1").mkdir(parents=True)
        if random.random() < 0.3:
            (folder / "1" / "model.onnx").write_bytes(random.randbytes(100))
        if random.random() < 0.3:
            (folder / "config.pbtxt").write_text(random.choice(('platform: "none"', "}", 'backend: "python"')))
    good = f"good_{prefix}"
    models.drop_constant(stage.staging, good).rename(stage.copied / good)
    with stage.poll.client() as client:
        wait_until(
            lambda: client.is_model_ready(good), f"{good} among {MANY_FOLDERS} broken drops", seconds=NOTICED_SECONDS
        )
    for folder in folders:
        shutil.rmtree(folder)
    remove_model(stage, good)


def odd_name(stage: Stage, random: random.Random) -> None:
    """Add a folder whose name is not valid UTF-8: only this folder is not served."""
    path = os.fsencode(stage.copied) + b"/odd_\xff\xfe" + random.randbytes(4).hex().encode()
    os.mkdir(path)  # noqa: PTH102 - a name of bytes
    os.mkdir(path + b"/1")  # noqa: PTH102
    try:
        time.sleep(SEEN_SECONDS)
        names = {row.name for row in rows_of(stage.poll)}
        assert models.STEADY in names, f"the index lists {names}"
    finally:
        os.rmdir(path + b"/1")  # noqa: PTH106
        os.rmdir(path)  # noqa: PTH106


KINDS = (
    Kind("drop.typo", typo),
    Kind("drop.cut-config", cut_config),
    Kind("drop.cut-version", cut_version),
    Kind("drop.cut-file", cut_file),
    Kind("drop.vanished", vanished),
    Kind("drop.no-model", no_model, 2),
    Kind("drop.odd-name", odd_name, 2),
)
