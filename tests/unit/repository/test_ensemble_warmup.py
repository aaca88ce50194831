"""Samples of an ensemble go through its members before it is said to be loaded."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.dispatching import dispatcher_of

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.model_config import (
    ControlInput,
    ControlKind,
    EnsembleStep,
    InputConfig,
    ModelConfig,
    OutputConfig,
    SequenceBatching,
    SequenceControl,
    WarmupInput,
    WarmupSample,
)
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest, InferResponse
from rocserve.core.sequences import SequenceTag
from rocserve.core.serving import Responder, ServedModel, ServingTable, ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import tensor_from_numpy
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.version_loader import warm_up_ensemble
from rocserve.scheduling.ensemble.run import EnsembleVersion

TENSOR = ("FP32", (2,))


@pytest.fixture
def plane() -> Iterator[PlaneLoop]:
    plane = PlaneLoop(logging.getLogger("test"))
    plane.start()
    yield plane
    plane.stop()


class Member:
    """Implements core.serving.ServedVersion as far as an ensemble asks."""

    name = "member"
    version = 1
    config = ModelConfig(
        "member",
        max_batch_size=4,
        inputs=(InputConfig("X", DataType.FP32, (2,)),),
        outputs=(OutputConfig("Y", DataType.FP32, (2,)),),
    )
    properties: ClassVar[dict[str, str]] = {}

    def __init__(self, error: ServeError | None = None) -> None:
        self.seen: list[np.ndarray[Any, Any]] = []
        self.sequences: list[SequenceTag | None] = []
        self._error = error

    def infer(self, request: InferRequest, responder: Responder) -> None:
        (shape,) = (head.shape for head in request.head.inputs)
        values = np.frombuffer(request.data[0], np.float32).reshape(shape)
        self.seen.append(values)
        self.sequences.append(request.sequence)
        if self._error is not None:
            responder.send(self._error)
        else:
            responder.send(InferResponse.of("member", "1", request.id, [tensor_from_numpy("Y", values * 2)]))


def ensemble(member: Member, *samples: WarmupSample) -> EnsembleVersion:
    tables = ServingTableHolder()
    served: Any = member
    tables.table = ServingTable({"member": ServedModel("member", {1: served}, served, {})})
    config = ModelConfig(
        "chain",
        max_batch_size=4,
        inputs=(InputConfig("IN", DataType.FP32, (2,)),),
        outputs=(OutputConfig("OUT", DataType.FP32, (2,)),),
        ensemble_steps=(EnsembleStep("member", -1, {"X": "IN"}, {"Y": "OUT"}),),
        model_warmup=samples,
    )
    return EnsembleVersion(config, b"", 1, ModelStatistics(), dispatcher_of(tables), RequestMemory())


def sample(name: str, source: str, count: int = 1, batch_size: int = 1) -> WarmupSample:
    return WarmupSample(name, batch_size, {"IN": WarmupInput(DataType.FP32, (2,), source)}, count)


async def test_samples_go_through_the_members(tmp_path: Path, plane: PlaneLoop) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "raw").write_bytes(np.array([3, 4], np.float32).tobytes())
    member = Member()
    version = ensemble(member, sample("zeros", "zero", count=2), sample("file", "file:raw", batch_size=2))
    await warm_up_ensemble(version, tmp_path, plane)
    assert [seen.tolist() for seen in member.seen] == [[[0, 0]], [[0, 0]], [[3, 4], [3, 4]]]
    assert version.statistics.snapshot().inference_count == 0, "nobody asked for these"


async def test_a_sample_that_fails_fails_the_load(tmp_path: Path, plane: PlaneLoop) -> None:
    version = ensemble(Member(internal("out of order")), sample("first", "random"))
    with pytest.raises(ServeError) as raised:
        await warm_up_ensemble(version, tmp_path, plane)
    assert raised.value.text == "failed to run warmup sample 'first': in ensemble 'chain', out of order"


@pytest.mark.parametrize(("datatype", "kind"), [(DataType.UINT64, int), (DataType.BYTES, str)])
async def test_each_run_is_a_sequence_of_its_own(
    tmp_path: Path, plane: PlaneLoop, datatype: DataType, kind: type
) -> None:
    member = Member()
    identity = ControlInput("ID", (SequenceControl(ControlKind.CORRELATION_ID, datatype),))
    member.config = replace(Member.config, sequence_batching=SequenceBatching(control_inputs=(identity,)))
    await warm_up_ensemble(ensemble(member, sample("zeros", "zero", count=2)), tmp_path, plane)
    first, second = member.sequences
    assert first is not None
    assert second is not None
    assert first.starts and first.ends and isinstance(first.id, kind)
    assert first.id != second.id
