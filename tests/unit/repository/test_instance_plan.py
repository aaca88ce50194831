"""Instance groups as workers: on the CPU, on GPUs, and without GPUs; host policies: names on the command line for CPU
cores."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.machine import ToldMachine

from rocserve.backends.base import EngineChoice, EngineSpec
from rocserve.config.definition import FolderReading
from rocserve.config.model_folder import FlatModel
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig
from rocserve.repository.engine_plan import SMALL_MODEL_BYTES, EnginePlan, plan_engine, plan_workers
from rocserve.repository.load_order import LoadOrder
from rocserve.repository.machine import ThisMachine
from rocserve.repository.worker_options import plan_version_workers
from rocserve.settings import KEEP_USER, EngineSettings, WorkerSettings

from .conftest import REGISTRY, Folders

CPU_ONLY = EngineSpec("some", "some.engine", thread_safe=True, forks_from_zygote=True)
# A module of the standard library, which is installed everywhere.
WITH_GPU = dataclasses.replace(CPU_ONLY, gpu_module="xml.dom")
MIGRAPHX = dataclasses.replace(CPU_ONLY, thread_safe=False, needs_migraphx=True)
WITHOUT_ITS_MODULE = dataclasses.replace(CPU_ONLY, gpu_module="xml.no_such_module")


def plan(
    spec: EngineSpec,
    *groups: InstanceGroup,
    machine: tuple[int, ...] = (),
    engine: str = "",
    auto_takes_gpus: bool = False,
    model_bytes: int = SMALL_MODEL_BYTES,
) -> list[tuple[InstanceKind, int | None, int]]:
    config = ModelConfig(
        name="m", backend="some", instance_groups=groups, parameters={"engine": engine} if engine else {}
    )
    choice = EngineChoice(spec, "of its reason", auto_takes_gpus=auto_takes_gpus)
    plans, _ = plan_workers(config, choice, ToldMachine(machine), model_bytes)
    return [(one.kind, one.device, one.instance_count) for one in plans]


def gpu_group(count: int = 1, gpus: tuple[int, ...] = ()) -> InstanceGroup:
    return InstanceGroup("", InstanceKind.GPU, count, gpus)


def test_on_the_cpu_instances_share_a_worker_where_the_engine_is_thread_safe_and_the_model_not_small() -> None:
    groups = (InstanceGroup("", InstanceKind.CPU, 2), InstanceGroup("", InstanceKind.AUTO, 3))
    large = SMALL_MODEL_BYTES + 1
    shared = plan(WITH_GPU, *groups, machine=(0,), model_bytes=large)
    assert shared == [(InstanceKind.CPU, None, 2), (InstanceKind.CPU, None, 3)]
    assert plan(WITH_GPU, *groups, machine=(0,)) == [(InstanceKind.CPU, None, 1)] * 5
    separate = dataclasses.replace(CPU_ONLY, thread_safe=False)
    assert plan(separate, groups[0], model_bytes=large) == [(InstanceKind.CPU, None, 1)] * 2


def test_on_gpus_each_instance_is_a_worker() -> None:
    assert plan(WITH_GPU, gpu_group(2, (1, 3))) == [(InstanceKind.GPU, device, 1) for device in (1, 1, 3, 3)]
    config = ModelConfig(name="m", instance_groups=(gpu_group(1, (0, 1)),))
    plans, _ = plan_workers(config, EngineChoice(WITH_GPU, "of its reason"), ToldMachine(), 0)
    assert [one.instance_name for one in plans] == ["m_0_0", "m_0_1"]
    assert [one.names for one in plans] == [("m_0_0",), ("m_0_1",)]


def test_instances_that_share_a_worker_have_names_too() -> None:
    groups = (InstanceGroup("", InstanceKind.CPU, 2), InstanceGroup("own", InstanceKind.CPU, 1))
    config = ModelConfig(name="m", instance_groups=groups)
    plans, _ = plan_workers(config, EngineChoice(CPU_ONLY, "of its reason"), ToldMachine(), SMALL_MODEL_BYTES + 1)
    assert [one.names for one in plans] == [("m_0_0", "m_0_1"), ("own_0",)]


def test_a_group_without_gpus_takes_all_of_the_machine() -> None:
    assert plan(WITH_GPU, gpu_group(), machine=(0, 1)) == [(InstanceKind.GPU, 0, 1), (InstanceKind.GPU, 1, 1)]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (CPU_ONLY, r"to the backend 'some' \(engine some runs it: of its reason\); use KIND_CPU"),
        (WITHOUT_ITS_MODULE, r"backend 'some' \(the Python module xml.no_such_module is not installed\)"),
        (WITH_GPU, r"\(none was found on this machine; name those to use in 'gpus'\)"),
        (MIGRAPHX, r"\(none was found on this machine; name those to use in 'gpus'\)"),
    ],
)
def test_a_gpu_that_is_not_there_is_replaced_by_the_cpu_only_where_auto_is_written(spec: EngineSpec, text: str) -> None:
    with pytest.raises(ServeError, match=text) as caught:
        plan(spec, gpu_group())
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    for engine in ("auto", " auto\n"):
        assert plan(spec, gpu_group(), engine=engine) == [(InstanceKind.CPU, None, 1)]


def test_auto_takes_the_gpu_where_there_is_one() -> None:
    assert plan(WITH_GPU, gpu_group(), machine=(0,), engine="auto") == [(InstanceKind.GPU, 0, 1)]


def test_passive_groups_have_no_worker() -> None:
    passive = dataclasses.replace(gpu_group(), passive=True)
    assert plan(CPU_ONLY, passive, InstanceGroup("", InstanceKind.CPU, 1)) == [(InstanceKind.CPU, None, 1)]
    with pytest.raises(ServeError, match="all its instance groups are passive"):
        plan(CPU_ONLY, passive)


def test_an_engine_that_auto_takes_to_gpus() -> None:
    auto = InstanceGroup("", InstanceKind.AUTO, 2)
    on_both = [(InstanceKind.GPU, device, 1) for device in (0, 0, 4, 4)]
    assert plan(MIGRAPHX, auto, machine=(0, 4), auto_takes_gpus=True) == on_both
    assert plan(MIGRAPHX, machine=(0, 4), auto_takes_gpus=True) == on_both[::2]
    chosen = InstanceGroup("", InstanceKind.AUTO, 1, (4,))
    assert plan(MIGRAPHX, chosen, machine=(0, 4), auto_takes_gpus=True) == on_both[2:3]
    on_cpu = [(InstanceKind.CPU, None, 1)] * 2
    assert plan(MIGRAPHX, auto, auto_takes_gpus=True) == on_cpu
    assert plan(MIGRAPHX, auto, machine=(0, 4)) == on_cpu
    assert plan(MIGRAPHX, dataclasses.replace(auto, kind=InstanceKind.CPU), machine=(0,), auto_takes_gpus=True) == (
        on_cpu
    )


def test_of_kind_model_an_instance_has_all_gpus_where_its_engine_takes_that() -> None:
    placed = InstanceGroup("", InstanceKind.MODEL, 2)
    takes = dataclasses.replace(WITH_GPU, takes_kind_model=True)
    for machine in ((), (0, 4)):
        assert plan(takes, placed, machine=machine, auto_takes_gpus=True) == [(InstanceKind.MODEL, None, 1)] * 2
    assert plan(WITH_GPU, placed, machine=(0, 4)) == [(InstanceKind.CPU, None, 1)] * 2
    assert plan(WITH_GPU, placed, machine=(4,), auto_takes_gpus=True) == [(InstanceKind.GPU, 4, 1)] * 2


def test_a_gpu_that_the_machine_has_not() -> None:
    text = "instance group m_0 of model m specifies invalid or unsupported gpu id 3; this machine has: 0, 1"
    with pytest.raises(ServeError, match=f"^{text}$"):
        plan(MIGRAPHX, gpu_group(1, (0, 3)), machine=(0, 1))


def test_migraphx_takes_a_gpu_that_is_named_where_none_is_listed() -> None:
    assert plan(MIGRAPHX, gpu_group(1, (3,))) == [(InstanceKind.GPU, 3, 1)]


def test_a_host_policy_keeps_workers_to_its_cores() -> None:
    machine = ToldMachine(gpus=(3,), policies={"corner": (0, 1), "gpu_3": (4,), "model": (5,), "cpu": (6,)})
    groups = (
        InstanceGroup("", InstanceKind.CPU, 1, host_policy="corner"),
        InstanceGroup("", InstanceKind.CPU, 1, host_policy="unheard of"),
        InstanceGroup("", InstanceKind.CPU, 1),
        InstanceGroup("", InstanceKind.MODEL, 1),
        InstanceGroup("", InstanceKind.GPU, 1),
    )
    plans, _ = plan_workers(
        ModelConfig("m", instance_groups=groups), EngineChoice(WITH_GPU, "of its reason"), machine, 0
    )
    assert [one.cores for one in plans] == [(0, 1), (), (6,), (5,), (4,)]


def test_workers_on_gpus_of_other_architectures_load_other_files(folders: Folders) -> None:
    folder = folders.model(
        "m", 1, more='cc_model_filenames { key: "gfx90a" value: "fast.onnx" } instance_group { kind: KIND_GPU }'
    )
    (folder / "1" / "fast.onnx").touch()
    (definition,) = FolderReading(folder, REGISTRY).definitions()
    machine = ToldMachine(gpus=(0, 1), architectures={0: "gfx90a"})
    engine = EngineChoice(WITH_GPU, "of its reason")
    plans, _ = plan_workers(definition.config, engine, machine, 0)
    planned = EnginePlan(WITH_GPU, "of its reason", plans, (), None, 0)
    workers = plan_version_workers(
        LoadOrder(definition, 1, folder / "1"), planned, EngineSettings(), WorkerSettings(user=KEEP_USER)
    )
    assert [(one.load.plan.device, Path(one.load.model_file).name) for one in workers] == [
        (0, "fast.onnx"),
        (1, "model.onnx"),
    ]


def test_workers_know_their_gpus_architecture() -> None:
    machine = ToldMachine(gpus=(0, 1), architectures={0: "gfx90a"})
    config = ModelConfig("m", instance_groups=(gpu_group(), InstanceGroup("", InstanceKind.CPU, 1)))
    plans, _ = plan_workers(config, EngineChoice(WITH_GPU, "of its reason"), machine, 0)
    assert [one.architecture for one in plans] == ["gfx90a", "", ""]


def test_clients_see_where_groups_have_come_to() -> None:
    machine = ToldMachine(gpus=(0, 1))
    groups = (gpu_group(), InstanceGroup("", InstanceKind.AUTO, 1), InstanceGroup("", InstanceKind.MODEL, 1))
    config = ModelConfig("m", instance_groups=groups)
    for takes_gpus, place in ((True, (InstanceKind.GPU, (0, 1))), (False, (InstanceKind.CPU, ()))):
        choice = EngineChoice(WITH_GPU, "of its reason", auto_takes_gpus=takes_gpus)
        assert plan_workers(config, choice, machine, 0)[1] == [
            (InstanceKind.GPU, (0, 1)),
            place,
            (InstanceKind.MODEL, ()),
        ]


def test_files_that_vanish_while_they_are_counted_are_an_error_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Folders(tmp_path).model("m", 1)
    (definition,) = FolderReading(folder, REGISTRY).definitions()

    def vanished(path: Path, pattern: str) -> Iterator[Path]:
        yield path / "model.onnx"
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    assert plan_engine(definition, folder / "1", ToldMachine()).model_bytes
    monkeypatch.setattr(Path, "rglob", vanished)
    with pytest.raises(ServeError, match=r"^the version's files cannot be read: No such file or directory$"):
        plan_engine(definition, folder / "1", ToldMachine())


def test_of_a_model_among_other_files_its_own_are_counted(tmp_path: Path) -> None:
    (tmp_path / "config.pbtxt").write_text('platform: "onnx_onnxv1"')
    (tmp_path / "resnet.onnx").write_bytes(bytes(100))
    (tmp_path / "resnet.onnx.data").write_bytes(bytes(20))
    own = sum(path.stat().st_size for path in tmp_path.iterdir())
    (tmp_path / "check.npz").write_bytes(bytes(1000))
    (tmp_path / "film.mkv").write_bytes(bytes(1000))
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "resnet.onnx").write_bytes(bytes(1000))
    for is_alone, expected in ((True, own), (False, own + 2000)):
        flat = FlatModel("resnet.onnx", is_alone=is_alone)
        (definition,) = FolderReading(tmp_path, REGISTRY, "resnet", flat=flat).definitions()
        assert plan_engine(definition, tmp_path, ToldMachine()).model_bytes == expected


CORE = min(os.sched_getaffinity(0))


def fault(machine: ThisMachine, name: str) -> ServeError:
    with pytest.raises(ServeError) as raised:
        machine.cores(name)
    return raised.value


def test_cores_are_ranges() -> None:
    cores = [f"{core}-{core}" for core in sorted(os.sched_getaffinity(0))]
    assert ThisMachine(EngineSettings(), [("p", "cpu-cores", ",".join(cores))]).cores("p") == sorted(
        os.sched_getaffinity(0)
    )
    assert ThisMachine(EngineSettings(), [("p", "cpu-cores", f"{CORE}-{CORE}")]).cores("p") == [CORE]


def test_a_policy_that_nobody_gave_is_any_core() -> None:
    assert ThisMachine(EngineSettings(), [("p", "cpu-cores", "0-0")]).cores("q") == ()


@pytest.mark.parametrize("text", ["3", "a-b", "4-2", "-1", "0-1,", "", "0-99999999999"])
def test_what_is_no_range(text: str) -> None:
    error = fault(ThisMachine(EngineSettings(), [("p", "cpu-cores", text)]), "p")
    assert error.code is StatusCode.INVALID_ARGUMENT
    assert error.text.startswith(
        "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got "
    )


def test_cores_that_are_not_there() -> None:
    error = fault(ThisMachine(EngineSettings(), [("p", "cpu-cores", "60000-60001")]), "p")
    assert error.code is StatusCode.INTERNAL
    assert error.text.startswith(
        "Unable to set NUMA thread affinity: host policy 'p' names the cores 60000,60001, of which this process may use"
    )


def test_the_cores_of_a_numa_node(tmp_path: Path) -> None:
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text(f"{CORE},60000-60003\n")
    policies = ThisMachine(
        EngineSettings(), [("p", "numa-node", "1"), ("q", "numa-node", "2"), ("r", "numa-node", "x")], nodes=tmp_path
    )
    assert policies.cores("p") == [CORE]
    assert fault(policies, "q").text == (
        "Unable to set NUMA memory policy: this machine has no NUMA node 2; it has node1"
    )
    assert fault(policies, "r").text == "host policy setting 'numa-node' is the number of a NUMA node. Got x"
