"""What MIGraphX measures about kernels is kept for the next compiles. A stand-in for the compiler reads and writes the
file as MIGraphX does on a GPU."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cached_programs import a_recipe, about, cache_at
from support.waiting import PATIENCE_SECONDS

from rocserve.backends.migraphx.compiling import problem_cache
from rocserve.backends.migraphx.compiling.compile_job import CompileResult
from rocserve.backends.migraphx.compiling.compiler import ProgramCompiler
from rocserve.backends.migraphx.compiling.problem_cache import VARIABLE, ProblemCache, merged
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment, ProgramRecipe
from rocserve.backends.migraphx.options import CompileOptions, Target
from rocserve.core.errors import unavailable

GPU = ProgramEnvironment("2.18.0", "10.1.0", "gfx942")


def pair(number: int, solution: Any = "v4") -> list[Any]:
    """A problem and its solution, as MIGraphX writes them."""
    return [{"name": "gpu::mlir_op", "problem": f"dot {number}"}, solution]


def of_device(name: str, *pairs: list[Any]) -> list[Any]:
    """As newer versions write those of a device."""
    return [{"device_name": name, "cu_count": 304}, [*pairs]]


def test_solutions_are_merged_by_their_problems() -> None:
    assert merged([], [pair(1)]) == [pair(1)]
    assert merged([pair(1), pair(2)], [pair(2, "v5"), pair(3)]) == [pair(1), pair(2, "v5"), pair(3)]
    other_order = [dict(reversed(pair(1)[0].items())), "v6"]
    assert merged([pair(1)], [other_order]) == [other_order]


def test_what_was_only_begun_is_left_out() -> None:
    """Up to 2.16 MIGraphX takes such a problem for solved, and then has no kernel for it."""
    assert merged([pair(1)], [pair(1, None), pair(2, None)]) == [pair(1)]
    assert merged([], [of_device("gfx942", pair(1, None), pair(2))]) == [of_device("gfx942", pair(2))]


def test_solutions_are_merged_for_each_device() -> None:
    known = [of_device("gfx942", pair(1)), of_device("gfx90a", pair(1))]
    found = [of_device("gfx942", pair(1, "v5"), pair(2))]
    assert merged(known, found) == [of_device("gfx942", pair(1, "v5"), pair(2)), of_device("gfx90a", pair(1))]
    # A file of an older version, and a solution that is a list.
    assert merged([pair(1)], found) == [pair(1), *found]
    assert merged([pair(1)], [pair(1, [1, 2])]) == [pair(1, [1, 2])]


class Kept:
    """A problem cache, and its warnings."""

    def __init__(self, folder: Path) -> None:
        self.warnings: list[str] = []
        self.cache = ProblemCache(folder / "kept.json", self.warnings.append)
        self._copy = folder / "copy.json"

    def compile(self, *measured: list[Any], **options: bool) -> Any:
        """Return what a compile finds in its file, to which it adds these pairs."""
        with self.cache.copied(self._copy, **options):
            found = json.loads(self._copy.read_text()) if self._copy.exists() else []
            if measured:
                self._copy.write_text(json.dumps([*found, *measured]))
        assert not self._copy.exists()
        return found


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path)


def test_a_compile_finds_what_earlier_ones_have_measured(kept: Kept) -> None:
    assert kept.compile(pair(1)) == []
    assert kept.compile(pair(2)) == [pair(1)]
    assert kept.compile() == [pair(1), pair(2)]
    assert kept.compile() == [pair(1), pair(2)]
    assert not kept.warnings
    assert [path.name for path in kept.cache.file.parent.iterdir()] == ["kept.json"]


def test_a_failed_compile_and_one_that_measures_nothing_add_nothing(kept: Kept, tmp_path: Path) -> None:
    kept.compile(pair(1))
    with pytest.raises(ValueError, match="failed"), kept.cache.copied(tmp_path / "c"):
        (tmp_path / "c").write_text(json.dumps([pair(2)]))
        raise ValueError("failed")
    assert kept.compile(pair(3, "any"), measures=False) == [pair(1)]
    assert kept.compile() == [pair(1)]


@pytest.mark.parametrize("content", [b'[[{"name": "x"}, ', b'{"a": 1}', b"[[1, 2]]", b"[" * 100_000, b"\xff", b"7"])
def test_a_damaged_file_starts_anew_with_a_warning(kept: Kept, content: bytes) -> None:
    kept.cache.file.write_bytes(content)
    assert kept.compile(pair(1)) == []
    assert kept.warnings[0].startswith(f"{kept.cache.file}, with MIGraphX's measurements of kernels, is not used and")
    assert kept.compile() == [pair(1)]


def test_a_file_that_a_compile_has_damaged_is_not_taken(kept: Kept, tmp_path: Path) -> None:
    kept.compile(pair(1))
    with kept.cache.copied(tmp_path / "c"):
        (tmp_path / "c").write_text("[[")
    assert "is not used" in kept.warnings[0]
    assert kept.compile() == [pair(1)]


def test_a_file_that_is_too_large_starts_anew(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.compile(*map(pair, range(10)))
    monkeypatch.setattr(problem_cache, "_MOST_BYTES", 300)
    assert kept.compile(pair(10)) == []
    assert "bytes, at most 300 are used" in kept.warnings[0]
    assert kept.compile() == [pair(10)]


def test_what_compiles_measure_at_the_same_time_is_kept_of_all(tmp_path: Path) -> None:
    together, warnings = threading.Barrier(8), list[str]()
    cache = ProblemCache(tmp_path / "kept.json", warnings.append)

    def compile_one(number: int) -> None:
        copy = tmp_path / f"copy{number}.json"
        with cache.copied(copy):
            together.wait(PATIENCE_SECONDS)
            copy.write_text(json.dumps([pair(number)]))

    threads = [threading.Thread(target=compile_one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    found = json.loads((tmp_path / "kept.json").read_text())
    assert sorted(found, key=str) == [pair(number) for number in range(8)]
    assert not warnings


class Compiles:
    """Takes the runner's place: each compile measures one problem."""

    def __init__(self) -> None:
        self.environments: list[Mapping[str, str]] = []
        self.found: list[Any] = []

    def run(self, job: Any, *_: Any, environment: Mapping[str, str], **__: Any) -> CompileResult:
        self.environments.append(environment)
        file = Path(environment.get(VARIABLE, "/none"))
        self.found.append(json.loads(file.read_text()) if file.exists() else [])
        if VARIABLE in environment:
            file.write_text(json.dumps([*self.found[-1], pair(len(self.found))]))
        Path(job.program_file).write_bytes(b"program")
        if job.recipe.source.digest == "bad":
            raise unavailable("no kernel")
        return CompileResult(about(job.recipe))

    def check_called_off(self, title: str) -> None:
        pass

    def report(self, text: str) -> None:
        pass


