"""Ensembles and their members, in poll mode; an ensemble's samples go through its members before it counts as
loaded."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.dispatching import dispatcher_of
from support.waiting import PATIENCE_SECONDS

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal
from rocserve.core.exchange import Responder
from rocserve.core.load_check import RECORDED_FILE, LoadCheckFailed
from rocserve.core.model_config import (
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
from rocserve.core.model_names import ModelKey
from rocserve.core.request_memory import RequestMemory
from rocserve.core.requests import InferRequest
from rocserve.core.responses import InferResponse
from rocserve.core.sequences import SequenceTag
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.core.tensors import tensor_from_numpy
from rocserve.plane.loop import PlaneLoop
from rocserve.repository.ensemble_members import innermost_first
from rocserve.repository.ensemble_trials import EnsembleTrials
from rocserve.repository.model import ManagedModel
from rocserve.scheduling.ensemble.version import EnsembleVersion
from rocserve.settings import ControlMode

from .conftest import FakeLoader, Folders, Served, Start

MISSING = "ensemble e contains models that are not available or ambiguous: m"


@pytest.fixture
def e(folders: Folders) -> Path:
    """The folder of an ensemble, whose member is the good model m."""
    folders.model("m", 1)
    return folders.ensemble("e", "m")


def served_ensemble(served: Served) -> bool:
    return bool(served.table.table.models["e"].versions)


async def test_an_ensemble_is_ready_with_its_members_whatever_the_order(
    start: Start, folders: Folders, loader: FakeLoader
) -> None:
    folders.ensemble("e", "m")
    folders.ensemble("a_outer", "inner")
    folders.model("m", 1)
    folders.model("inner", 1)
    served: Served = await start()
    assert served.rows("e") == {"1": ("READY", "")}
    assert served.rows("a_outer") == {"1": ("READY", "")}
    assert loader.loads.index(("m", 1)) < loader.loads.index(("e", 1))
    assert served.repository.is_ready()


async def test_an_ensemble_waits_for_members_that_load(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader, caplog: pytest.LogCaptureFixture
) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    held = loader.hold("m")
    served = make()
    starting = asyncio.create_task(served.repository.start())
    await served.until(lambda: served.state("e") == "LOADING")
    assert served.reason("e") == MISSING
    held.set()
    await starting
    assert served.state("e") == "READY"
    assert "failed to load" not in caplog.text


async def test_an_ensemble_without_its_member_says_so_and_is_ready_when_it_comes(
    start: Start, folders: Folders
) -> None:
    folders.ensemble("e", "m")
    served: Served = await start()
    assert served.rows("e") == {"1": ("UNAVAILABLE", MISSING)}
    assert served.repository.failed_models() == {"e": MISSING}
    folders.model("m", 1)
    await served.until(lambda: served.state("e") == "READY")
    assert served.reason("e") == ""


async def test_an_ensemble_goes_and_comes_with_its_member_and_is_not_loaded_again(
    e: Path, served: Served, folders: Folders, loader: FakeLoader
) -> None:
    shutil.move(folders.root / "m", folders.root.parent / "away")
    await served.until(lambda: served.rows("e") == {"1": ("UNAVAILABLE", MISSING)})
    assert not served_ensemble(served), "no table offers an ensemble without its member"
    assert not served.repository.is_ready()
    shutil.move(folders.root.parent / "away", folders.root / "m")
    await served.until(lambda: served.state("e") == "READY")
    assert served_ensemble(served)
    assert loader.loads.count(("e", 1)) == 1


async def test_a_members_reload_never_takes_the_ensemble_away(
    e: Path, served: Served, folders: Folders, loader: FakeLoader
) -> None:
    offered: list[bool] = []
    served.repository.subscribe(lambda: offered.append(served_ensemble(served)))
    folders.version("m", 2, "new")
    await served.until(lambda: served.data("m") == "new")
    folders.version("m", 2, "newer")
    await served.until(lambda: served.data("m") == "newer")
    folders.version("m", 3, "broken")
    await served.until(lambda: served.state("m", "3") == "UNAVAILABLE")
    assert offered
    assert all(offered)
    assert loader.loads.count(("e", 1)) == 1
    assert served.rows("e") == {"1": ("READY", "")}


async def test_a_member_that_no_longer_fits_makes_the_ensemble_unavailable_with_the_reason(
    e: Path, served: Served, folders: Folders
) -> None:
    folders.config("m", tensor="RENAMED")
    await served.until(lambda: served.state("e") == "UNAVAILABLE")
    assert served.reason("e") == "in ensemble e, ensemble tensor E_IN is mapping to non-existing input IN in model m"
    folders.config("m")
    await served.until(lambda: served.state("e") == "READY")


@pytest.mark.parametrize("fails", [False, True])
async def test_an_ensemble_goes_on_with_a_replaced_member_until_its_new_content_is_loaded(
    e: Path, served: Served, folders: Folders, loader: FakeLoader, fails: bool
) -> None:
    old, member = (served.table.table.find(name, "") for name in ("e", "m"))
    offered: list[bool] = []
    served.repository.subscribe(lambda: offered.append(served_ensemble(served)))
    member_load, load = loader.hold("m"), loader.hold("e")
    ensemble = served.repository._table.models[ModelKey("e")]
    content = ensemble.content
    folders.config("m", tensor="RENAMED")
    (e / "config.pbtxt").write_text((e / "config.pbtxt").read_text().replace('key: "IN"', 'key: "RENAMED"'))
    await served.until(lambda: ("m", 1) in loader.loads[2:])
    await served.until(lambda: ensemble.content is not content)
    member_load.set()
    await served.until(lambda: loader.loads.count(("e", 1)) == 2)
    assert served.table.table.find("m", "") is not member
    assert served.table.table.find("e", "") is old
    assert served.state("e") == "READY"
    assert served.reason("e") == "newer content is being loaded"
    await asyncio.sleep(0.1)
    assert old.members == {"m": member}
    assert not old.has_left
    if fails:
        loader.failing["e"] = internal("no more")
    load.set()
    if fails:
        await served.until(lambda: served.state("e") == "UNAVAILABLE")
        await served.until(lambda: old.has_left)
    else:
        await served.until(lambda: old.is_unloaded)
        assert served.table.table.find("e", "") is not old
        assert all(offered)
    await served.until(lambda: member.is_unloaded)


async def test_an_ensemble_in_an_ensemble_follows_its_members_member(start: Start, folders: Folders) -> None:
    outer = folders.ensemble("outer", "e")
    config = (outer / "config.pbtxt").read_text()
    (outer / "config.pbtxt").write_text(config.replace('"IN"', '"E_IN"').replace('"OUT"', '"E_OUT"'))
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await start()
    assert served.state("outer") == "READY"
    shutil.move(folders.root / "m", folders.root.parent / "away")
    await served.until(lambda: served.state("outer") == "UNAVAILABLE")
    assert served.reason("outer") == "ensemble outer contains models that are not available or ambiguous: e"
    shutil.move(folders.root.parent / "away", folders.root / "m")
    await served.until(lambda: served.state("outer") == "READY")


async def test_other_threads_may_ask_while_an_ensemble_goes(
    start: Start, folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that they found once may be gone when they look again."""
    folders.ensemble("e", "m")
    served: Served = await start()
    content = served.repository._table.models["e"].content
    found: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(ManagedModel, "content", property(lambda _: found.pop() if found else None), raising=False)
        for readings in range(12):
            found[:] = [content] * readings
            assert {row.name for row in served.index()} == {"e"}
            found[:] = [content] * readings
            served.repository.failed_models()


