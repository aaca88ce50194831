"""`rocserve classify` and `rocserve detect`: their output, and their errors."""

from __future__ import annotations

import contextlib
import io
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from support.models import drop
from support.repository_index import models_of
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until

from rocserve import cli
from rocserve.core.errors import ServeError
from rocserve_client import AsyncClient
from rocserve_tools.images import asking

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "tests" / "data" / "digits"
SHAPE = ROOT / "tests" / "data" / "shapes" / "04.jpg"


def run(verb: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in this process, with its output in files, in which no line is wrapped."""
    words = [verb, *map(str, arguments)]
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            status = cli.main(words)
        except SystemExit as ended:
            status = ended.code
    return subprocess.CompletedProcess(words, status, out.getvalue(), err.getvalue())


def test_classify_ranks_the_classes_with_bars(rocserve_server):
    images = (DIGITS / "0002_two.jpg", DIGITS / "0008_eight.jpg")
    ran = run("classify", *images, "--model", "digits", "--top", 5, "--url", rocserve_server.address)
    assert (ran.returncode, ran.stderr) == (0, "")
    rows = [line for line in ran.stdout.splitlines() if line.endswith("│") and "%" in line]
    assert len(rows) == 10
    assert "two" in rows[0]
    assert "eight" in rows[5]
    assert "█" * 12 in rows[5], "certainty is a full bar"
    confidences = [float(row.rpartition("%")[0].split()[-1]) for row in rows]
    assert confidences[:5] == sorted(confidences[:5], reverse=True)


_BEST_FIRST = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        best, all_classes = np.array([[0.75]], np.float32), np.array([[0.25, 0.75]], np.float32)
        outputs = [pb_utils.Tensor("PROBABILITY", best), pb_utils.Tensor("PROBABILITIES", all_classes)]
        return [pb_utils.InferenceResponse(outputs) for _ in requests]
"""
_BEST_FIRST_CONFIG = """
backend: "python"
max_batch_size: 1
input { name: "ENCODED" data_type: TYPE_STRING dims: 1 }
output { name: "PROBABILITY" data_type: TYPE_FP32 dims: 1 }
output { name: "PROBABILITIES" data_type: TYPE_FP32 dims: 2 label_filename: "labels.txt" }
"""


_ODD = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        outputs = [
            pb_utils.Tensor("BOXES", np.zeros((2, 3), np.float32)),
            pb_utils.Tensor("SCORES", np.zeros(0, np.float32)),
            pb_utils.Tensor("CLASSES", np.zeros(2, np.int32)),
            pb_utils.Tensor("LABELS", np.array([b"a", b"b"], object)),
        ]
        # In another order than a detector has them.
        return [pb_utils.InferenceResponse(outputs[1:] + outputs[:1]) for _ in requests]
"""
_ODD_CONFIG = """
backend: "python"
input { name: "ENCODED" data_type: TYPE_STRING dims: 1 }
output { name: "SCORES" data_type: TYPE_FP32 dims: -1 }
output { name: "BOXES" data_type: TYPE_FP32 dims: [ -1, -1 ] }
output { name: "CLASSES" data_type: TYPE_INT32 dims: -1 }
output { name: "LABELS" data_type: TYPE_STRING dims: -1 }
"""


@pytest.fixture(scope="module")
def odd_server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """A server with models that the sample does not have, and with the sample's pipelines without their weights."""
    repository = tmp_path_factory.mktemp("odd")
    drop(repository, "cats", _BEST_FIRST, _BEST_FIRST_CONFIG)
    (repository / "cats" / "labels.txt").write_text("dog\ntiger cat\n")
    drop(repository, "odd", _ODD, _ODD_CONFIG)
    samples = ROOT / "model_repository"
    for pipeline, network in (("classify_image", "resnet50"), ("detect_objects", "yolov4")):
        shutil.copytree(samples / pipeline, repository / pipeline)
        for path in samples.glob(f"{network}*"):
            weights = "1" if path.name == network else ""
            shutil.copytree(path, repository / path.name, ignore=shutil.ignore_patterns(weights))
    return start(repository)


def test_classify_reads_all_classes_and_not_the_best_ones_probability(odd_server):
    ran = run("classify", SHAPE, "--model", "cats", "--top", 2, "--url", odd_server.address)
    assert (ran.returncode, ran.stderr) == (0, "")
    rows = [line.split("│")[2:4] for line in ran.stdout.splitlines() if "%" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [["tiger cat", "75.0%"], ["dog", "25.0%"]]


@pytest.mark.parametrize(("verb", "model"), [("classify", "digits"), ("detect", "detect_shapes")])
def test_each_bad_image_has_a_line_and_the_others_are_answered(rocserve_server, tmp_path, verb, model):
    (tmp_path / "text.jpg").write_text("no image")
    (tmp_path / "empty.jpg").write_bytes(b"")
    bad = [tmp_path / "text.jpg", tmp_path / "empty.jpg", tmp_path / "missing.jpg", tmp_path]
    ran = run(verb, SHAPE, *bad, "--model", model, "--url", rocserve_server.address)
    assert ran.returncode == 1
    assert str(SHAPE) in ran.stdout
    lines = ran.stderr.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(path) for path in bad]
    assert "a JPEG or a PNG is expected" in lines[0]
    assert "it is empty" in lines[1]
    assert lines[2].endswith(": No such file or directory")
    assert lines[3].endswith(": Is a directory")


def test_images_of_all_kinds_are_drawn(rocserve_server, tmp_path):
    with Image.open(SHAPE) as image:
        image.convert("L").save(tmp_path / "grey.jpg")
        image.convert("CMYK").save(tmp_path / "four-inks.jpg")
        image.convert("RGBA").save(tmp_path / "clear.png")
        image.convert("P").save(tmp_path / "palette.png")
        image.resize((1, 1)).save(tmp_path / "dot.png")
    images = sorted(tmp_path.iterdir())
    ran = run("detect", *images, "--model", "detect_shapes", "--out", tmp_path, "--url", rocserve_server.address)
    assert (ran.returncode, ran.stderr) == (0, "")
    drawn = {path.name for path in tmp_path.iterdir()} - {path.name for path in images}
    assert drawn == {"clear-2.png", "dot-2.png", "four-inks.png", "grey.png", "palette-2.png"}
    assert "triangle" in ran.stdout


@pytest.mark.parametrize("verb", ["classify", "detect"])
def test_stderr_names_a_server_that_does_not_answer_and_the_command_that_starts_one(rocserve_server, verb):
    nobody = run(verb, SHAPE, "--model", "any", "--url", "127.0.0.1:9")
    assert (nobody.returncode, nobody.stdout) == (1, "")
    assert "no server answers at 127.0.0.1:9" in nobody.stderr
    assert "rocserve serve MODEL" in nobody.stderr
    unknown = run(verb, SHAPE, "--url", rocserve_server.address, "--model", "detect_shape")
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert "has no model 'detect_shape'; it has: " in unknown.stderr
    assert "did you mean 'detect_shapes'?" in unknown.stderr


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """Accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(PATIENCE_SECONDS)
        yield listening


@pytest.mark.parametrize("verb", ["classify", "detect"])
def test_ctrl_c_ends_them(silent, verb):
    url = f"127.0.0.1:{silent.getsockname()[1]}"
    command = [sys.executable, "-m", "rocserve.cli", verb, SHAPE, "--model=any", f"--url={url}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ran:
        connection, _ = silent.accept()
        with connection:
            ran.send_signal(signal.SIGINT)
            assert ran.communicate(timeout=PATIENCE_SECONDS) == ("", f"rocserve {verb}: ended by you\n")
    assert ran.returncode == 130


async def test_somebody_who_never_answers_is_no_server(silent, monkeypatch):
    monkeypatch.setattr(asking, "ANSWER_TIMEOUT_S", 0.3)
    url = f"127.0.0.1:{silent.getsockname()[1]}"
    async with AsyncClient(url) as client:
        with pytest.raises(ServeError, match=f"no server answers at {url}"):
            await asking.require_model(client, url, "digits")


@pytest.mark.parametrize(
    ("verb", "model", "network"), [("classify", "classify_image", "resnet50"), ("detect", "detect_objects", "yolov4")]
)
def test_stderr_names_the_command_that_gets_missing_weights(odd_server, verb, model, network):
    ran = run(verb, SHAPE, "--url", odd_server.address, "--model", model)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert f"model '{model}' is not ready" in ran.stderr
    assert f"rocserve get {network}" in ran.stderr


_WAITS_FOR_FILE = """
import pathlib
import time

class TritonPythonModel:
    def initialize(self, args):
        while not pathlib.Path(args["model_repository"], "go").exists():
            time.sleep(0.05)

    def execute(self, requests):
        return []
"""


def test_while_a_server_loads_the_errors_say_so(repository, serve):
    folder = repository / "slow"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(_WAITS_FOR_FILE)
    (folder / "config.pbtxt").write_text(
        'backend: "python" input { name: "A" data_type: TYPE_FP32 dims: 1 } '
        'output { name: "B" data_type: TYPE_FP32 dims: 1 }'
    )
    server = serve(repository)
    # The server listens before its first look at the folders.
    wait_until(lambda: models_of(server).get("slow", ("",))[0] == "LOADING", "the load")
    loading = "; the server still loads slow: try again when it has ended"
    for model, told in (("slow", "model 'slow' is not ready: "), ("slow_image", "has no model 'slow_image'; it has: ")):
        ran = run("classify", SHAPE, "--url", server.address, "--model", model)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert told in ran.stderr
        assert loading in ran.stderr
    (folder / "go").touch()
    server.wait_until_ready()


def test_models_of_another_kind_are_refused(rocserve_server):
    def refusal(verb: str, model: str) -> str:
        ran = run(verb, SHAPE, "--url", rocserve_server.address, "--model", model)
        assert (ran.returncode, ran.stdout) == (1, "")
        assert len(ran.stderr.splitlines()) == 1
        return ran.stderr

    refused = refusal("classify", "digits_classifier")
    assert "takes IMAGE: FP32 [-1, 1, 16, 16] and gives PROBABILITIES" in refused
    assert "--preprocess makes the model 'digits_classifier_image', which does" in refused
    assert "output 'BOXES' of 'detect_shapes' does not hold probabilities" in refusal("classify", "detect_shapes")
    assert "'digits': expected a detector, which takes ENCODED and gives BOXES" in refusal("detect", "digits")


@pytest.mark.parametrize(
    ("verb", "text"),
    [
        (
            "detect",
            "'odd' gives BOXES [2, 3], SCORES [0], CLASSES [2], LABELS [2], expected [n, 4] and [n] of the others",
        ),
        ("classify", "output 'SCORES' of 'odd' does not hold probabilities"),
    ],
)
def test_stderr_has_one_line_for_an_answer_of_another_form(odd_server, verb, text):
    ran = run(verb, SHAPE, "--url", odd_server.address, "--model", "odd")
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", f"{SHAPE}: {text}\n")


@pytest.mark.parametrize(
    "arguments", [("classify", "--top", "0"), ("detect", "--rows", "-1"), ("detect", "--out", SHAPE)]
)
def test_wrong_arguments_are_refused_before_a_server_is_asked(arguments):
    verb, *others = arguments
    ran = run(verb, SHAPE, *others, "--model", "any", "--url", "127.0.0.1:9")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"argument {others[0]}: " in ran.stderr
    assert "no server" not in ran.stderr
