"""`rocserve doctor`: on this machine, and on machines made of a test's folders."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import pytest
from support.gpu_tree import GpuTree
from support.provider_plugins import stub_of_amds_plugin
from support.tools import Command, Ran
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.host import Host
from rocserve.backends.migraphx.options import Target
from rocserve.backends.pytorch.installing import torch_command
from rocserve.core.errors import ServeError
from rocserve.settings import EngineSettings
from rocserve.verbs.doctor import machine, verb
from rocserve.verbs.doctor.machine import Finding, State, examine_machine
from rocserve.verbs.doctor.trial import GREY, GREY_JPEG, NETWORK, TINY_ONNX, WEIGHTS, TinyModel, try_engine
from rocserve.verbs.doctor.verb import closing_lines, target_fault

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def answered() -> dict[tuple[str, str], float]:
    """The engines that have given the right answer, and their seconds."""
    return {}


@pytest.fixture(autouse=True)
def _engines_tried_once(answered: dict[tuple[str, str], float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command would try again the engines that work."""

    def try_once(model: TinyModel, parameters: Mapping[str, str], *others: Any) -> float:
        key = (model.filename, str(parameters))
        if key not in answered:
            answered[key] = try_engine(model, parameters, *others)
        return answered[key]

    monkeypatch.setattr(verb, "try_engine", try_once)


def _failure(model: TinyModel = NETWORK, seconds: float = PATIENCE_SECONDS) -> str:
    """The failure of the tiny model on ONNX Runtime; "" = its answer was right."""
    try:
        try_engine(model, {"engine": "onnxruntime"}, EngineSettings(), seconds)
    except ServeError as error:
        return error.text
    return ""


