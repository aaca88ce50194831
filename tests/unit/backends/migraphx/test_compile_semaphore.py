"""The number of concurrent compiles, over processes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from support import migraphx_models as networks
from support.migraphx_compiling import MLP, Bench
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.migraphx.compiling.compiler import ProgramCompiler
from rocserve.backends.migraphx.compiling.recipe import ProgramRecipe
from rocserve.jobs.compile_semaphore import CompileSemaphore

HOLDER = """
import sys
from pathlib import Path
from rocserve.jobs.compile_semaphore import CompileSemaphore
with CompileSemaphore(Path(sys.argv[1]), 1).acquired(False, lambda: None):
    print("taken", flush=True)
    sys.stdin.read()
"""


class CalledOff(Exception):
    pass


def call_off() -> None:
    raise CalledOff


def nobody_waits() -> None:
    raise AssertionError("there is room")


def test_so_many_at_once_and_two_beside(tmp_path: Path) -> None:
    semaphore = CompileSemaphore(tmp_path / "semaphore", 2)
    with ExitStack() as stack:
        for low_priority in (False, False, True, True):
            stack.enter_context(semaphore.acquired(low_priority, nobody_waits))
        for low_priority in (False, True):
            with pytest.raises(CalledOff), semaphore.acquired(low_priority, call_off):
                pass
    with semaphore.acquired(False, nobody_waits), semaphore.acquired(True, nobody_waits):
        pass


def test_what_takes_long_at_low_priority_no_longer_counts(tmp_path: Path) -> None:
    semaphore = CompileSemaphore(tmp_path / "semaphore", 1, low_priority_seconds=0.05)
    lasting = CompileSemaphore(tmp_path / "semaphore", 1)
    handed_on = threading.Event()

    def wait_twice() -> None:
        with lasting.acquired(True, lambda: None), lasting.acquired(True, lambda: None):
            handed_on.set()
            assert stays.wait(PATIENCE_SECONDS)

    stays = threading.Event()
    waiting = threading.Thread(target=wait_twice, daemon=True)
    with semaphore.acquired(True, nobody_waits), semaphore.acquired(True, nobody_waits):
        waiting.start()
        assert handed_on.wait(PATIENCE_SECONDS)
    # Their end does not release the slots that others have now.
    with pytest.raises(CalledOff), semaphore.acquired(True, call_off):
        pass
    stays.set()
    waiting.join(PATIENCE_SECONDS)


def test_a_slot_that_others_wait_for_the_model_with_lasts(tmp_path: Path) -> None:
    semaphore = CompileSemaphore(tmp_path / "semaphore", 1, low_priority_seconds=0.0)
    with semaphore.acquired(False, nobody_waits), pytest.raises(CalledOff), semaphore.acquired(False, call_off):
        pass


def test_one_that_waits_goes_on_when_a_slot_is_given_back(tmp_path: Path) -> None:
    semaphore = CompileSemaphore(tmp_path / "semaphore", 1)
    waits, had = threading.Event(), threading.Event()

    def wait_for_a_slot() -> None:
        with semaphore.acquired(False, waits.set):
            had.set()

    waiting = threading.Thread(target=wait_for_a_slot)
    with semaphore.acquired(False, nobody_waits):
        waiting.start()
        assert waits.wait(PATIENCE_SECONDS) and not had.is_set()
    waiting.join(PATIENCE_SECONDS)
    assert had.is_set()


def test_the_end_of_a_process_gives_its_slot_back(tmp_path: Path) -> None:
    semaphore = CompileSemaphore(tmp_path / "semaphore", 1)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "semaphore")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
        with pytest.raises(CalledOff), semaphore.acquired(False, call_off):
            pass
        holder.kill()
    with semaphore.acquired(False, nobody_waits):
        pass


@pytest.mark.parametrize("spoil", [lambda folder: folder.write_text(""), lambda folder: folder.mkdir(mode=0o777)])
def test_without_a_folder_of_ones_own_nobody_waits(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    folder = tmp_path / "semaphore"
    spoil(folder)
    if folder.is_dir():
        folder.chmod(0o777)
    semaphore = CompileSemaphore(folder, 1)
    with semaphore.acquired(False, nobody_waits), semaphore.acquired(False, nobody_waits):
        pass


def one_at_a_time(root: Path, folder: Path) -> tuple[Bench, CompileSemaphore, ProgramCompiler, ProgramRecipe]:
    """A compiler whose semaphore has one slot, and its recipes."""
    bench = Bench(root, folder)
    semaphore = CompileSemaphore(folder / "semaphore", 1)
    compiler = ProgramCompiler(
        bench.runner, bench.cache, model_name="x", model_folder=bench.folder, semaphore=semaphore
    )
    return bench, semaphore, compiler, bench.recipe(networks.mlp(), 2, MLP)


def test_a_compiler_waits_for_its_slot_and_says_so(tmp_path: Path, migraphx_root: Path) -> None:
    bench, semaphore, compiler, recipe = one_at_a_time(migraphx_root, tmp_path)
    waits = threading.Event()
    messages: list[str] = []

    def report(text: str) -> None:
        messages.append(text)
        waits.set()

    compiling = threading.Thread(
        target=compiler.program, args=(recipe,), kwargs={"timeout_seconds": PATIENCE_SECONDS, "report": report}
    )
    with semaphore.acquired(False, nobody_waits):
        compiling.start()
        assert waits.wait(PATIENCE_SECONDS)
        text = "batch size 2 of model 'x': waiting until other programs have been compiled on this machine"
        assert messages == [text] and bench.cache.find(recipe.key) is None
    compiling.join(PATIENCE_SECONDS)
    assert bench.cache.find(recipe.key) is not None


def test_who_waits_for_a_slot_keeps_nobody_from_compiling_the_same_program(tmp_path: Path, migraphx_root: Path) -> None:
    _, semaphore, compiler, recipe = one_at_a_time(migraphx_root, tmp_path)
    waits = threading.Event()
    beside = threading.Thread(
        target=compiler.program,
        args=(recipe,),
        kwargs={"timeout_seconds": PATIENCE_SECONDS, "low_priority": True, "report": lambda _: waits.set()},
    )
    with semaphore.acquired(True, nobody_waits), semaphore.acquired(True, nobody_waits):
        beside.start()
        assert waits.wait(PATIENCE_SECONDS)
        compiler.program(recipe, timeout_seconds=PATIENCE_SECONDS).release()
        beside.join(PATIENCE_SECONDS)
        assert not beside.is_alive()
