"""Where execution providers store what they compile, and which of their messages are kept."""

from __future__ import annotations

import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import add_constant, add_sub

from rocserve.backends.base import ModelSource
from rocserve.backends.onnx.external_weights import NO_WEIGHTS, ExternalWeights
from rocserve.backends.onnx.opener import SessionOpener, error_lines, without_source_position
from rocserve.backends.onnx.provider_options import CUDA, MIGRAPHX_PROVIDER, OPENVINO
from rocserve.backends.onnx.providers import Provider, ProviderPlan, with_caches
from rocserve.core.errors import ServeError, StatusCode

SourceMaker = Callable[..., ModelSource]

VARIABLE = "ORT_MIGRAPHX_MODEL_CACHE_PATH"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    os.environ.pop(VARIABLE, None)


@pytest.fixture
def source(model_source: SourceMaker, tmp_path: Path) -> ModelSource:
    source = model_source("model.onnx", add_sub())
    return replace(source, settings=replace(source.settings, cache_directory=str(tmp_path / "cache")))


def plan_of(*providers: Provider) -> ProviderPlan:
    return ProviderPlan(providers, accepts_cpu=False)


def migraphx(**options: str) -> ProviderPlan:
    return plan_of(Provider(MIGRAPHX_PROVIDER, options, caches_programs=True))


def folder_for(source: ModelSource, plan: ProviderPlan, weights: ExternalWeights = NO_WEIGHTS) -> Path:
    os.environ.pop(VARIABLE, None)
    with_caches(source, plan, weights)
    return Path(os.environ[VARIABLE])


def test_a_folder_for_all_that_a_program_depends_on(source: ModelSource, tmp_path: Path) -> None:
    first = folder_for(source, migraphx(device_id="0"))
    assert first.parent == tmp_path / "cache" / "onnxruntime"
    assert first.name.startswith("migraphx-")
    assert stat.S_IMODE(first.stat().st_mode) == 0o700
    assert folder_for(source, migraphx(device_id="0")) == first
    assert folder_for(source, migraphx(device_id="0", migraphx_fp16_enable="1")) != first
    os.environ["ORT_MIGRAPHX_FP16_ENABLE"] = "1"
    assert folder_for(source, migraphx(device_id="0")) != first
    del os.environ["ORT_MIGRAPHX_FP16_ENABLE"]
    weights = source.version_folder / "weights.bin"
    weights.write_bytes(b"1")
    second = folder_for(source, migraphx(device_id="0"), ExternalWeights({"weights.bin": weights}))
    source.model_file.write_bytes(add_constant(1.0))
    assert len({first, second, folder_for(source, migraphx(device_id="0"))}) == 3


def test_a_place_of_the_operators_own(source: ModelSource, tmp_path: Path) -> None:
    os.environ[VARIABLE] = str(tmp_path / "own")
    with_caches(source, migraphx(), NO_WEIGHTS)
    assert Path(os.environ[VARIABLE]).parent == tmp_path / "own"


