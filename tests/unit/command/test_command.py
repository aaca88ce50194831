"""The command: its answers to wrong command lines, how it ends when it is stopped or cannot write, and the end of the
server part by part, whatever one part does."""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.cli import TOOLS, main
from rocserve.server import Ending

ADD_A_STOP = """
import sys
from importlib.abc import MetaPathFinder

class Stop(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "rocserve.verbs.doctor.verb":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Stop())
from rocserve.cli import main
sys.exit(main(["doctor"]))
"""


@pytest.mark.parametrize(
    ("arguments", "usage", "text"),
    [
        (("compile", "--precison", "int8", "m"), "usage: rocserve compile", "did you mean --precision?"),
        (
            ("cache", "prune", "--al"),
            "usage: rocserve cache prune",
            "unrecognized arguments: --al; did you mean --all?",
        ),
        (("serve", "--model-repo=x"), "usage: rocserve serve", "did you mean --model-repository?"),
        (("cache", "list", "more"), "usage: rocserve cache list", "unrecognized arguments: more\n"),
        (("--nothing",), "usage: rocserve [-h]", "unrecognized arguments: --nothing\n"),
        (
            ("--model-repository=/models", "--log-verbose=1"),
            "usage: rocserve [-h]",
            "the verb is missing, expected: rocserve serve --model-repository=/models --log-verbose=1\n",
        ),
        (
            ("--model-repository", "/my models"),
            "usage: rocserve [-h]",
            "the verb is missing, expected: rocserve serve --model-repository '/my models'\n",
        ),
        (("/models",), "usage: rocserve [-h]", "the verb is missing, expected: rocserve serve /models\n"),
        (("tests",), "usage: rocserve [-h]", "the verb is missing, expected: rocserve serve tests\n"),
        (("no_such_verb",), "usage: rocserve [-h]", "invalid choice: 'no_such_verb'"),
    ],
)
def test_what_no_verb_takes_is_refused_with_its_usage(
    arguments: tuple[str, ...], usage: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(usage)
    assert text in message


def test_what_a_server_does_not_take_is_refused_once() -> None:
    command = [sys.executable, "-m", "rocserve.cli", "serve", "--model-repositry=x"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: rocserve serve")
    assert ran.stderr.count("did you mean --model-repository?") == 1


@pytest.mark.parametrize(
    ("words", "status", "expected"),
    [
        (("config", "LOOP"), 1, "is not a folder; expected the folder of a model"),
        (("config", "/none\x1b[2J"), 1, r"rocserve config: /none\x1b[2J: is not a folder"),
        (("bench", "REPOSITORY"), 1, "is a model repository; give the folder of one of its models: m"),
        (("config", "REPOSITORY"), 1, "is a model repository; give the folder of one of its models: m"),
        (("status", "--url=http://localhost:8000"), 1, "'http://localhost:8000' is not a gRPC address"),
        (("classify", "a.jpg", "--model=m", "--url=grpc://h:1"), 1, "'grpc://h:1' is not a gRPC address"),
        (("detect", "a.jpg", "--model=m", "--url=https://h"), 1, "'https://h' is not a gRPC address"),
        (("status", "--client-key=KEY"), 2, "--client-cert and --client-key: expected both or neither, got one"),
        (("status", "--client-cert=KEY"), 2, "--client-cert and --client-key: expected both or neither, got one"),
        (("status", "--header=two words=x"), 2, "argument --header: expected NAME=VALUE, a name of letters"),
        (("status", "--header=key-bin=x"), 2, "argument --header: expected NAME=VALUE, a name of letters"),
        (("status", "--header=key=grün"), 2, "argument --header: expected NAME=VALUE, a name of letters"),
    ],
)
def test_wrong_arguments_get_one_line(
    words: tuple[str, ...], status: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "models" / "m").mkdir(parents=True)
    (tmp_path / "models" / "m" / "config.pbtxt").touch()
    paths = {"LOOP": str(tmp_path / "loop"), "REPOSITORY": str(tmp_path / "models")}
    try:
        ended = main([paths.get(word, word) for word in words])
    except SystemExit as refused:
        ended = refused.code
    assert ended == status
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("rocserve ")]
    assert expected in line


ANOTHER_PACKAGE = {
    "other-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: other\nVersion: 1\n",
    "other-1.dist-info/entry_points.txt": "[rocserve.verbs]\nother = other:VERBS\n",
    "other.py": 'VERBS = {"wave": ("other_wave", "wave a hand"), "status": ("other_wave", "not this one")}',
    "other_wave.py": "from rocserve.verbs.verb import Verb\n"
    "from dataclasses import dataclass\n"
    "@dataclass\nclass Options: pass\n"
    'VERB = Verb("Wave.", Options(), lambda options: print("hello") or 3)',
}


def test_another_package_adds_a_verb_and_takes_none_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, content in ANOTHER_PACKAGE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    assert main([]) == 2
    printed = capsys.readouterr().out
    assert "wave a hand" in printed and "time a model in its engine" in printed
    assert "show the models of a running server" in printed and "not this one" not in printed
    assert main(["wave"]) == 3
    assert capsys.readouterr().out == "hello\n"


@pytest.mark.parametrize("found", [[], [EntryPoint("rocserve_tools", "absent_module:VERBS", TOOLS)]])
def test_without_the_tools_it_says_how_to_install_them(
    found: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: found)
    with pytest.raises(SystemExit) as ended:
        main(["bench", "model_repository/digits_classifier"])
    assert ended.value.code == 2
    *before, last = capsys.readouterr().err.splitlines()
    assert "unknown verb 'bench', expected one of serve, config, status" in last
    assert "in the package rocserve_tools, which is not installed; run: pip install " in last
    assert any("No module named 'absent_module'" in line for line in before) is bool(found)


def test_stopped_while_it_is_being_imported_it_ends_with_a_line() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ADD_A_STOP], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert (ran.returncode, ran.stderr) == (130, "rocserve: ended by you\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("verb", ["cache", "config"])
def test_output_that_cannot_be_written_is_a_line(verb: str, tmp_path: Path) -> None:
    arguments = {
        "cache": ("cache", "list", f"--cache-directory={tmp_path / 'cache'}"),
        "config": ("config", "model_repository/digits_classifier"),
    }[verb]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(
            [sys.executable, "-m", "rocserve.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=False,
        )
    assert ran.returncode != 0
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr


LOG = logging.getLogger("rocserve.test.ending")


async def fail() -> None:
    raise KeyError("b'/models/m'")


async def test_a_part_that_fails_or_takes_too_long_keeps_no_other_from_its_end(caplog: pytest.LogCaptureFixture):
    ended = []

    async def succeed() -> None:
        ended.append("workers")

    ending = Ending(LOG, 0, 30)
    await ending.end("the watch", fail())
    await ending.end("the models", asyncio.sleep(60), seconds=0.01)
    await ending.end("the workers", succeed())
    assert ended == ["workers"]
    assert [record.message for record in caplog.records] == [
        "the watch did not end properly; the other parts end anyway",
        "the models did not end within the exit timeout",
    ]


async def test_a_second_signal_cuts_short_what_runs_and_what_follows():
    ending = Ending(LOG, 0, 30)
    ending.on_signal(signal.SIGTERM)
    await asyncio.wait_for(ending.asked.wait(), PATIENCE_SECONDS)
    assert not ending.end_now.is_set()
    asyncio.get_running_loop().call_later(0.05, ending.on_signal, signal.SIGTERM)
    cut = []

    async def drain() -> None:
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cut.append("front ends")
            raise

    async with asyncio.timeout(PATIENCE_SECONDS):
        await ending.end("the front ends", drain())
        await ending.end("the models", asyncio.sleep(600))
    assert cut == ["front ends"]
    assert ending.end_now.is_set()
