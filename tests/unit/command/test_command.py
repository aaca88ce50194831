"""The command itself: what it says to a wrong command line, and how it ends when it is stopped or cannot write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rocserve.cli import main

ADD_A_STOP = """
import sys
from importlib.abc import MetaPathFinder

class Stop(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "rocserve.tools.doctor.verb":
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
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert ran.stderr.startswith("usage: rocserve serve")
    assert ran.stderr.count("did you mean --model-repository?") == 1


def test_stopped_while_it_is_being_imported_it_ends_with_a_line() -> None:
    ran = subprocess.run([sys.executable, "-c", ADD_A_STOP], capture_output=True, text=True, timeout=60, check=False)
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
            timeout=60,
            check=False,
        )
    assert ran.returncode != 0
    assert "No space left on device" in ran.stderr
    assert "Traceback" not in ran.stderr
