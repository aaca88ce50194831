"""Batches through one rocAL pipeline: complete, from lasting memory, and never answered with an older batch's results.
The first tests compare the stand-in with rocAL, because the others would miss faults without it."""

from __future__ import annotations

import gc
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import numpy as np
import pytest
from support.amd_rocal import STAND_IN, engines, run_batch, run_one, setup_for
from support.pictures import jpeg

RESIZE = {"operation": "Resize", "dest_width": 16, "dest_height": 8, "is_output": True}
SHAPES = [(8, 16, 3)]
pytestmark = pytest.mark.usefixtures("rocal")


class BareRocal:
    """Uses rocAL as AMD's examples do: JPEGs by their addresses."""

    def __init__(self, native: ModuleType, batch_size: int = 2, with_output: bool = True) -> None:
        from amd.rocal import fn, types
        from amd.rocal.pipeline import Pipeline

        self.native, self.types = native, types
        self.pipeline = Pipeline(batch_size=batch_size, num_threads=1, device_id=0, rocal_cpu=True)
        with self.pipeline:
            image, _ = fn.external_source([], mode=types.EXTSOURCE_RAW_COMPRESSED, max_width=100, max_height=100)
            image = fn.resize(image, resize_width=16, resize_height=8)
            if with_output:
                self.pipeline.set_outputs(image)

    def feed(self, *images: bytes, labels: Any = "zeros", eos: bool = False) -> None:
        # rocAL requires that its caller keeps the array.
        self.buffers = [np.frombuffer(image, dtype=np.uint8) for image in images]
        self.labels = np.zeros(len(images), dtype=np.int32) if isinstance(labels, str) else labels
        regions = []
        for buffer in self.buffers:
            region = self.native.ROIxywh()
            region.h = len(buffer)
            regions.append(region)
        self.native.externalSourceFeedInput(
            self.pipeline.get_handle(), [], self.labels, self.buffers, regions, 100, 100, 3,
            self.types.EXTSOURCE_RAW_COMPRESSED, self.types.NCHW, eos,
        )  # fmt: skip

    def results(self) -> np.ndarray:
        (tensor,) = self.pipeline.get_output_tensors()
        data = np.empty(tensor.dimensions(), dtype=tensor.dtype())
        tensor.copy_data(data)
        return data


def test_stand_in_waits_for_a_whole_batch(rocal: ModuleType) -> None:
    bare = BareRocal(rocal)
    bare.pipeline.build()
    bare.feed(jpeg())
    with pytest.raises(rocal.Hang):
        bare.pipeline.rocal_run()
    with pytest.raises(rocal.Hang):
        bare.pipeline.rocal_release()


def test_stand_in_takes_no_feed_without_labels(rocal: ModuleType) -> None:
    bare = BareRocal(rocal)
    bare.pipeline.build()
    with pytest.raises(TypeError):
        bare.feed(jpeg(), jpeg(), labels=None)


def test_stand_in_leaves_the_program_on_a_bad_graph(rocal: ModuleType) -> None:
    with pytest.raises(SystemExit) as raised:
        BareRocal(rocal, with_output=False).pipeline.build()
    assert raised.value.code == 0


def test_stand_in_runs_nothing_after_the_end(rocal: ModuleType) -> None:
    bare = BareRocal(rocal)
    bare.pipeline.build()
    bare.feed(jpeg(), jpeg(), eos=True)
    assert bare.pipeline.rocal_run() is bare.types.OK
    bare.results()
    bare.feed(jpeg(), jpeg(), eos=True)
    assert bare.pipeline.rocal_run() is bare.types.RUNTIME_ERROR


def test_stand_in_ends_with_none(rocal: ModuleType) -> None:
    bare = BareRocal(rocal)
    bare.pipeline.build()
    bare.feed(jpeg(), jpeg(), eos=True)
    assert bare.pipeline.run() is not None
    bare.pipeline.rocal_run()
    assert bare.pipeline.run() is None


def test_stand_in_answers_a_bad_image_with_an_earlier_one(rocal: ModuleType) -> None:
    bare = BareRocal(rocal)
    bare.pipeline.build()
    images = [jpeg(50, 50), jpeg(40, 40)]
    bare.feed(*images)
    bare.pipeline.rocal_run()
    first = bare.results()
    bare.feed(images[0][:100], images[1])
    bare.pipeline.rocal_run()
    second = bare.results()
    np.testing.assert_array_equal(second[0], first[0])


def test_stand_in_reads_what_was_fed_when_it_runs(rocal: ModuleType) -> None:
    bare = BareRocal(rocal)
    bare.pipeline.build()
    bare.feed(jpeg(), jpeg())
    bare.buffers = [np.array(buffer) for buffer in bare.buffers]
    bare.labels = np.zeros(2, dtype=np.int32)
    gc.collect()
    with pytest.raises(AssertionError, match="freed before it was read"):
        bare.pipeline.rocal_run()


