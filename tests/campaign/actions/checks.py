"""Load checks: versions that do not answer as their files say, or whose rows depend on each other. They are not served,
the earlier version is, and corrected files are."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
from support.infer_inputs import infer_input
from support.load_check import model as graph
from support.models import add_constant, drop
from support.repository_index import index_of
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

from campaign import models
from campaign.action import Kind
from campaign.actions.drops import wait_until_well
from campaign.actions.floods import remove_model
from campaign.actions.swaps import HIGHEST_CONSTANT, newest_version, wait_until_added
from campaign.stage import Stage

X = np.float32([[1, 2], [3, 4]])
STRICT_CONFIG = models.CONSTANT_CONFIG + 'parameters { key: "load_check" value { string_value: "strict" } }\n'
DEPENDENT = "g (float[N, 2] X) => (float[N, 2] Y) { m = ReduceMean<axes = [0]>(X) Y = Sub(X, m) }"


def record(folder: Path, added: float) -> None:
    """Record in the version's check.npz that its model adds a constant."""
    unfinished = folder / "check.tmp"
    with unfinished.open("wb") as file:
        np.savez(file, **{"input.X": X, "output.Y": X + np.float32(added)})
    unfinished.replace(folder / "check.npz")


def wait_until_refused(stage: Stage, model: str, version: int, told: str) -> None:
    def is_refused() -> bool:
        state, reason = index_of(stage.poll, model).get(str(version), ("", ""))
        assert state != "READY", f"{model} version {version}, which its load check must refuse, is served"
        return state == "UNAVAILABLE" and told in reason

    wait_until(is_refused, f"the refusal of {model} version {version}")


def recorded(stage: Stage, random: random.Random) -> None:
    """Add a higher version with wrong recorded answers, then correct them."""
    model = random.choice(models.COPIED)
    constant = float(random.randrange(1, HIGHEST_CONSTANT))
    wrong = random.choice((-constant, 3 * constant + 10))
    with stage.locks[model]:
        folder = stage.copied / model
        last = newest_version(folder)
        added = folder / str(last + 1)
        staged = stage.staging / f"recorded-{model}"
        staged.mkdir()
        (staged / "model.onnx").write_bytes(add_constant(constant))
        record(staged, wrong)
        staged.rename(added)
        # Meanwhile the honest clients check that no request is answered by the refused version.
        wait_until_refused(stage, model, last + 1, "check.npz")
        stage.constants[model].offer(constant)
        record(added, constant)
        wait_until_added(stage, model, constant)
        stage.constants[model].settle(constant)
        # Later swaps change the constant.
        (added / "check.npz").unlink()
        wait_until_well(stage, model)
        shutil.rmtree(folder / str(last))


def rows(stage: Stage, random: random.Random) -> None:
    """Add a model that must pass the check, then a version whose rows depend on each other, and correct it."""
    name = f"rows_{random.getrandbits(32):x}"
    drop(stage.staging, name, add_constant(1.0), STRICT_CONFIG).rename(stage.copied / name)
    _wait_until_it_adds(stage, name, 1.0)
    staged = stage.staging / f"{name}-2"
    staged.mkdir()
    (staged / "model.onnx").write_bytes(graph(DEPENDENT).SerializeToString())
    staged.rename(stage.copied / name / "2")
    wait_until_refused(stage, name, 2, "row")
    _wait_until_it_adds(stage, name, 1.0)
    (stage.copied / name / "2" / "model.onnx").write_bytes(add_constant(2.0))
    _wait_until_it_adds(stage, name, 2.0)
    remove_model(stage, name)


def _wait_until_it_adds(stage: Stage, name: str, constant: float) -> None:
    with stage.poll.client() as client:

        def adds() -> bool:
            try:
                answer = client.infer(name, [infer_input("X", X)], client_timeout=PATIENCE_SECONDS).as_numpy("Y")
            except InferenceServerException:
                return False  # It is loading, or its worker was killed with others of the same process name.
            assert (answer - X).ravel().tolist() in ([1.0] * X.size, [2.0] * X.size), f"{name} answered {answer}"
            return bool((answer - X == constant).all())

        wait_until(adds, f"{name} adds {constant}")


KINDS = (Kind("check.recorded", recorded), Kind("check.rows", rows, 3))