@pytest.mark.parametrize("namespaces", [False, True])
async def test_the_index_shows_a_circle_of_ensembles(
    start: Start, folders: Folders, tmp_path: Path, namespaces: bool
) -> None:
    folders.ensemble("e", "f")
    folders.ensemble("f", "e")
    (tmp_path / "other").mkdir()
    served: Served = await start(folders.root, tmp_path / "other", model_namespacing=namespaces)
    assert served.rows("e") == {"1": ("UNAVAILABLE", "circular dependency between ensembles: e -> f -> e")}


async def test_among_namespaces_too_an_ensemble_is_compared_with_its_members_when_those_change(
    start: Start, folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reviewed: list[str] = []
    review_members = ManagedModel.review_members

    def noted(model: ManagedModel, *arguments: Any) -> None:
        reviewed.append(model.name)
        review_members(model, *arguments)

    monkeypatch.setattr(ManagedModel, "review_members", noted)
    other = Folders(tmp_path / "other")
    other.model("m", 1)
    folders.ensemble("e", "m")
    served: Served = await start(folders.root, other.root, model_namespacing=True)
    assert served.state("e") == "READY", "the only model of the name is its member"
    reviewed.clear()
    other.model("n", 1)
    await served.until(lambda: served.state("n") == "READY")
    assert reviewed == []
    shutil.rmtree(other.root / "m")
    await served.until(lambda: served.state("e") == "UNAVAILABLE")
    folders.model("m", 1)
    await served.until(lambda: served.state("e") == "READY")


async def test_among_namespaces_too_an_ensemble_whose_members_wait_for_their_files_has_not_failed(
    start: Start, folders: Folders, tmp_path: Path
) -> None:
    other = Folders(tmp_path / "other")
    folders.ensemble("e", "m")
    other.model("m")
    served: Served = await start(folders.root, other.root, model_namespacing=True)
    lacking = "at least one version must be available under the version policy of model 'm'"
    assert served.reason("m", "") == lacking
    assert served.reason("e").endswith(f" ambiguous: m; m: {lacking}")
    assert served.repository.is_ready()


_LAYER = """
platform: "ensemble"
max_batch_size: 8
input {{ name: "E_IN" data_type: TYPE_INT32 dims: 4 }}
output {{ name: "E_OUT" data_type: TYPE_INT32 dims: 4 }}
ensemble_scheduling {{
  step {{ model_name: "{0}_a" model_version: -1
         input_map {{ key: "E_IN" value: "E_IN" }} output_map {{ key: "E_OUT" value: "MID" }} }}
  step {{ model_name: "{0}_b" model_version: -1
         input_map {{ key: "E_IN" value: "MID" }} output_map {{ key: "E_OUT" value: "E_OUT" }} }}
}}
"""


def layers(folders: Folders, count: int) -> None:
    """Layers of two ensembles, whose members are those of the next layer; the members of the last layer are the model
    `m`."""
    for number in range(count):
        for name in ("a", "b"):
            folder = folders.ensemble(f"{number}_{name}", "m")
            if number < count - 1:
                (folder / "config.pbtxt").write_text(_LAYER.format(number + 1))


async def test_paths_through_ensembles_are_not_walked_one_by_one(start: Start, folders: Folders) -> None:
    layers(folders, 30)
    served: Served = await start()
    assert served.state("0_a") == "UNAVAILABLE"
    folders.model("m", 1)
    await served.until(lambda: served.state("0_a") == "READY")


async def test_a_load_request_reads_each_member_once(start: Start, folders: Folders, loader: FakeLoader) -> None:
    layers(folders, 20)
    served: Served = await start(control_mode=ControlMode.EXPLICIT)
    with pytest.raises(ServeError, match="not available or ambiguous: 1_a, 1_b"):
        await served.repository.load("0_a", {})
    folders.model("m", 1)
    await served.repository.load("0_a", {})
    assert sorted(Counter(loader.loads).values()) == [1] * (1 + 39)
    assert loader.loads[0] == ("m", 1)


def test_ensembles_may_be_nested_deeper_than_python_calls() -> None:
    depth = 3_000
    assert next(iter(innermost_first({str(number): (str(number + 1),) for number in range(depth)}))) == str(depth - 1)


async def test_a_broken_new_config_of_an_ensemble_keeps_it(
    start: Start, folders: Folders, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folders.ensemble("e", "m")
    folders.model("m", 1)
    served: Served = await start()
    config = (folder / "config.pbtxt").read_text()
    (folder / "config.pbtxt").write_text(config.replace('"m"', '"absent"'))
    await served.until(lambda: "not available or ambiguous: absent" in served.reason("e"))
    assert served.state("e") == "READY"
    assert served_ensemble(served)
    # Each reason is logged once, whatever else is published.
    folders.version("m", 2)
    await served.until(lambda: served.state("m", "2") == "READY")
    failed = f"newer content of 'e' failed to load: {MISSING.removesuffix('m')}absent"
    assert [text for text in caplog.messages if "failed to load" in text] == [failed]
    (folder / "config.pbtxt").write_text(config)
    await served.until(lambda: served.rows("e") == {"1": ("READY", "")})


async def test_stopping_unloads_ensembles_before_their_members(
    make: Callable[..., Served], folders: Folders, loader: FakeLoader
) -> None:
    folders.ensemble("e", "m")
    folders.model("m", 1)
    served = make()
    await served.repository.start()
    (ensemble,) = loader.alive("e")
    ensemble.may_unload.clear()
    stopping = asyncio.create_task(served.repository.stop())
    await asyncio.sleep(0.2)
    assert served.data("m") == "good", "the ensemble's last requests still need it"
    ensemble.may_unload.set()
    await asyncio.wait_for(stopping, PATIENCE_SECONDS)
    assert loader.alive("m") == []


TENSOR = ("FP32", (2,))


class Member:
    """Implements core.serving.ServedVersion as far as an ensemble uses it."""

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
    await EnsembleTrials(version, plane).warm_up(tmp_path)
    assert [seen.tolist() for seen in member.seen] == [[[0, 0]], [[0, 0]], [[3, 4], [3, 4]]]
    assert version.statistics.snapshot().inference_count == 0, "nobody asked for these"


async def test_a_sample_that_fails_fails_the_load(tmp_path: Path, plane: PlaneLoop) -> None:
    version = ensemble(Member(internal("out of order")), sample("first", "random"))
    with pytest.raises(ServeError) as raised:
        await EnsembleTrials(version, plane).warm_up(tmp_path)
    assert raised.value.text == "failed to run warmup sample 'first': in ensemble 'chain', out of order"


@pytest.mark.parametrize(("datatype", "kind"), [(DataType.UINT64, int), (DataType.BYTES, str)])
async def test_each_run_is_a_sequence_of_its_own(
    tmp_path: Path, plane: PlaneLoop, datatype: DataType, kind: type
) -> None:
    member = Member()
    identity = SequenceControl("ID", ControlKind.CORRELATION_ID, datatype)
    member.config = replace(Member.config, sequence_batching=SequenceBatching(controls=(identity,)))
    await EnsembleTrials(ensemble(member, sample("zeros", "zero", count=2)), plane).warm_up(tmp_path)
    first, second = member.sequences
    assert first is not None
    assert second is not None
    assert first.starts and first.ends and isinstance(first.id, kind)
    assert first.id != second.id


async def test_whether_ids_are_texts_is_asked_of_each_member_once(tmp_path: Path, plane: PlaneLoop) -> None:
    models: dict[str, ServedModel] = {}
    for layer in range(40):
        names = (f"{layer + 1}_a", f"{layer + 1}_b")
        inner = tuple(EnsembleStep(name, -1, {"X": "IN"}, {"Y": name}) for name in names)
        for name in ("a", "b"):
            member: Any = Member()
            member.config = ModelConfig(f"{layer}_{name}", ensemble_steps=inner)
            models[f"{layer}_{name}"] = ServedModel(f"{layer}_{name}", {1: member}, member, {})
    version = ensemble(Member())
    version.config = replace(version.config, ensemble_steps=(EnsembleStep("0_a", -1, {"X": "IN"}, {"Y": "OUT"}),))
    version.dispatcher.tables.table = ServingTable(models)
    await EnsembleTrials(version, plane).warm_up(tmp_path)


def check_file(folder: Path, **arrays: Any) -> Path:
    np.savez(folder / RECORDED_FILE, **{name.replace("_", "."): array for name, array in arrays.items()})
    return folder / RECORDED_FILE


async def test_the_whole_pipeline_answers_as_recorded(tmp_path: Path, plane: PlaneLoop) -> None:
    file = check_file(tmp_path, input_IN=np.float32([[3, 4], [5, 6]]), output_OUT=np.float32([[6, 8], [10, 12]]))
    member = Member()
    version = ensemble(member)
    report = await EnsembleTrials(version, plane).check_recorded_answers(file)
    assert report.parts == ("recorded answers are equal",)
    assert member.seen[0].tolist() == [[3, 4], [5, 6]]
    assert version.statistics.snapshot().inference_count == 0, "nobody asked for this"


async def test_a_pipeline_that_answers_otherwise_is_refused(tmp_path: Path, plane: PlaneLoop) -> None:
    file = check_file(tmp_path, input_IN=np.float32([[3, 4]]), output_OUT=np.float32([[6, 9]]))
    with pytest.raises(LoadCheckFailed) as caught:
        await EnsembleTrials(ensemble(Member()), plane).check_recorded_answers(file)
    assert caught.value.text == (
        "it does not answer as check.npz says: output 'OUT' differs by 0.11 of its largest value, the tolerance is"
        " 0.001: at [0, 1] the model gives 8, recorded is 9"
    )
    assert caught.value.can_pass, "another version of a member may answer as recorded"


async def test_a_pipeline_that_fails_on_the_recorded_inputs_is_refused(tmp_path: Path, plane: PlaneLoop) -> None:
    file = check_file(tmp_path, input_IN=np.float32([[3, 4]]), output_OUT=np.float32([[6, 8]]))
    with pytest.raises(LoadCheckFailed) as caught:
        await EnsembleTrials(ensemble(Member(internal("out of order"))), plane).check_recorded_answers(file)
    assert caught.value.text == "it fails on the inputs of check.npz: in ensemble 'chain', out of order"
