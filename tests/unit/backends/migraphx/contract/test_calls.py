"""Calls of MIGraphX: other threads go on, objects are destroyed once, errors are raised and not printed."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support import migraphx_models as models
from support.migraphx import run_with_migraphx
from support.migraphx_programs import ProgramFactory, refusal
from support.workers import open_descriptors

from rocserve.backends.migraphx.binding import DimensionRange, MigraphxError
from rocserve.backends.migraphx.c_api import CBinding
from rocserve.backends.migraphx.installation import MigraphxInstallation

pytestmark = pytest.mark.in_migraphx_process


@pytest.fixture
def library(installation: MigraphxInstallation) -> CBinding:
    return CBinding(installation.library)


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    path = tmp_path / "libmigraphx_c.so.3"
    path.write_bytes(b"no library")
    with pytest.raises(MigraphxError, match=r"^MIGraphX's C library cannot be loaded: .*libmigraphx_c.so.3: "):
        CBinding(str(path))


def test_a_function_that_this_migraphx_lacks(library: CBinding) -> None:
    with pytest.raises(MigraphxError, match=r"^this version of MIGraphX is too old: its C API has no migraphx_fly"):
        library.call("fly")


@pytest.mark.parametrize(
    ("ends", "text"),
    [
        ("src/a.cpp:7: no kernel", "src/a.cpp:7: no kernel"),
        ("Failure opening file", "lowering: src/a.cpp:7: no kernel; then Failure opening file"),
    ],
)
def test_the_error_of_a_pass_whose_program_is_dumped(
    library: CBinding, monkeypatch: pytest.MonkeyPatch, ends: str, text: str
) -> None:
    """As MIGraphX 2.16 writes it: in colours, and with the dump's own failure in the place of the pass's."""

    def fail() -> int:
        begin = "\x1b[31m2026-05-29 10:43:58.000001 [ERROR] [src/pass_manager.cpp:188] "
        lines = (f"{begin}Error lowering: src/a.cpp:7: no kernel\x1b[0m", f'{begin}Dump: "/tmp/lowering1.mxr"\x1b[0m')
        os.write(2, "\n".join([*lines, f"migraphx_program_compile: Error: {ends}\n"]).encode())
        return 1

    monkeypatch.setattr(library, "function", lambda name: fail)
    with pytest.raises(MigraphxError) as caught:
        library.call("program_compile")
    assert str(caught.value) == text
    assert [line.partition("] ")[0] for line in library.take_messages()] == ["2026-05-29 10:43:58.000001 [ERROR"] * 2


def test_handles_are_looked_at(library: CBinding) -> None:
    assert library.new("compile_options_create", "compile_options_destroy").pointer != 0
    with pytest.raises(MigraphxError, match=r"Bad parameter compile_options: Null pointer$"):
        library.call("compile_options_set_fast_math", None, True)


def test_a_program_that_nobody_holds_is_freed(factory: ProgramFactory) -> None:
    program = factory.compiled(models.mini_resnet())
    program.run(models.random_inputs(models.mini_resnet(), 1))
    reference = weakref.ref(program)
    del program
    gc.collect()
    assert reference() is None


def test_runs_leave_nothing_behind(factory: ProgramFactory) -> None:
    model = models.mlp()
    program = factory.compiled(model)

    def held_after(count: int) -> tuple[int, int]:
        for seed in range(count):
            program.run(models.random_inputs(model, 1, seed))
        gc.collect()
        return len(gc.get_objects()), len(open_descriptors())

    before = held_after(100)
    objects, descriptors = held_after(200)
    assert objects < before[0] + 100
    assert descriptors <= before[1]


@contextmanager
def log(path: Path) -> Iterator[Path]:
    """Points standard error to a named file, as a server does; pytest's replacement has no name."""
    kept = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield path
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_an_error_is_raised_and_not_printed(factory: ProgramFactory, tmp_path: Path) -> None:
    with log(tmp_path / "log") as written:
        message = refusal(lambda: factory.parse(models.unknown_operator()))
        os.write(2, b"and standard error leads where it led\n")
    assert message.endswith("parse_graph: Unknown operator: MyFancyOp")
    assert written.read_text() == "and standard error leads where it led\n"


