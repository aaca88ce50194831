"""The command rocserve cache."""

from __future__ import annotations

import dataclasses
import io
import os
import time
from pathlib import Path

import pytest
from rich.console import Console
from support.cached_programs import GENEROUS, a_recipe, being_built, store, stored

from rocserve.backends.migraphx.compiling.program_cache import ABOUT_FILENAME, LoadTrial, ProgramCache
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment
from rocserve.backends.migraphx.options import CompileOptions, Precision, Target
from rocserve.cli import main
from rocserve.core.printable import readable_size
from rocserve.load_check.verdict_cache import VerdictCache, verdict_key
from rocserve.verbs.cache import ListOptions, list_programs

HOUR = 3600


@pytest.fixture
def cache(tmp_path: Path) -> ProgramCache:
    return ProgramCache(tmp_path / "cache", GENEROUS, spare_directory=tmp_path / "spare")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Away from files that earlier runs left in the temporary folder."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def run(cache: ProgramCache, *words: str) -> int:
    return main(["cache", words[0], "--cache-directory", str(cache.directory), *words[1:]])


def fill(cache: ProgramCache) -> dict[str, str]:
    """Three programs of two models, and the records of two files; returns the programs' keys, oldest first."""
    on_gpu = a_recipe(
        "resnet",
        options=CompileOptions(Target.GPU, Precision.FP16),
        environment=ProgramEnvironment("2.14.0", "7.1.1", "gfx90a"),
    )
    recipes = {
        "resnet 1": on_gpu,
        "resnet 8": dataclasses.replace(on_gpu, batch_size=8),
        "digits": a_recipe("digits", batch_size=0),
    }
    keys = {}
    for place, (name, recipe) in enumerate(recipes.items()):
        keys[name] = stored(cache, recipe, bytes(100_000), model=name.split()[0])
        used = time.time() - (3 - place) * HOUR - 60
        os.utime(cache.directory / "programs" / keys[name], (used, used))
    for key, crash in (("crashed", "MIGraphX ended by\nsignal 6 (SIGABRT)"), ("good", "")):
        trial = LoadTrial("mine", "model.mxr", "2.14.0", crash, time.time() - 2 * HOUR - 60)
        cache.load_trials.remember(key, trial)
    return keys


def taken(cache: ProgramCache) -> str:
    return readable_size(sum(entry.size_bytes for entry in cache.entries()))


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("   ") if cell.strip()]


