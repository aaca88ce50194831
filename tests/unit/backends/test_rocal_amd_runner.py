"""Batches through one rocAL pipeline: complete, from lasting memory, and never answered with an older batch's
results."""

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
from support.waiting import PATIENCE_SECONDS

RESIZE = {"operation": "Resize", "dest_width": 16, "dest_height": 8, "is_output": True}
SHAPES = [(8, 16, 3)]
pytestmark = pytest.mark.usefixtures("rocal")


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


_CHILD = """
import logging, sys
import numpy as np, rocal_pybind
from support.amd_rocal import engines, run_one, setup_for
from rocserve.backends.rocal.amd import graph as amd

logging.basicConfig()
setup = setup_for({"decoder": {"input": "raw"}, "pipeline": [
    {"operation": "Resize", "dest_width": 4, "dest_height": 4, "is_output": True}]}, batch_size=1)
engine, _ = engines(setup)
exec(sys.argv[1])
run_one(engine, np.zeros((8, 8, 3), dtype=np.uint8))
"""
_WAITS_FOR_EVER = "rocal_pybind.contexts[-1].feed = lambda *arguments: None; amd._LONGEST_RUN_SECONDS = 0.2"
_BREAKS = "rocal_pybind.break_after(rocal_pybind.contexts[-1], 0)"


@pytest.mark.parametrize(
    ("fault", "status", "texts"),
    [
        (_WAITS_FOR_EVER, 1, ("Timeout (0:00:00.200000)!", 'rocal/amd/graph.py", line ', " in run\n")),
        (_BREAKS, 70, ("rocAL failed, the worker ends: its processing thread ended",)),
    ],
)
def test_a_rocal_that_cannot_go_on_ends_the_process_with_the_reason_in_the_log(
    fault: str, status: int, texts: tuple[str, ...]
) -> None:
    tests = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, fault],
        env={
            "PYTHONPATH": f"{STAND_IN}:{tests}:{tests.parent / 'server'}",
            "ROCAL_STAND_IN_BLOCKS": "1",
            "PATH": "/usr/bin:/bin",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == status, done.stderr
    assert all(text in done.stderr for text in texts)