def test_memory_that_was_fed_lives_on() -> None:
    setup = setup_for([RESIZE], batch_size=2)
    engine, reference = engines(setup)
    for width in (60, 30, 45, 200):
        images = [jpeg(width, 40), jpeg(40, width)]
        (given,), failures = run_batch(engine, setup, images, SHAPES)
        (expected,), _ = run_batch(reference, setup, images, SHAPES)
        del images
        gc.collect()
        assert not failures
        np.testing.assert_array_equal(given, expected)


def test_threads_wait_for_each_other() -> None:
    setup = setup_for({"decoder": {"input": "raw"}, "pipeline": [RESIZE]}, batch_size=2, threads=1)
    engine, _ = engines(setup)
    # So that concurrent runs would disturb each other.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            images = [np.full((30, 40, 3), level, dtype=np.uint8) for level in range(100)]
            results = list(threads.map(lambda image: run_one(engine, image)[0], images))
    finally:
        sys.setswitchinterval(interval)
    for level, result in enumerate(results):
        assert (result == level).all()


def test_nothing_of_an_earlier_image_stands_beside_a_smaller_one(rocal: ModuleType) -> None:
    setup = setup_for({"decoder": {"input": "raw"}, "pipeline": [RESIZE]}, batch_size=1)
    engine, _ = engines(setup)
    run_one(engine, np.full((90, 80, 3), 255, dtype=np.uint8))
    run_one(engine, np.full((20, 70, 3), 3, dtype=np.uint8))
    # The memory that rocAL received, with margins.
    memory = rocal.contexts[-1].memory[0]
    assert (memory[:20, :70] == 3).all()
    assert memory.sum() == 3 * memory[:20, :70].size


class Broken(Exception):
    pass


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise rocAL's reason instead of ending the process."""

    def end(status: int) -> NoReturn:
        assert status == 70
        raise Broken(str(sys.exception()))

    monkeypatch.setattr("os._exit", end)


def test_results_of_a_thread_that_died_are_not_handed_out(rocal: ModuleType, broken: None) -> None:
    engine, _ = engines(setup_for([RESIZE], batch_size=1))
    run_one(engine, jpeg())
    rocal.break_after(rocal.contexts[-1], 1)
    run_one(engine, jpeg(30, 30))
    with pytest.raises(Broken, match="its processing thread ended"):
        run_one(engine, jpeg(50, 30))


def test_a_loader_that_loses_count_is_noticed(rocal: ModuleType, broken: None) -> None:
    setup = setup_for([RESIZE], batch_size=4)
    engine, _ = engines(setup)
    images = [jpeg(30 + index, 40) for index in range(4)]
    _, failures = run_batch(engine, setup, images, SHAPES)
    assert not failures
    rocal.slip(rocal.contexts[-1])
    with pytest.raises(Broken, match="it worked on other images than it was given"):
        run_batch(engine, setup, images, SHAPES)


def test_a_batch_that_rocal_does_not_take_is_not_waited_for(
    rocal: ModuleType, monkeypatch: pytest.MonkeyPatch, broken: None
) -> None:
    engine, _ = engines(setup_for([RESIZE], batch_size=1))

    def refuse(context: Any, *arguments: Any) -> None:
        context.error = "no more memory"

    monkeypatch.setattr(rocal, "externalSourceFeedInput", refuse)
    with pytest.raises(Broken, match="no more memory"):
        run_one(engine, jpeg())


_WAITS_FOR_EVER = """
import rocal_pybind
from support.amd_rocal import engines, run_one, setup_for
from rocserve.backends.rocal.amd import graph as amd
import numpy as np

setup = setup_for({"decoder": {"input": "raw"}, "pipeline": [
    {"operation": "Resize", "dest_width": 4, "dest_height": 4, "is_output": True}]}, batch_size=1)
engine, _ = engines(setup)
rocal_pybind.contexts[-1].feed = lambda *arguments: None
amd._LONGEST_RUN_SECONDS = 0.2
run_one(engine, np.zeros((8, 8, 3), dtype=np.uint8))
"""


def test_a_call_that_never_returns_ends_the_process() -> None:
    tests = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _WAITS_FOR_EVER],
        env={
            "PYTHONPATH": f"{STAND_IN}:{tests}:{tests.parent / 'server'}",
            "ROCAL_STAND_IN_BLOCKS": "1",
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert "Timeout (0:00:00.200000)!" in done.stderr
    assert "getOutputTensors" in done.stderr


_BREAKS = """
import logging, rocal_pybind
import numpy as np
from support.amd_rocal import engines, run_one, setup_for

logging.basicConfig()
setup = setup_for({"decoder": {"input": "raw"}, "pipeline": [
    {"operation": "Resize", "dest_width": 4, "dest_height": 4, "is_output": True}]}, batch_size=1)
engine, _ = engines(setup)
rocal_pybind.break_after(rocal_pybind.contexts[-1], 0)
run_one(engine, np.zeros((8, 8, 3), dtype=np.uint8))
"""


def test_a_broken_rocal_ends_the_process_with_the_reason_in_the_log() -> None:
    tests = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _BREAKS],
        env={"PYTHONPATH": f"{STAND_IN}:{tests}:{tests.parent / 'server'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 70, done.stderr
    assert "rocAL failed, the worker ends: its processing thread ended" in done.stderr