def test_what_a_run_writes_goes_to_the_log_even_if_the_process_dies_of_it(
    factory: ProgramFactory, tmp_path: Path
) -> None:
    shape = (DimensionRange(1, 8), 4)
    program = factory.compiled(models.two_in_two_out(), left=shape, right=shape)
    inputs = {"left": np.ones((2, 4), np.float32), "right": np.ones((3, 4), np.float32)}
    with log(tmp_path / "log") as written:
        message = refusal(lambda: program.run(inputs))
    assert message.endswith("shape {2, 4} and {3, 4} mismatch!")
    if factory.binding.name == "c_api":
        assert written.read_text() == f"migraphx_program_run: Error: {message}\n"


def test_a_program_is_printed_without_a_standard_output(factory: ProgramFactory) -> None:
    program = factory.parse(models.mlp())
    kept = os.dup(1)
    os.close(1)
    try:
        text = program.text()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    assert "softmax" in text


def test_errors_on_several_threads_at_once_are_each_their_own(factory: ProgramFactory, tmp_path: Path) -> None:
    mixed: list[str] = []

    def work(number: int) -> None:
        path = factory.file(models.unknown_operator(f"Operator{number}"), f"{number}.onnx")
        for _ in range(20):
            message = refusal(lambda: factory.binding.parse_onnx(path))
            if not message.endswith(f"Unknown operator: Operator{number}"):
                mixed.append(message)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    with log(tmp_path / "log") as written:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert mixed == []
    assert written.read_text() == ""


class Progress:
    """Another thread, which records during which of MIGraphX's functions it runs."""

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self._watched = threading.get_ident()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work)

    def _work(self) -> None:
        while not self._ended.is_set():
            frame = sys._current_frames()[self._watched]
            if frame.f_code is CBinding.call.__code__:
                self.seen.add(frame.f_locals["name"])
            self._ended.wait(0.001)

    def during(self, call: Callable[[], object], function: str) -> None:
        """Call again and again until the thread has run during `function`."""
        # Unless a call releases the GIL, the interpreter would switch threads this often: never.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        self._thread.start()
        try:
            # On a busy machine the thread may get no CPU during some of them.
            while function not in self.seen:
                call()
        finally:
            self._ended.set()
            self._thread.join()
            sys.setswitchinterval(interval)


@pytest.mark.parametrize("what", ["compile", "run"])
def test_other_threads_go_on_during_a_call(factory: ProgramFactory, what: str) -> None:
    if factory.binding.name != "c_api":
        pytest.skip("the module keeps the GIL")
    model = models.mini_resnet()
    inputs = models.random_inputs(model, 64)
    compiled = factory.compiled(model, 64)

    def call() -> None:
        if what == "run":
            compiled.run(inputs)
        else:
            factory.parse(model, 64).compile("ref")

    Progress().during(call, f"program_{what}")


ABORTING = """
import ctypes, sys
from pathlib import Path
from rocserve.backends.migraphx.c_api import CBinding
binding = CBinding(sys.argv[1])
program = binding.parse_onnx(Path(sys.argv[2]))
program._compile("ref", True, False)
"""


def test_what_is_said_before_an_abort_stays_in_a_file_without_a_name(
    installation: MigraphxInstallation, tmp_path: Path
) -> None:
    """The unguarded call. The parent reads the unnamed file that is the child's standard error."""
    empty = tmp_path / "empty.onnx"
    empty.write_bytes(b"\x08\x08")
    descriptor = os.memfd_create("standard-error")
    root = Path(os.environ["ROCSERVE_MIGRAPHX_ROOT"])
    status = run_with_migraphx(root, ABORTING, installation.library, str(empty), error_descriptor=descriptor).returncode
    assert status == -6  # SIGABRT
    assert b"Assertion" in os.pread(descriptor, 4096, 0)
    os.close(descriptor)
