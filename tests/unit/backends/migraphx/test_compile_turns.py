"""How many programs are compiled at once, over processes."""

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

from rocserve.backends.migraphx.compile_turns import CompileTurns
from rocserve.backends.migraphx.compiler import ProgramCompiler

HOLDER = """
import sys, time
from pathlib import Path
from rocserve.backends.migraphx.compile_turns import CompileTurns
with CompileTurns(Path(sys.argv[1]), 1).taken(False, lambda: None):
    print("taken", flush=True)
    time.sleep(60)
"""


class CalledOff(Exception):
    pass


def call_off() -> None:
    raise CalledOff


def nobody_waits() -> None:
    raise AssertionError("there is room")


def test_so_many_at_once_and_two_beside(tmp_path: Path) -> None:
    turns = CompileTurns(tmp_path / "turns", 2)
    with ExitStack() as stack:
        for low_priority in (False, False, True, True):
            stack.enter_context(turns.taken(low_priority, nobody_waits))
        for low_priority in (False, True):
            with pytest.raises(CalledOff), turns.taken(low_priority, call_off):
                pass
    with turns.taken(False, nobody_waits), turns.taken(True, nobody_waits):
        pass


def test_what_takes_long_at_low_priority_no_longer_counts(tmp_path: Path) -> None:
    turns = CompileTurns(tmp_path / "turns", 1, handed_on_seconds=0.05)
    lasting = CompileTurns(tmp_path / "turns", 1)
    handed_on = threading.Event()

    def wait_twice() -> None:
        with lasting.taken(True, lambda: None), lasting.taken(True, lambda: None):
            handed_on.set()
            assert stays.wait(10)

    stays = threading.Event()
    waiting = threading.Thread(target=wait_twice, daemon=True)
    with turns.taken(True, nobody_waits), turns.taken(True, nobody_waits):
        waiting.start()
        assert handed_on.wait(10)
    # Their end takes nothing away from those that have the turns now.
    with pytest.raises(CalledOff), turns.taken(True, call_off):
        pass
    stays.set()
    waiting.join(10)


def test_a_turn_that_others_wait_for_the_model_with_lasts(tmp_path: Path) -> None:
    turns = CompileTurns(tmp_path / "turns", 1, handed_on_seconds=0.0)
    with turns.taken(False, nobody_waits), pytest.raises(CalledOff), turns.taken(False, call_off):
        pass


def test_whoever_waits_goes_on_when_a_turn_is_given_back(tmp_path: Path) -> None:
    turns = CompileTurns(tmp_path / "turns", 1)
    waits, had = threading.Event(), threading.Event()

    def wait_for_a_turn() -> None:
        with turns.taken(False, waits.set):
            had.set()

    waiting = threading.Thread(target=wait_for_a_turn)
    with turns.taken(False, nobody_waits):
        waiting.start()
        assert waits.wait(10) and not had.is_set()
    waiting.join(10)
    assert had.is_set()


def test_the_end_of_a_process_gives_its_turn_back(tmp_path: Path) -> None:
    turns = CompileTurns(tmp_path / "turns", 1)
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "turns")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "taken\n"
        with pytest.raises(CalledOff), turns.taken(False, call_off):
            pass
        holder.kill()
    with turns.taken(False, nobody_waits):
        pass


@pytest.mark.parametrize("spoil", [lambda folder: folder.write_text(""), lambda folder: folder.mkdir(mode=0o777)])
def test_without_a_folder_of_ones_own_nobody_waits(tmp_path: Path, spoil: Callable[[Path], object]) -> None:
    folder = tmp_path / "turns"
    spoil(folder)
    if folder.is_dir():
        folder.chmod(0o777)
    turns = CompileTurns(folder, 1)
    with turns.taken(False, nobody_waits), turns.taken(False, nobody_waits):
        pass


def test_a_compiler_waits_for_its_turn_and_says_so(tmp_path: Path, migraphx_root: Path) -> None:
    bench = Bench(migraphx_root, tmp_path)
    turns = CompileTurns(tmp_path / "turns", 1)
    compiler = ProgramCompiler(bench.runner, bench.cache, model_name="x", model_folder=bench.folder, turns=turns)
    recipe = bench.recipe(networks.mlp(), 2, MLP)
    waits = threading.Event()
    told: list[str] = []

    def report(text: str) -> None:
        told.append(text)
        waits.set()

    compiling = threading.Thread(
        target=compiler.program, args=(recipe,), kwargs={"timeout_seconds": 60, "report": report}
    )
    with turns.taken(False, nobody_waits):
        compiling.start()
        assert waits.wait(10)
        text = "batch size 2 of model 'x': waiting until other programs have been compiled on this machine"
        assert told == [text] and bench.cache.find(recipe.key) is None
    compiling.join(60)
    assert bench.cache.find(recipe.key) is not None


def test_who_waits_for_a_turn_keeps_nobody_from_compiling_the_same_program(tmp_path: Path, migraphx_root: Path) -> None:
    bench = Bench(migraphx_root, tmp_path)
    turns = CompileTurns(tmp_path / "turns", 1)
    compiler = ProgramCompiler(bench.runner, bench.cache, model_name="x", model_folder=bench.folder, turns=turns)
    recipe = bench.recipe(networks.mlp(), 2, MLP)
    waits = threading.Event()
    beside = threading.Thread(
        target=compiler.program,
        args=(recipe,),
        kwargs={"timeout_seconds": 60, "low_priority": True, "report": lambda _: waits.set()},
    )
    with turns.taken(True, nobody_waits), turns.taken(True, nobody_waits):
        beside.start()
        assert waits.wait(10)
        compiler.program(recipe, timeout_seconds=60).release()
        beside.join(10)
        assert not beside.is_alive()
