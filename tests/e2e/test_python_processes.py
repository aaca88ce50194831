"""What published models do to their process: all of it works, or hurts only these models."""

from __future__ import annotations

import shutil
from types import MappingProxyType

import numpy as np
import pytest
from support.infer_inputs import infer_input
from support.models import drop
from support.processes import has_ended
from support.server import RocserveProcess, Start
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "OUT" data_type: TYPE_INT32 dims: [ -1 ] }
"""
HEAD = """
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils


def answers(requests, out):
    tensor = pb_utils.Tensor("OUT", np.array(out, np.int32))
    return [pb_utils.InferenceResponse([tensor]) for _ in requests]


def asked(requests):
    return pb_utils.get_input_tensor_by_name(requests[0], "IN").as_numpy().tolist()

"""
MODELS = MappingProxyType(
    {
        # A new interpreter for each child, as GPU libraries need it, with a function of model.py.
        "spawning": """
import multiprocessing


def square(number):
    return number * number


class TritonPythonModel:
    def execute(self, requests):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return answers(requests, pool.map_async(square, asked(requests)).get(90))
""",
        "forking": """
import multiprocessing


def square(number):
    return number * number


class TritonPythonModel:
    def initialize(self, args):
        self.pool = multiprocessing.Pool(2)

    def execute(self, requests):
        return answers(requests, self.pool.map(square, asked(requests)))
""",
        "terminating": """
import multiprocessing
import subprocess
import time


class TritonPythonModel:
    def execute(self, requests):
        executed = subprocess.Popen(["sleep", "600"])
        executed.terminate()
        forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        forked.start()
        forked.terminate()
        forked.join(90)
        return answers(requests, [executed.wait(90), forked.exitcode or 0])
""",
        "parsing": """
import argparse

PARSER = argparse.ArgumentParser()
PARSER.add_argument("--scale", type=int, default=3)
OPTIONS = PARSER.parse_args()


class TritonPythonModel:
    def execute(self, requests):
        return answers(requests, [OPTIONS.scale * number for number in asked(requests)])
""",
        "logging": """
import logging.config

HANDLERS = {"own": {"class": "logging.FileHandler", "filename": os.devnull}}


class TritonPythonModel:
    def initialize(self, args):
        logging.config.dictConfig({"version": 1, "handlers": HANDLERS, "root": {"handlers": ["own"]}})

    def execute(self, requests):
        pb_utils.Logger.log_warn("a word from the model")
        raise ValueError("told behind its own log's back")
""",
        "muting": """
class TritonPythonModel:
    def execute(self, requests):
        sys.stdout.close()
        sys.stderr.close()
        os.close(1)
        raise ValueError("told without standard streams")
""",
        "crashing": """
import ctypes


class TritonPythonModel:
    def execute(self, requests):
        ctypes.string_at(0)  # The line of the crash.
""",
        "parent": """
import subprocess


class TritonPythonModel:
    def initialize(self, args):
        self.child = subprocess.Popen(["sleep", "600"])

    def execute(self, requests):
        return answers(requests, [self.child.pid])
""",
        "steady": """
from helper import FACTOR


class TritonPythonModel:
    def execute(self, requests):
        return answers(requests, [FACTOR * number for number in asked(requests)])
""",
    }
)


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    folder = tmp_path_factory.mktemp("processes")
    for name, source in MODELS.items():
        drop(folder / "repository", name, HEAD + source, CONFIG)
    for name, factor in (("steady", 10), ("first", 2), ("second", 3)):
        version = drop(folder / "repository", name, HEAD + MODELS["steady"], CONFIG) / "1"
        (version / "helper.py").write_text(f"FACTOR = {factor}\n")
    return start(folder / "repository", "--model-control-mode=poll")


def infer(server: RocserveProcess, model: str, *numbers: int) -> list[int]:
    entry = infer_input("IN", np.array(numbers, np.int32))
    answer: list[int] = server.client().infer(model, [entry]).as_numpy("OUT").tolist()
    return answer


def fault(server: RocserveProcess, model: str) -> tuple[str, str]:
    with pytest.raises(InferenceServerException) as raised:
        infer(server, model, 1)
    return raised.value.status(), raised.value.message()


@pytest.mark.parametrize("model", ["forking", "spawning"])
def test_processes_that_a_model_starts(server, model):
    assert infer(server, model, 2, 3) == [4, 9]


def test_a_model_terminates_what_it_has_started(server):
    assert infer(server, "terminating", 0) == [-15, -15]


def test_a_model_that_parses_a_command_line(server):
    assert infer(server, "parsing", 2) == [6]


def test_a_model_that_configures_logging_keeps_the_servers_log(server):
    for _ in range(2):
        status, text = fault(server, "logging")
        assert (status, "message: ValueError: told behind its own log's back" in text) == ("StatusCode.INTERNAL", True)
    wait_until(lambda: 'raise ValueError("told behind' in server.log_text, "the traceback in the log")
    wait_until(lambda: "logging:1: a word from the model" in server.log_text, "the model's own word in the log")


def test_a_model_without_standard_streams_goes_on(server):
    pids = {worker.pid for worker in server.workers("muting")}
    assert "message: ValueError: told without standard streams" in fault(server, "muting")[1]
    # The streams are closed by now, and the process is the same.
    assert "Failed to process the request(s) for model 'muting_0'" in fault(server, "muting")[1]
    assert {worker.pid for worker in server.workers("muting")} == pids
    wait_until(lambda: 'raise ValueError("told without' in server.log_text, "the traceback in the log")


def test_the_log_has_the_line_of_a_crash(server):
    line = (HEAD + MODELS["crashing"]).splitlines().index("        ctypes.string_at(0)  # The line of the crash.") + 1
    assert fault(server, "crashing")[0] == "StatusCode.UNAVAILABLE"
    assert infer(server, "steady", 1) == [10]
    wait_until(lambda: f'1/model.py", line {line} in execute' in server.log_text, "the line in the log")


def test_modules_of_one_name_and_a_change_of_one_of_them(server):
    assert (infer(server, "first", 1), infer(server, "second", 1)) == ([2], [3])
    helper = server.repositories[0] / "second" / "1" / "helper.py"
    # Renamed into place, with the same size: only the file's identity shows the change.
    helper.with_suffix(".tmp").write_text("FACTOR = 5\n")
    helper.with_suffix(".tmp").replace(helper)
    wait_until(lambda: infer(server, "second", 1) == [5], "the changed module")
    assert infer(server, "first", 1) == [2]


def test_processes_that_a_model_leaves_behind_end_with_it(server):
    """The last test of this server."""
    (repository,) = server.repositories
    (child,) = infer(server, "parent", 0)
    assert not has_ended(child)
    shutil.rmtree(repository / "parent")
    wait_until(lambda: has_ended(child), "the end of the unloaded model's child")
    drop(repository, "parent", HEAD + MODELS["parent"], CONFIG)
    wait_until(lambda: server.client().is_model_ready("parent"), "the model's return")
    (child,) = infer(server, "parent", 0)
    server.kill()
    wait_until(lambda: has_ended(child), "the end of the killed server's model's child")