def test_a_place_that_can_only_be_read_is_used(source: ModelSource, tmp_path: Path) -> None:
    folder, place = folder_for(source, migraphx()), tmp_path / "cache"
    commands = f"mount --bind {place} {place}; mount -o remount,bind,ro {place}"
    only_read = ["unshare", "--map-root-user", "--mount", "sh", "-ec", f'{commands}; exec "$@"', "sh"]
    if subprocess.run([*only_read, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    script = f"""
import os, pickle, sys
from rocserve.backends.onnx.external_weights import NO_WEIGHTS
from rocserve.backends.onnx.providers import MIGRAPHX_PROVIDER, Provider, ProviderPlan, with_caches
source = pickle.load(sys.stdin.buffer)
provider = Provider(MIGRAPHX_PROVIDER, {{}}, caches_programs=True)
with_caches(source, ProviderPlan((provider,), accepts_cpu=False), NO_WEIGHTS)
print(os.environ["{VARIABLE}"])
"""
    asked = [*only_read, sys.executable, "-c", script]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    found = subprocess.run(asked, input=pickle.dumps(source), env=environment, stdout=subprocess.PIPE, check=True)
    assert found.stdout.decode().strip() == str(folder)


def test_what_a_failed_compile_leaves_among_the_temporary_files_goes_with_it(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MIGraphX's provider compiles in this process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    os.environ["TMPDIR"] = "/before"
    dumps: list[Path] = []

    def fail(opener: SessionOpener, options: Any, providers: Any) -> None:
        if providers:
            dumps.append(Path(os.environ["TMPDIR"], "lowering1.mxr"))
            dumps[0].write_bytes(bytes(1000))
            raise RuntimeError("no kernel")

    monkeypatch.setattr(SessionOpener, "_session", fail)
    with pytest.raises(ServeError, match="on MIGraphXExecutionProvider: no kernel"):
        SessionOpener(source, migraphx()).open()
    (dump,) = dumps
    assert (dump.parent.parent, dump.parent.exists()) == (tmp_path, False)
    assert os.environ["TMPDIR"] == "/before"


def test_openvinos_options_name_its_cache_folder(source: ModelSource, tmp_path: Path) -> None:
    (provider,) = with_caches(
        source, plan_of(Provider(OPENVINO, {"precision": "FP32"}, caches_programs=True)), NO_WEIGHTS
    ).providers
    folder = Path(provider.options["cache_dir"])
    assert folder.parent == tmp_path / "cache" / "onnxruntime"
    assert folder.is_dir()
    assert provider.options["precision"] == "FP32"


def test_others_have_none(source: ModelSource, tmp_path: Path) -> None:
    plan = plan_of(Provider(CUDA, {}))
    assert with_caches(source, plan, NO_WEIGHTS) is plan
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("names", "limit", "kept"),
    [
        # Only folders with names of the cache's own go.
        (("migraphx-models", f"migraphx-{'0' * 32}", f"openvino-{'1' * 32}"), 1500, (True, False, True)),
        # Another user's folder, which cannot be removed.
        (tuple(f"migraphx-{digit * 32}" for digit in "012"), 2500, (True, False, True)),
    ],
    ids=["own", "another user's"],
)
def test_folders_that_were_used_least_lately_go(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], limit: int, kept: Any
) -> None:
    folders = [tmp_path / "cache" / "onnxruntime" / name for name in names]
    for used, folder in enumerate(folders):
        folder.mkdir(parents=True, mode=0o700)
        (folder / "program.mxr").write_bytes(b"x" * 1000)
        os.utime(folder, (used, used))
    remove = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: path == folders[0] or remove(path, **options))
    current = folder_for(replace(source, settings=replace(source.settings, cache_bytes=limit)), migraphx())
    assert (*(folder.exists() for folder in folders), current.exists()) == (*kept, True)


def test_a_cache_that_cannot_be_written(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(
        ServeError, match=r"cannot use the cache of compiled programs .*; set another folder with --cache-directory"
    ) as caught:
        with_caches(source, migraphx(), NO_WEIGHTS)
    assert caught.value.code is StatusCode.UNAVAILABLE


ERROR_OUTPUT = (
    "\x1b[0;93m2026-01-01 00:00:00.1 [W:onnxruntime:Default, some_provider.cc:12 Parse] a warning\n"
    " of two lines\x1b[m\n"
    "\x1b[1;31m2026-01-01 00:00:00.2 [E:onnxruntime:Default, provider_bridge_ort.cc:2310 Create]"
    " /onnxruntime/core/providers/x/x.cc:141 std::string x::Parse(const Options&) [ERROR] Device NPU is not there\n"
    " and never was\n"
    "\x1b[m\n"
)


def test_errors_among_what_was_said() -> None:
    assert error_lines(ERROR_OUTPUT) == ["Device NPU is not there", "and never was"]
    assert error_lines("") == []
    assert without_source_position("plain words") == "plain words"
