"""Tries .mxr files that rocserve has not compiled itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import migraphx_models as networks
from support.migraphx_compiling import MLP, Bench

from rocserve.backends.migraphx.jobs.probe import InspectResult, ProbeJob
from rocserve.core.errors import StatusCode
from rocserve.jobs.messages import JobError

pytestmark = pytest.mark.long


@pytest.fixture
def bench(migraphx_root: Path, tmp_path: Path) -> Bench:
    return Bench(migraphx_root, tmp_path)


Probe = Callable[[bytes], InspectResult]


@pytest.fixture
def probe(bench: Bench, tmp_path: Path) -> Probe:
    def run(content: bytes) -> InspectResult:
        file = tmp_path / "model.mxr"
        file.write_bytes(content)
        return bench.runner.run(ProbeJob("x", str(file)), InspectResult, timeout_seconds=60)

    return run


@pytest.fixture
def program(bench: Bench) -> bytes:
    return bench.program(bench.recipe(networks.mlp(), 2, MLP)).path.read_bytes()


def failure(probe: Probe, content: bytes) -> JobError:
    with pytest.raises(JobError) as caught:
        probe(content)
    return caught.value


def test_a_sound_program_tells_its_inputs_and_outputs(probe: Probe, program: bytes) -> None:
    result = probe(program)
    assert [(tensor.name, tensor.datatype, tensor.shape) for tensor in result.parameters] == [("x", "float", (2, 16))]
    assert [(tensor.datatype, tensor.shape) for tensor in result.outputs] == [("float", (2, 10))]


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        pytest.param(lambda data: b"", "model.mxr", id="empty"),
        pytest.param(lambda data: b"garbage" * 100, "the .mxr is damaged or no compiled program", id="garbage"),
        pytest.param(lambda data: data[: len(data) // 2], "the .mxr is damaged or no compiled", id="half"),
        pytest.param(
            lambda data: data.replace(b"\xa6@param", b"\xa6@\x1bar\xe9m"),
            "Operator not found: @\\x1bar\ufffdm; the .mxr is damaged",
            id="unknown operator",
        ),
    ],
)
def test_damaged_files_are_refused(probe: Probe, program: bytes, damage: Callable[[bytes], bytes], text: str) -> None:
    error = failure(probe, damage(program))
    assert (error.is_crash, error.code) == (False, StatusCode.UNAVAILABLE)
    assert error.text.startswith("trying model.mxr of model 'x' failed while loading it: MIGraphX says: ")
    assert text in error.text
    assert error.text.isprintable()


def test_a_file_that_ends_the_process_is_told_from_others(probe: Probe, program: bytes) -> None:
    """The instruction that others read from has another name."""
    error = failure(probe, program.replace(b"\xa6output\xa1x", b"\xa6output\xa1y"))
    assert error.is_crash
    assert error.text.startswith(
        "trying model.mxr of model 'x' failed while loading it: MIGraphX ended by signal 6 (SIGABRT): "
    )
    assert "program.cpp" in error.text
