"""Runs what the pages have people type: blocks of `sh`, and blocks of `python` that ask a server, page by page. A
page's blocks run in one shell, in order, in a copy of the sample's files and in a separate network namespace, so
commands and ports are those of the page. Only `rocserve get` has network access; it runs before all other blocks.
`rocserve serve` runs next to the blocks that follow it, until the next `rocserve serve` of something else. Pages that
serve the same, and add no files, follow each other in one shell. A block after a file's name is that file; files in
server/ belong to a copy of the server's code. Blocks of `console` need what a machine for tests lacks: root, an AMD
GPU, a container engine, minutes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.migraphx import CHECKOUT

PAGES = [CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted(CHECKOUT.glob("docs/**/*.md"))]
FENCE = re.compile(r"(?:`([\w./]+)`:\n\n)?^```(\S*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^(\$ |sudo |pip |make |docker |curl |python3? |(\.venv/bin/)?rocserve [a-z])", re.MULTILINE)
CLIENT = re.compile(r"^(from|import) (rocserve_client|tritonclient).*^with [\w.]*Client\(", re.DOTALL | re.MULTILINE)
SERVE = re.compile(r"^rocserve serve (?:--model-repository=)?(.*?) *(?:#.*)?$", re.MULTILINE)
PHOTO = CHECKOUT / "tests/data/photographs/cat.jpg"
SHORTER = (
    (re.compile(r"--seconds 1\b"), "--seconds 0.1"),
    (re.compile(r"--batch-sizes 1,2,4 --instances 1,2\b"), "--batch-sizes 1,2 --instances 1"),
    (re.compile(r"^(python load\.py .*) 4$", re.M), r"\1 0.3"),
)
"""Measurements last as long as a reader needs for steady figures; here nobody reads them."""

# A separate network namespace, so that the ports are free. Its loopback device exists but is down (SIOCSIFFLAGS,
# IFF_UP).
NETWORK = ("unshare", "--net") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--net")
LOOPBACK = """
import fcntl, os, socket, struct, sys
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh", b"lo", 1))
os.execvp(sys.argv[1], sys.argv[1:])
"""
SHELL = """
set -euo pipefail
rocserve() {
  if [ "$1" = get ]; then return; fi
  if [ "$1" != serve ]; then command rocserve "$@"; return; fi
  local wanted="${*/--model-repository=/}"
  if [ "$wanted" != "$served" ]; then
    stop
    served=$wanted
    command rocserve "$@" >server.log 2>&1 &
    server=$!
  fi
  until curl --silent --fail localhost:8000/v2/health/ready; do
    kill -0 $server || { cat server.log; return 1; }
    sleep 0.2
  done
}
stop() { [ -z "$server" ] || { kill "$server"; wait "$server" || true; }; }
server= served=
trap stop EXIT
set -x
"""


@dataclass(frozen=True, slots=True)
class Block:
    file: str
    """The name of the file that the block is; "" = none."""
    language: str
    text: str

    @property
    def runs(self) -> bool:
        return self.language == "sh" or (self.language == "python" and CLIENT.search(self.text) is not None)


def _blocks(page: Path) -> list[Block]:
    return [Block(found[1] or "", found[2], found[3]) for found in FENCE.finditer(page.read_text())]


def _name(page: Path) -> str:
    return str(page.relative_to(CHECKOUT))


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_each_command_is_marked(page: Path) -> None:
    for block in _blocks(page):
        if block.language == "":
            assert not COMMAND.search(block.text), (
                f"say sh (it is run by a test) or console (it cannot be):\n{block.text}"
            )


def _groups() -> list[tuple[Path, ...]]:
    """The pages with blocks to run; those that serve the same and add no files are together."""
    groups: defaultdict[object, list[Path]] = defaultdict(list)
    for page in PAGES:
        blocks = _blocks(page)
        runs = [block for block in blocks if block.runs]
        served = tuple(what for block in runs for what in SERVE.findall(block.text))
        if runs:
            groups[page if any(block.file for block in blocks) else served].append(page)
    return [tuple(group) for group in groups.values()]


@pytest.mark.parametrize("pages", _groups(), ids=lambda pages: " ".join(map(_name, pages)))
def test_commands_work_as_they_stand_there(pages: Sequence[Path], tmp_path: Path) -> None:
    asks_detectors = any("detect" in block.text for page in pages for block in _blocks(page) if block.runs)
    left_out = shutil.ignore_patterns() if asks_detectors else shutil.ignore_patterns("detect_*")
    for folder in ("model_repository", "clients", "tests/data/digits", "tests/data/shapes", "tests/data/photographs"):
        shutil.copytree(CHECKOUT / folder, tmp_path / folder, ignore=left_out)
    shutil.copy(PHOTO, tmp_path / "photo.jpg")
    script = SHELL
    for page in pages:
        blocks, asked = _blocks(page), ""
        if any(block.file.startswith("server/") for block in blocks):
            shutil.copytree(CHECKOUT / "server", tmp_path / "server")  # The page adds files to the server.
        for block in blocks:
            if block.file:
                (tmp_path / block.file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / block.file).write_text(block.text)
            elif block.runs and block.language == "python":
                asked += block.text  # Later blocks use what earlier ones have made.
                script += f"python - <<'PYTHON'\n{asked}PYTHON\n"
            elif block.runs:
                script += block.text
    for measured, shorter in SHORTER:
        script = measured.sub(shorter, script)
    script = _without_repeats(script)
    environment = os.environ | {
        "PATH": f"{CHECKOUT}/.venv/bin:{os.environ['PATH']}",
        "PYTHONPATH": f"{tmp_path}/server:{CHECKOUT}/server:{CHECKOUT}/tools:{CHECKOUT}/clients",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for download in re.findall(r"^rocserve get .*", script, re.MULTILINE):
        _run(["bash", "-c", download], tmp_path, environment)
    _run([*NETWORK, "python3", "-c", LOOPBACK, "bash", "-c", script], tmp_path, environment)


def _without_repeats(script: str) -> str:
    """Without the commands that only look, and that another page has run before."""
    kept: list[str] = []
    seen = set[str]()
    for line in script.splitlines(keepends=True):
        command = line.partition("#")[0].strip()
        if command in seen:
            continue
        kept.append(line)
        if command.startswith(("rocserve config ", "rocserve status ")):
            seen.add(command)
    return "".join(kept)


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> None:
    output = folder / "output"
    with output.open("w") as out:
        ran = subprocess.run(
            command, check=False, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )
    if "could not be downloaded" in output.read_text():
        pytest.skip("no network here")
    assert ran.returncode == 0, output.read_text()