Compile = Callable[..., Any]


@pytest.fixture
def compiles() -> Compiles:
    return Compiles()


@pytest.fixture
def compile_for(compiles: Compiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compile:
    monkeypatch.delenv(VARIABLE, raising=False)
    # The stand-in does what the compiler calls.
    runner: Any = compiles
    compiler = ProgramCompiler(runner, cache_at(tmp_path / "cache"), model_name="m", model_folder=tmp_path)

    def compile_one(digest: str, environment: ProgramEnvironment = GPU, **options: bool) -> Any:
        chosen = CompileOptions(Target.GPU if environment.gpu_architecture else Target.REF, **options)
        recipe = a_recipe(digest, environment=environment, options=chosen)
        program = compiler.program(recipe, timeout_seconds=1)
        assert sorted(path.name for path in program.path.parent.iterdir()) == [".sha256", "about.json", "program.mxr"]
        return compiles.found[-1]

    return compile_one


def test_compiles_for_a_gpu_share_their_measurements(compile_for: Compile, compiles: Compiles) -> None:
    assert compile_for("a") == []
    assert compile_for("b") == [pair(1)]
    assert compile_for("c", exhaustive_tune=True) == [], "it would take the solutions of fewer kernels for its own"
    assert compile_for("c", replace(GPU, gpu_architecture="gfx90a")) == []
    assert compile_for("c", replace(GPU, migraphx_version="2.19.0")) == []
    with pytest.raises(Exception, match="no kernel"):
        compile_for("bad")
    assert compile_for("d") == [pair(1), pair(2)]
    assert compile_for("d", ProgramEnvironment("2.18.0")) == []
    assert VARIABLE not in compiles.environments[-1]


def test_an_untuned_program_takes_measurements_and_gives_none(compile_for: Compile, compiles: Compiles) -> None:
    compile_for("a")
    untuned = a_recipe("b", environment=GPU, options=CompileOptions(Target.GPU)).untuned
    assert untuned is not None
    assert compile_for("b", untuned.environment) == [pair(1)]
    assert compiles.environments[-1]["MIGRAPHX_SKIP_BENCHMARKING"] == "1"
    assert compile_for("c") == [pair(1)]
    assert "MIGRAPHX_SKIP_BENCHMARKING" not in compiles.environments[-1]


def test_the_operators_own_file_is_left_to_migraphx(
    compile_for: Compile, compiles: Compiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "/own.json")
    compile_for("a")
    assert VARIABLE not in compiles.environments[-1]


@pytest.mark.parametrize(
    ("environment", "options", "has_one"),
    [
        (GPU, CompileOptions(Target.GPU), True),
        (replace(GPU, migraphx_version="2.16.0"), CompileOptions(Target.GPU, exhaustive_tune=True), True),
        (replace(GPU, migraphx_version="2.15.0"), CompileOptions(Target.GPU), False),
        (replace(GPU, migraphx_version=""), CompileOptions(Target.GPU), False),
        (replace(GPU, variables={"MIGRAPHX_SKIP_BENCHMARKING": "1"}), CompileOptions(Target.GPU), False),
        (replace(GPU, variables={"MIGRAPHX_SKIP_BENCHMARKING": "0"}), CompileOptions(Target.GPU), False),
        (ProgramEnvironment("2.18.0"), CompileOptions(Target.REF), False),
    ],
)
def test_where_an_untuned_program_can_be_had(
    environment: ProgramEnvironment, options: CompileOptions, has_one: bool
) -> None:
    recipe: ProgramRecipe = a_recipe(environment=environment, options=options)
    untuned = recipe.untuned
    assert (untuned is not None) == has_one
    if untuned is not None:
        assert untuned.key != recipe.key
        assert untuned.environment.variables == {"MIGRAPHX_SKIP_BENCHMARKING": "1"}
        assert not untuned.options.exhaustive_tune