def test_every_engine_is_tried(migraphx_root: Path, command: Command) -> None:
    ran = command.on_migraphx(migraphx_root, "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(ran.out)["findings"]}
    assert (ran.status, json.loads(ran.out)["broken"]) == (0, 0)
    for engine in ("ONNX Runtime", "MIGraphX on ref", "rocAL's CPU engine"):
        assert findings[engine]["state"] == "works", findings[engine]
    assert findings["MIGraphX"]["text"].startswith("2.")
    assert findings["MIGraphX on gpu"]["state"] == "absent"
    assert "CPUExecutionProvider" in findings["onnxruntime"]["text"]
    assert str(command.cache) in findings["directory"]["text"]
    assert not command.cache.exists(), "a look leaves nothing behind"


def test_as_people_read_it_where_migraphx_is_broken(command: Command, tmp_path: Path) -> None:
    library = tmp_path / "lib" / "libmigraphx_c.so.3"
    library.parent.mkdir()
    library.write_bytes(b"no library")
    ran = command("doctor", "--migraphx-root", tmp_path, "--cache-directory", command.cache)
    assert ran.status == 1
    assert ran.row("ONNX Runtime")[0] == "works"
    assert ran.row("MIGraphX  ")[0] == "BROKEN"
    assert "advice: MIGraphX is installed, but cannot be loaded\n" in ran.out
    assert "\n1 broken\nworks here: ONNX Runtime, rocAL's CPU engine\n" in ran.out


def doctor_of_its_own(*words: str | Path) -> Ran:
    """Run the doctor in another process: this one has read $ROCSERVE_MIGRAPHX_ROOT when it imported the verb."""
    command = [sys.executable, "-m", "rocserve.cli", "doctor", *map(str, words)]
    process = subprocess.run(command, check=False, capture_output=True, text=True)
    return Ran(process.returncode, process.stdout, process.stderr)


def test_where_migraphx_is_not_installed_nothing_is_broken(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ROCSERVE_MIGRAPHX_ROOT", "ROCM_PATH", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    # Not asked here: another test of this process may have imported MIGraphX.
    ran = doctor_of_its_own("--cache-directory", command.cache)
    if ran.row("MIGraphX  ")[0] == "works":
        pytest.skip("MIGraphX is installed on this machine")
    assert ran.status == 0
    assert ran.row("MIGraphX  ")[0] == "absent"
    # What only a GPU needs is one line, not four commands.
    assert not [line for line in ran.out.splitlines() if line.startswith("advice:") and "AMD" in line]
    assert "$LD_LIBRARY_PATH" not in ran.out, "that cv2 has set"
    *_, first, second, third = ran.out.splitlines()
    assert first == "nothing that is installed is broken"
    assert second == "works here: ONNX Runtime, rocAL's CPU engine"
    assert third.startswith("an AMD GPU would also need ")
    assert third.endswith("MIGraphX: docs/guides/install-rocm.md has the commands")


def test_what_a_gpu_needs_is_advised_where_there_is_one() -> None:
    rocm = Finding("machine", "ROCm", State.ABSENT, "", "apt-get install rocm", is_for_gpus=True)
    onnx = Finding("software", "onnx", State.ABSENT, "", "pip install onnx")
    works = Finding("engines", "ONNX Runtime", State.WORKS, "")
    none = Finding("machine", "GPUs", State.ABSENT, "")
    driver = Finding("machine", "GPU driver", State.BROKEN, "", "modprobe amdgpu")
    assert list(closing_lines([none, rocm, onnx, works])) == [
        "advice: pip install onnx",
        "nothing that is installed is broken",
        "works here: ONNX Runtime",
        "an AMD GPU would also need ROCm: docs/guides/install-rocm.md has the commands",
    ]
    with_gpu = ["advice: apt-get install rocm", "nothing that is installed is broken", "works here: ONNX Runtime"]
    assert list(closing_lines([rocm, works])) == with_gpu
    # A GPU whose driver is not loaded is a GPU.
    assert list(closing_lines([none, driver, rocm]))[:2] == ["advice: modprobe amdgpu", "advice: apt-get install rocm"]
    assert list(closing_lines([none]))[-1] == "no engine works here, so no model file can be served"


def test_plugins_of_onnx_runtime_and_packages_that_are_empty(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages, root = stub_of_amds_plugin(tmp_path)
    for name, version in (("onnxruntime_ep_amdgpu", "0.0.0"), ("migraphx_libs", "0.0.1")):
        info = packages / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
        (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/RECORD,,\n")
    monkeypatch.syspath_prepend(packages)
    monkeypatch.setenv("PYTHONPATH", str(packages))
    monkeypatch.setenv("ROCSERVE_MIGRAPHX_ROOT", str(root))
    ran = doctor_of_its_own("--json", "--cache-directory", command.cache)
    findings = {finding["name"]: finding for finding in json.loads(ran.out)["findings"]}
    plugin = findings["MIGraphXExecutionProvider"]
    assert plugin["state"] == "absent"
    assert "onnxruntime-ep-migraphx finds no device that it can use (ONNX Runtime sees: CPU of" in plugin["text"]
    for name in ("onnxruntime-ep-amdgpu", "migraphx-libs"):
        assert (findings[name]["state"], findings[name]["text"]) == ("broken", "an empty package")
        assert findings[name]["advice"].startswith(f"pip uninstall {name}: PyPI has only the name")
    assert "onnxruntime-ep-migraphx" not in findings


def _found(tmp_path: Path, tree: GpuTree, variables: dict[str, str]) -> dict[str, Finding]:
    host = Host(tree.system, Path("/proc"), tmp_path / "rocm", variables)
    return {finding.name: finding for finding in examine_machine(host)}


def test_a_machine_with_gpus(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path / "sys")
    tree.add_cpu()
    tree.add_gpu(version=90010, memory=64 << 30, used=1 << 30)
    (tmp_path / "rocm" / ".info").mkdir(parents=True)
    (tmp_path / "rocm" / ".info" / "version").write_text("7.1.1-38\n")
    found = _found(tmp_path, tree, {"MIGRAPHX_TRACE_EVAL": "1", "HOME": "/root"})
    assert found["ROCm"].text == "7.1.1"
    assert found["GPU 0"].text == "gfx90a, 63.00 GiB of 64.00 GiB free, PCI 0000:01:00"
    assert found["$MIGRAPHX_TRACE_EVAL"].text == "1"
    assert "$HOME" not in found
    if not Path("/dev/kfd").exists():
        assert found["GPU driver"].state is State.BROKEN
        assert "--device=/dev/kfd" in found["GPU driver"].advice


def test_a_machine_without_gpus_and_a_gpu_that_is_asked_for_in_vain(tmp_path: Path) -> None:
    tree = GpuTree(tmp_path / "sys")
    tree.add_cpu()
    found = _found(tmp_path, tree, {})
    assert (found["GPUs"].state, found["ROCm"].state) == (State.ABSENT, State.ABSENT)
    for version, migraphx in (("10.1", "2.18"), ("10.2", "2.19")):
        assert f"amdrocm{version}" in found["ROCm"].advice and migraphx in found["ROCm"].advice
    assert "GPU driver" not in found
    found = _found(tmp_path, tree, {"HIP_VISIBLE_DEVICES": "3"})
    assert found["GPU 3"].state is State.BROKEN


def test_rocm_10_keeps_its_version_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "rocm/core/.info").mkdir(parents=True)
    (tmp_path / "rocm/core/.info/version").write_text("10.1.0\n")
    assert _found(tmp_path, GpuTree(tmp_path / "sys"), {})["ROCm"].text == "10.1.0"


@pytest.mark.parametrize(
    ("vendor", "kind", "driver_missing"),
    [("0x1002", "0x030000", True), ("0x1002", "0x040300", False), ("0x8086", "0x030000", False)],
)
def test_an_amd_gpu_without_its_driver(tmp_path: Path, vendor: str, kind: str, driver_missing: bool) -> None:
    tree = GpuTree(tmp_path / "sys")
    device = tree.system / "bus/pci/devices/0000:03:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    found = _found(tmp_path, tree, {})
    assert ("GPU driver" in found) == driver_missing
    if driver_missing:
        assert "0000:03:00.0" in found["GPU driver"].text
        assert "apt-get install amdgpu-dkms" in found["GPU driver"].advice
    (tree.system / "module/amdgpu").mkdir(parents=True)
    assert "GPU driver" not in _found(tmp_path, tree, {})


def test_each_software_that_is_missing_comes_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "is_installed", lambda module: False)
    absent = [finding for finding in machine.examine_software(Host()) if finding.state is State.ABSENT]
    assert {"onnxruntime", "onnx", "cv2", "amdsmi", "amd.rocal"} <= {finding.name for finding in absent}
    for finding in absent:
        assert "install" in finding.advice, finding


@pytest.mark.parametrize(
    ("rocm", "nvidia", "command"),
    [
        ("", False, "pip install torch --index-url https://download.pytorch.org/whl/cpu "),
        ("", True, "pip install torch (the build for NVIDIA GPUs)"),
        ("7.1.1-38", False, "pip install torch --index-url https://download.pytorch.org/whl/rocm7.1 "),
        ("10.1.0", True, "pip install torch --index-url https://stable.repo.amd.com/rocm/whl-next/ "),
    ],
)
def test_pytorch_is_advised_in_the_build_for_the_machine(tmp_path: Path, rocm: str, nvidia: bool, command: str) -> None:
    tree = GpuTree(tmp_path / "sys")
    if rocm:
        (tmp_path / "rocm/.info").mkdir(parents=True)
        (tmp_path / "rocm/.info/version").write_text(f"{rocm}\n")
    if nvidia:
        (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        (tmp_path / "proc/driver/nvidia/version").touch()
    assert torch_command(Host(tree.system, tmp_path / "proc", tmp_path / "rocm", {})).startswith(command)


def test_faults_are_found_together(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two packages of ONNX Runtime, a named root without MIGraphX, and a cache that others may write to."""
    info = tmp_path / "packages" / "onnxruntime_rocm-1.20.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: onnxruntime-rocm\nVersion: 1.20.0\n")
    monkeypatch.syspath_prepend(info.parent)
    root = tmp_path / "root"
    root.mkdir()
    command.cache.mkdir()
    command.cache.chmod(0o777)
    ran = command("doctor", "--migraphx-root", root, "--cache-directory", command.cache)
    assert ran.status == 1
    for row in ("onnxruntime  ", "MIGraphX  ", "directory"):
        assert ran.row(row)[0] == "BROKEN"
    assert "onnxruntime-rocm 1.20.0, providers: " in ran.out
    assert "advice: onnxruntime: pip uninstall onnxruntime onnxruntime-rocm, then pip install only one: " in ran.out
    assert f"MIGraphX is not in {root}, which --migraphx-root or $ROCSERVE_MIGRAPHX_ROOT names" in ran.out
    assert "\n3 broken\nworks here: ONNX Runtime, rocAL's CPU engine\n" in ran.out
    assert not [line for line in ran.out.splitlines() if line != line.rstrip()]


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("with libmigraphx_gpu.so: cannot open shared object file: No such file", State.ABSENT),
        ("with libmigraphx_gpu.so: libMIOpen.so.1: cannot open shared object file: No such file", State.BROKEN),
        ("with libmigraphx_gpu.so: undefined symbol: rocblas_initialize", State.BROKEN),
    ],
)
def test_a_target_is_absent_or_broken(words: str, state: State) -> None:
    finding = target_fault(Target.GPU, f"check_load_error: Dynamic loading or symbol lookup failed {words}")
    assert finding.state is state
    assert bool(finding.advice) == (state is State.BROKEN)


def test_the_tiny_model_is_valid_onnx() -> None:
    model = onnx.load_from_string(TINY_ONNX)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Add", "Relu"]
    assert tuple(onnx.numpy_helper.to_array(model.graph.initializer[0])) == WEIGHTS


def test_the_tiny_jpeg_is_grey() -> None:
    image = cv2.imdecode(np.frombuffer(GREY_JPEG, np.uint8), cv2.IMREAD_COLOR)
    assert image.shape == (16, 16, 3)
    assert (image == GREY).all()


class TestTrials:
    def test_right(self) -> None:
        assert _failure() == ""

    def test_a_wrong_answer(self) -> None:
        wrong = replace(NETWORK, answer=NETWORK.answer + 0.25, unit=" parts")
        assert _failure(wrong) == "its answer is wrong by 0.25 parts"

    def test_an_engine_that_refuses_the_model(self) -> None:
        assert _failure(replace(NETWORK, content=b"no model")).startswith(
            "trying a tiny model: ONNX Runtime cannot load "
        )

    def test_one_that_hangs(self) -> None:
        assert _failure(seconds=0.01) == (
            "trying a tiny model took longer than --timeout-secs (0.01 s) and was stopped; raise --timeout-secs (0 = no"
            " limit)"
        )


def test_a_killed_trial_leaves_no_folder_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next trial removes it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    script = """
import os, signal
from rocserve.settings import EngineSettings
from rocserve.verbs.doctor import trial
trial._answer = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
trial.try_engine(trial.NETWORK, {"engine": "onnxruntime"}, EngineSettings(), 60)
"""
    killed = subprocess.run([sys.executable, "-c", script], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [folder.name.startswith("rocserve-doctor-") for folder in tmp_path.iterdir()] == [True]
    assert _failure() == ""
    assert list(tmp_path.glob("rocserve-doctor-*")) == []