def test_list_shows_each_program_and_what_is_not_tried_again(
    cache: ProgramCache, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = fill(cache)
    assert run(cache, "list") == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    sizes = [readable_size(entry.size_bytes) for entry in reversed(cache.entries())]
    assert [cells(line) for line in (lines[0], *lines[2:5])] == [
        ["program", "model", "precision", "target", "MIGraphX", "batch", "size", "last used"],
        [keys["digits"][:12], "digits", "fp32", "ref", "2.14.0", "-", sizes[0], "61 min ago"],
        [keys["resnet 8"][:12], "resnet", "fp16", "gpu gfx90a", "2.14.0", "8", sizes[1], "2 h ago"],
        [keys["resnet 1"][:12], "resnet", "fp16", "gpu gfx90a", "2.14.0", "1", sizes[2], "3 h ago"],
    ]
    assert lines[5:] == [
        "not tried again until it changes: model.mxr of model mine, which crashed 2 h ago (MIGraphX 2.14.0): MIGraphX"
        " ended by signal 6 (SIGABRT)",
        f"3 programs, {taken(cache)} in {cache.directory}",
    ]


def test_into_a_pipe_no_line_is_broken(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    stored(cache, a_recipe(), model="m" * 300)
    run(cache, "list")
    output = capsys.readouterr().out
    assert "m" * 300 in output and "\x1b" not in output


def test_on_a_terminal_it_is_a_table(cache: ProgramCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fill(cache)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120)
    monkeypatch.setattr("rocserve.verbs.cache.console_on", lambda: terminal)
    list_programs(ListOptions(str(cache.directory)))
    output = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[1m" in output and "gpu gfx90a" in output and "resnet" in output


def test_list_says_what_another_version_has_written(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    key = stored(cache, a_recipe())
    (cache.directory / "programs" / key / ABOUT_FILENAME).write_text('{"about": {"of": "the future"}}')
    assert run(cache, "list") == 0
    assert f" {key[:12]}   (cannot be read)   -" in capsys.readouterr().out


def test_list_says_what_is_being_compiled(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    with being_built(cache, a_recipe().key):
        run(cache, "list")
    assert capsys.readouterr().out == f"0 programs, 0 B in {cache.directory}; 1 program being compiled\n"


def test_without_a_cache_nothing_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("list", "prune"):
        assert main(["cache", action, "--cache-directory", str(tmp_path / "none")]) == 0
        assert capsys.readouterr().out == f"no programs in {tmp_path}/none: the folder does not exist\n"
    assert not (tmp_path / "none").exists()


def test_prune_keeps_within_the_default_limit(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    fill(cache)
    assert run(cache, "prune") == 0
    assert capsys.readouterr().out == f"0 programs removed, 0 B; 3 programs, {taken(cache)} in {cache.directory}\n"


def test_prune_to_a_size(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    keys = fill(cache)
    assert run(cache, "prune", "--size", "150K") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(",")[0] for line in lines[:2]] == [
        f"removed {keys['resnet 1'][:12]} of model resnet, batch 1",
        f"removed {keys['resnet 8'][:12]} of model resnet, batch 8",
    ]
    assert lines[2].startswith("2 programs removed, ")
    assert [entry.key for entry in cache.entries()] == [keys["digits"]]
    assert len(cache.load_trials.entries()) == 2


def test_prune_models(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    keys = fill(cache)
    assert run(cache, "prune", "digits", "mine", "none") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"removed {keys['digits'][:12]} of model digits, ")
    assert lines[1:3] == [
        "forgot that model.mxr of model mine crashed: it is tried again",
        "the cache has nothing of model none",
    ]
    assert [entry.key for entry in cache.entries()] == [keys["resnet 1"], keys["resnet 8"]]
    assert cache.load_trials.entries() == []


def test_prune_all(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    fill(cache)
    held = store(cache, a_recipe("held"), model="held")
    with being_built(cache, a_recipe("being compiled").key) as file:
        assert run(cache, "prune", "--all") == 0
        assert file.exists()
    output = capsys.readouterr().out
    assert f"kept {held.key[:12]} of model held, batch 1: a process is using it\n" in output
    assert "forgot that model.mxr of model mine crashed: it is tried again\n" in output
    assert "3 programs removed" in output and "1 program being compiled" in output
    assert [entry.key for entry in cache.entries()] == [held.key]
    assert cache.load_trials.entries() == []


def test_verdicts_of_load_checks(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = VerdictCache(cache.directory)
    for model in ("a", "b"):
        verdicts.remember(verdict_key("rows", model), {"reason": "rows are independent"})
    assert run(cache, "list") == 0
    assert capsys.readouterr().out.endswith("\n2 verdicts of load checks\n")
    assert run(cache, "prune") == 0 and verdicts.count == 2
    assert run(cache, "prune", "--all") == 0 and verdicts.count == 0
    assert "forgot 2 verdicts of load checks: models are checked again\n" in capsys.readouterr().out


@pytest.mark.parametrize("words", [("--all",), ("resnet", "digits")])
def test_what_cannot_be_removed_keeps_nothing_else(
    cache: ProgramCache, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    keys = fill(cache)
    # Nobody can lock it.
    (cache.directory / "programs" / f".{keys['resnet 1']}.lock").mkdir()
    assert run(cache, "prune", *words) == 1
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("removed ")] == [
        keys["resnet 8"][:12],
        keys["digits"][:12],
    ]
    assert lines[-1].startswith("2 programs removed, ")
    assert "kept" not in printed.out and "nothing is kept" not in printed.out
    assert "compiled programs cannot be removed: " in printed.err
    assert [entry.key for entry in cache.entries()] == [keys["resnet 1"]]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--size", "ten"), "argument --size: expected a number of bytes such as 500M or 10G, got 'ten'"),
        (("--size", "1G", "--all"), "argument --all: not allowed with argument --size"),
        (("--all", "digits"), "argument MODEL: not allowed with argument --all"),
    ],
)
def test_what_prune_does_not_take(
    cache: ProgramCache, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], text: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(cache, "prune", *words)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "kept"), [("0", 0), ("1000", 0), ("1k", 0), ("3000", 1), ("3K", 1), ("1M", 1), ("1g", 1), ("1T", 1)]
)
def test_sizes(cache: ProgramCache, text: str, kept: int) -> None:
    stored(cache, a_recipe(), bytes(1200))
    assert run(cache, "prune", "--size", text) == 0
    assert len(cache.entries()) == kept


def test_a_folder_that_others_may_write_to_is_refused(cache: ProgramCache, capsys: pytest.CaptureFixture[str]) -> None:
    cache.directory.chmod(0o777)
    for action in ("list", "prune"):
        assert run(cache, action) == 1
        assert "is not used: others may write to it (mode 0777)" in capsys.readouterr().err
