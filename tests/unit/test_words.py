"""The lint check for words finds them across lines, in comments, strings and pages, and leaves good sentences alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "internals" / "words.py"


def run(file: Path, text: str) -> tuple[int, list[str]]:
    file.write_text(text)
    done = subprocess.run([sys.executable, str(SCRIPT), str(file)], check=False, capture_output=True, text=True)
    return done.returncode, [line.removeprefix(f"{file}:") for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('"""One.\n\nIt is\nno file."""\n', 3, "is no file"),
        ("a = 1\n# a file of\n# its own\n", 2, "of its own"),
        ('a = f"{1} is no file"\n', 1, "is no file"),
        ('a = (\n    "first "\n    "second, as it is"\n)\n', 3, "as it is"),
        ("for each in ():\n    pass\n", 1, "each"),
        ("def f(come: int) -> None:\n    pass\n", 1, "come"),
    ],
)
def test_words_are_found_with_their_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    status, found = run(tmp_path / "a.py", text)
    assert status == 1
    (only,) = found
    assert only.startswith(f"{line}: '{words}': write ")


def test_pages_are_read(tmp_path: Path) -> None:
    status, found = run(tmp_path / "a.md", "# Title\n\nWhoever reads this\n")
    assert (status, found) == (1, ["3: 'Whoever': write name them: 'a user', 'the caller'"])


@pytest.mark.parametrize(
    "text",
    ["There is no file.", "there may be no file", "It is no longer a file.", "as soon as it is, the file", "a file"],
)
def test_good_sentences_stay(tmp_path: Path, text: str) -> None:
    assert run(tmp_path / "a.md", text) == (0, [])
