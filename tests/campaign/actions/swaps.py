"""Swaps: newer files of a served model, in all ways in which files arrive. Clients get the old answer or the new one
meanwhile, and soon only the new one."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import add_constant
from support.waiting import PATIENCE_SECONDS

from campaign import models
from campaign.action import Kind
from campaign.stage import SETTLE_SECONDS, Stage

SERVED_SECONDS = PATIENCE_SECONDS
"""From the last byte until the new files answer, on a busy machine."""
HIGHEST_CONSTANT = 1 << 22
"""FP32 holds its sums with the clients' values exactly."""
SLOWEST_COPY_SECONDS = 2.0


@contextmanager
def new_constant(stage: Stage, model: str, random: random.Random) -> Iterator[float]:
    """Lock the model against other swaps, and draw a constant. The block writes files with it; then the model must add
    it."""
    constant = float(random.randrange(1, HIGHEST_CONSTANT))
    with stage.locks[model]:
        stage.constants[model].offer(constant)
        yield constant
        wait_until_added(stage, model, constant)
        stage.constants[model].settle(constant)


def wait_until_added(stage: Stage, model: str, constant: float) -> None:
    entry = infer_input("X", np.zeros((1, 2), np.float32))
    end = time.monotonic() + SERVED_SECONDS
    added: object = None
    with stage.poll.client() as client:
        while added != constant:
            assert time.monotonic() < end, f"{model} adds {added} and not {constant} {SERVED_SECONDS} s after the swap"
            try:
                added = float(client.infer(model, [entry], client_timeout=SERVED_SECONDS).as_numpy("Y")[0, 0])
            except triton.InferenceServerException as error:
                added = error  # The model's worker may have been killed meanwhile.
            time.sleep(0.02)


def newest_version(folder: Path) -> int:
    return max(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def file_of(stage: Stage, model: str) -> Path:
    folder = stage.copied / model
    return folder / str(newest_version(folder)) / "model.onnx"


def rename(stage: Stage, random: random.Random) -> None:
    """Write a new file, and rename it over the old one."""
    model = random.choice(models.COPIED)
    with new_constant(stage, model, random) as constant:
        file = file_of(stage, model)
        draft = file.with_name("model.onnx.tmp")
        draft.write_bytes(add_constant(constant))
        draft.rename(file)


def version(stage: Stage, random: random.Random) -> None:
    """Move in a complete folder of a higher version; then remove the previous version."""
    model = random.choice(models.COPIED)
    with new_constant(stage, model, random) as constant:
        folder = stage.copied / model
        last = newest_version(folder)
        staged = stage.staging / f"{model}-{last + 1}"
        staged.mkdir()
        (staged / "model.onnx").write_bytes(add_constant(constant))
        staged.rename(folder / str(last + 1))
    with stage.locks[model]:
        shutil.rmtree(folder / str(last), ignore_errors=True)


def slow_copy(stage: Stage, random: random.Random) -> None:
    """Truncate the file and write it chunk by chunk; no pause is as long as the settle time."""
    model = random.choice(models.COPIED)
    with new_constant(stage, model, random) as constant:
        content = add_constant(constant)
        chunks = random.randint(2, 40)
        size = -(-len(content) // chunks)
        pause = min(SETTLE_SECONDS / 4, random.uniform(0, SLOWEST_COPY_SECONDS) / chunks)
        with file_of(stage, model).open("wb", buffering=0) as file:
            for start in range(0, len(content), size):
                file.write(content[start : start + size])
                time.sleep(pause)


def in_place(stage: Stage, random: random.Random) -> None:
    """Overwrite the bytes in place; sometimes set an older modification time."""
    model = random.choice(models.COPIED)
    with new_constant(stage, model, random) as constant:
        file = file_of(stage, model)
        content = add_constant(constant)
        with file.open("r+b") as opened:
            opened.write(content)
            opened.truncate(len(content))
        if random.random() < 0.5:
            older = file.stat().st_mtime_ns - random.randrange(1, 3600) * 1_000_000_000
            os.utime(file, ns=(older, older))


def config_map(stage: Stage, random: random.Random) -> None:
    """Update as kubelet does: a new folder, a link to it renamed over `..data`, the old folder removed."""
    with new_constant(stage, models.MOUNTED, random) as constant:
        volume = stage.mounted
        old = volume / (volume / "..data").readlink()
        new = volume / f"..{random.getrandbits(40):x}"
        models.drop_constant(new, models.MOUNTED, constant)
        (volume / "..data_tmp").symlink_to(new.name)
        (volume / "..data_tmp").rename(volume / "..data")
        shutil.rmtree(old)


def git_checkout(stage: Stage, random: random.Random) -> None:
    """Check out a commit that was made on a branch elsewhere."""
    with new_constant(stage, models.CHECKED_OUT, random) as constant:
        branch = f"b{random.getrandbits(40):x}"
        clone = stage.staging / branch
        models.git(stage.staging, "clone", "--quiet", str(stage.checked_out), branch)
        models.drop_constant(clone, models.CHECKED_OUT, constant)
        models.git(clone, "commit", "--quiet", "--all", f"--message={constant}")
        models.git(stage.checked_out, "fetch", "--quiet", str(clone), f"HEAD:refs/heads/{branch}")
        shutil.rmtree(clone)
        models.git(stage.checked_out, "checkout", "--quiet", branch)


def rsync(stage: Stage, random: random.Random) -> None:
    """Run rsync in one of its modes: rename each file, rename all at the end, or in place."""
    model = random.choice(models.COPIED)
    with new_constant(stage, model, random) as constant:
        folder = stage.copied / model
        staged = stage.staging / f"rsync-{model}"
        shutil.rmtree(staged, ignore_errors=True)
        shutil.copytree(folder, staged)
        (staged / str(newest_version(folder)) / "model.onnx").write_bytes(add_constant(constant))
        way = random.choice(([], ["--delay-updates"], ["--inplace"], ["--bwlimit=1"], ["--delete-after"]))
        copy_by_rsync(staged, folder, way)
        shutil.rmtree(staged)


def copy_by_rsync(source: Path, target: Path, options: list[str]) -> None:
    """Copy by rsync; without rsync, do what it does: write a hidden file, and rename it over the old one."""
    if shutil.which("rsync"):
        words = ["rsync", "--archive", "--checksum", *options, f"{source}/", f"{target}/"]
        subprocess.run(words, check=True, capture_output=True, timeout=PATIENCE_SECONDS)
        return
    for file in (path for path in source.rglob("*") if path.is_file()):
        place = target / file.relative_to(source)
        draft = place.with_name(f".{place.name}.Xq3k9Z")
        shutil.copy2(file, draft)
        draft.rename(place)


WAYS: dict[str, Callable[[Stage, random.Random], None]] = {
    "rename": rename,
    "version": version,
    "slow-copy": slow_copy,
    "in-place": in_place,
    "config-map": config_map,
    "git": git_checkout,
    "rsync": rsync,
}
KINDS = tuple(Kind(f"swap.{name}", run) for name, run in WAYS.items())
