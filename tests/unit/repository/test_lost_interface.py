"""What a configuration must not lose while its model's files stay the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig, SequenceBatching
from rocserve.repository.interface_check import lost_interface

from .conftest import Folders, Served

SERVED = ModelConfig(
    "m",
    max_batch_size=8,
    inputs=(InputConfig("A", DataType.FP32, (4,)), InputConfig("B", DataType.FP32, (4,))),
    outputs=(OutputConfig("X", DataType.FP32, (4,), labels=("a", "b", "c")), OutputConfig("Y", DataType.FP32, (4,))),
    sequence_batching=SequenceBatching(),
    decoupled=True,
)
A, B = SERVED.inputs
X, Y = SERVED.outputs


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({}, ""),
        ({"inputs": (A,)}, "input 'B'"),
        ({"inputs": ()}, "input 'A', input 'B'"),
        ({"outputs": (X,)}, "output 'Y'"),
        ({"sequence_batching": None}, "sequence_batching"),
        ({"decoupled": False}, "model_transaction_policy.decoupled"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"max_batch_size": 4}, "max_batch_size"),
        ({"outputs": (replace(X, labels=("a",)), Y)}, "2 of the 3 labels of output 'X'"),
        # Another interface: the change is deliberate.
        ({"inputs": (A, InputConfig("C", DataType.FP32, (4,)))}, ""),
        ({"inputs": (A, B, InputConfig("C", DataType.FP32, (4,)))}, ""),
        ({"outputs": (replace(X, labels=("a", "b", "d", "e")), Y)}, ""),
        ({"max_batch_size": 16}, ""),
        ({"inputs": (replace(A, dims=(-1, 4)),), "outputs": (replace(X, dims=(-1, 4)),), "max_batch_size": 0},
         "input 'B', output 'Y'"),
    ],
)  # fmt: skip
def test_what_is_lost(changes: dict[str, Any], lost: str) -> None:
    assert lost_interface(SERVED, replace(SERVED, **changes), True) == lost


def test_a_batch_size_that_is_written_or_was_not_before_is_meant() -> None:
    assert lost_interface(SERVED, replace(SERVED, max_batch_size=4), False) == ""


async def test_a_configuration_that_loses_an_output_leaves_what_serves(start: Any, folders: Folders) -> None:
    folder = folders.model("m", 1, more='output { name: "MORE" data_type: TYPE_INT32 dims: 4 }')
    served: Served = await start(retry_seconds=0.05)
    whole = (folder / "config.pbtxt").read_text()
    folders.config("m")
    await served.until(lambda: "lost output 'MORE'" in served.reason("m"))
    assert served.state("m") == "READY"
    assert "next try" not in served.reason("m")
    loads = len(served.loader.loads)
    await asyncio.sleep(0.5)
    # Only another configuration can help.
    assert len(served.loader.loads) == loads
    (folder / "config.pbtxt").write_text(whole)
    await served.until(lambda: served.reason("m") == "")


async def test_a_configuration_that_changes_with_its_model_is_meant(start: Any, folders: Folders) -> None:
    folders.model("m", 1, more='output { name: "MORE" data_type: TYPE_INT32 dims: 4 }')
    served: Served = await start()
    folders.config("m")
    folders.version("m", 1, "other")
    await served.until(lambda: served.data("m") == "other")
    assert served.reason("m") == ""


async def test_a_folder_that_goes_and_comes_may_have_lost_what_it_likes(start: Any, folders: Folders) -> None:
    folder = folders.model("m", 1, more='output { name: "MORE" data_type: TYPE_INT32 dims: 4 }')
    served: Served = await start()
    folders.config("m")
    await served.until(lambda: "lost output 'MORE'" in served.reason("m"))
    away = folder.rename(folder.with_name(".away"))
    await served.until(lambda: served.state("m") != "READY")
    away.rename(folder)
    await served.until(lambda: served.state("m") == "READY")
    assert served.reason("m") == ""


async def test_versions_stay_while_the_configuration_that_drops_them_cannot_be_used(
    start: Any, folders: Folders
) -> None:
    more = 'version_policy { all { } } output { name: "MORE" data_type: TYPE_INT32 dims: 4 }'
    folders.model("m", 1, 2, more=more)
    served: Served = await start()
    assert set(served.rows("m")) == {"1", "2"}
    folders.config("m")
    await served.until(lambda: "lost output 'MORE'" in served.reason("m", "2"))
    assert served.state("m", "1") == served.state("m", "2") == "READY"
