"""Damaged model files, dropped one after another into a server that answers another model meanwhile.
$ROCSERVE_DAMAGED_FILES gives their number; the default is for every day."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
from support import migraphx_models
from support.migraphx_serving import Array, ask, compiled_together, config, expected, index_entry, place, wait_for_end
from support.processes import has_ended
from support.server import RocserveProcess
from support.waiting import wait_until

FILES = int(os.environ.get("ROCSERVE_DAMAGED_FILES", "6"))
AT_ONCE = 6
"""Folders that exist at the same time."""

SERVED = migraphx_models.mlp()
VICTIMS = (migraphx_models.two_in_two_out(), migraphx_models.mini_resnet(), migraphx_models.reshaped_to_free())
ENDS = ("READY", "UNAVAILABLE")
"""The possible outcomes of a damaged file: with another bit in a weight it is still a model."""


def damaged(content: bytes, generator: np.random.Generator) -> bytes:
    """The content, damaged in one of the ways in which files are damaged."""
    data = bytearray(content)
    start, length = int(generator.integers(len(data))), int(generator.integers(1, 64))
    kind = int(generator.integers(6))
    if kind == 0:
        return bytes(data[:start])
    if kind == 1:
        data[start : start + length] = bytes(min(length, len(data) - start))
    elif kind == 2:
        data[start : start + length] = b""
    elif kind == 3:
        data[start:start] = generator.bytes(length)
    elif kind == 4:
        return generator.bytes(len(data))
    else:
        for _ in range(8):
            data[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
    return bytes(data)


class Asker:
    """Sends requests to the good model without a pause, and records wrong answers."""

    def __init__(self, server: RocserveProcess) -> None:
        self.answers = 0
        self.faults: list[str] = []
        self._client = server.client()
        self._inputs = migraphx_models.random_inputs(SERVED, 1)
        self._expected: Array = expected(SERVED, self._inputs)["scores"]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Asker:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            try:
                answer = ask(self._client, "served", self._inputs)["scores"]
                if not np.allclose(answer, self._expected, atol=1e-4):
                    self.faults.append(f"a wrong answer: {answer}")
            except Exception as error:
                self.faults.append(str(error))
            self.answers += 1


@pytest.fixture
def originals(migraphx_root: Path, tmp_path: Path) -> list[tuple[str, str, bytes]]:
    """Platforms, filenames and contents of intact models."""
    models = [("onnx_onnxv1", "model.onnx", model) for model in VICTIMS]
    programs = compiled_together(migraphx_root, tmp_path, *((model, 1) for model in VICTIMS))
    return [*models, *(("migraphx_mxr", "model.mxr", program) for program in programs)]


@pytest.mark.timeout(1200 + 20 * FILES)
def test_each_gets_a_reason_and_nothing_else_notices(
    serve, migraphx_root: Path, repository: Path, tmp_path: Path, originals: list[tuple[str, str, bytes]]
) -> None:
    place(repository, "served", "model.onnx", SERVED, config(1))
    flags = (f"--migraphx-root={migraphx_root}", f"--cache-directory={tmp_path}/cache", "--repository-poll-secs=1")
    server = serve(repository, flags=flags)
    server.wait_until_ready()
    client = server.client()
    alone, before = processes(server), server.server_process().num_fds()
    generator = np.random.default_rng(0)
    outcomes: dict[str, int] = dict.fromkeys(ENDS, 0)
    names = [f"damaged_{index}" for index in range(FILES)]
    with Asker(server) as asker:
        for start in range(0, FILES, AT_ONCE):
            batch = names[start : start + AT_ONCE]
            for index, name in enumerate(batch, start):
                platform, filename, content = originals[index % len(originals)]
                place(repository, name, filename, damaged(content, generator), config(1, platform))
            for name in batch:
                state, reason = wait_for_end(client, name, *ENDS)
                outcomes[state] += 1
                assert state == "READY" or re.search(r"model\.(onnx|mxr)|MIGraphX", reason), f"{name}: {reason}"
            for name in batch:
                shutil.rmtree(repository / name)
            for name in batch:
                wait_until(lambda name=name: index_entry(client, name)[0] != "READY", f"the end of '{name}'")
            wait_until(lambda: processes(server) <= alone, "the end of the damaged models' processes")
        wait_until(lambda: asker.answers > FILES, "answers of the other model")
    wait_until(lambda: server.server_process().num_fds() <= before + 4, "the end of their descriptors")
    assert not asker.faults
    assert outcomes["UNAVAILABLE"] > FILES / 2
    assert not list((tmp_path / "cache" / "programs").glob(".*"))
    print(f"{FILES} damaged files: {outcomes}, {asker.answers} answers meanwhile")


def processes(server: RocserveProcess) -> set[int]:
    """All processes that the server has started and that still run."""
    assert server.process is not None
    children = psutil.Process(server.process.pid).children(recursive=True)
    return {child.pid for child in children if not has_ended(child.pid)}
