"""Errors for clients and the log when a model's code fails, and modules that models import under unusual names."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.python_models import outputs, request, serving_source

from rocserve.backends.python import engine
from rocserve.core.errors import ServeError, StatusCode

CONFIG = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils


class Shy(Exception):
    def __str__(self):
        raise RuntimeError("not even this")


def answer(request):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(1, np.float32))])


class TritonPythonModel:
"""
X = np.array([1, 2], np.float32)


def client_message(folder: Path, body: str, *, coroutine: bool = False) -> str:
    """The error that a client gets if `execute` has this body."""
    source = f"{HEAD}    {'async ' if coroutine else ''}def execute(self, requests):\n        {body}\n"
    with serving_source(folder / "m", source, CONFIG) as model, pytest.raises(ServeError) as fault:
        model.execute([request(X=X)])
    assert fault.value.code is StatusCode.INTERNAL
    head, _, text = fault.value.text.partition(", message: ")
    assert head == "Failed to process the request(s) for model 'm_0_0'"
    return text


@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("raise ValueError('three\\nlines')", "ValueError: three\nlines"),
        ("raise MemoryError", "MemoryError"),
        ("raise Shy", "Shy: <exception str() failed>"),
        ("raise pb_utils.TritonModelException('mine')", "TritonModelException: mine"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("return answer(requests[0])", "Expected a list in the execute return, found type"),
        ("yield answer(requests[0])", "Expected a list in the execute return, found type '<class "),
        ("return (answer(requests[0]),)", "Expected a list in the execute return, found type '<class 'tuple'>'."),
        (
            "return [1]",
            "Expected an 'InferenceResponse' object in the execute function return list, found type '<class 'i",
        ),
        ("return [pb_utils.Tensor('Y', np.array(['text']))]", "TritonModelException: NumPy dtype is not supported."),
        (
            "requests[0].set_release_flags(2)",
            "TritonModelException: Unable to reschedule the request: rescheduling needs sequence_batching",
        ),
        ("pb_utils.load_model('other')", "TritonModelException: Failed to load model: other"),
        ("pb_utils.InferenceResponse([None])", "TritonModelException: Output tensor for inference response should not"),
        (
            "pb_utils.InferenceResponse(parameters={'a': 0.5})",
            "TritonModelException: Expect parameters values to have type bool/int/str, found type <class 'float'>",
        ),
        ("requests[0].set_flags('2')", "TypeError: 'str' object cannot be interpreted as an integer"),
        (
            "sender = requests[0].get_response_sender(); sender.send(answer(requests[0]), 1); return [answer(None)]",
            "Unable to send response. Non-decoupled model cannot send more than one response.",
        ),
    ],
)
def test_errors_for_clients(tmp_path: Path, body: str, text: str, coroutine: bool) -> None:
    assert client_message(tmp_path, body, coroutine=coroutine).startswith(text)


def test_codes_are_names_in_a_text(tmp_path: Path) -> None:
    body = "raise ValueError(f'{pb_utils.TritonError.NOT_FOUND} is {int(pb_utils.TritonError.NOT_FOUND)}')"
    assert client_message(tmp_path, body) == "ValueError: ErrorCode.NOT_FOUND is 2"


def test_a_name_is_no_list_of_names(tmp_path: Path) -> None:
    body = "pb_utils.InferenceRequest(model_name='m', requested_output_names='OUT', inputs=[])"
    assert client_message(tmp_path, body) == "TypeError: requested_output_names must be a list of names, got 'OUT'"


def test_what_the_module_is_made_of_in_triton_can_be_imported_too(tmp_path: Path) -> None:
    source = f"import c_python_backend_utils\n{HEAD}"
    source += "    def execute(self, requests):\n"
    source += "        assert c_python_backend_utils.Tensor is pb_utils.Tensor\n"
    source += "        return [answer(request) for request in requests]\n"
    with serving_source(tmp_path / "m", source, CONFIG) as model:
        (given,) = model.execute([request(X=X)])
    assert outputs(given)["Y"].tolist() == [0]


@pytest.fixture
def loggers_left_on() -> Iterator[None]:
    """The test's model configures the logging of this process."""
    existing = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    yield
    for logger in existing:
        logger.disabled = False


@pytest.mark.usefixtures("loggers_left_on")
def test_a_model_that_switches_loggers_off_is_still_heard(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = f"import logging.config\n{HEAD}"
    source += "    def initialize(self, args):\n"
    source += "        logging.config.dictConfig({'version': 1, 'incremental': False, 'handlers': {}})\n"
    source += "    def execute(self, requests):\n"
    source += "        pb_utils.Logger.log_warn('a word')\n"
    source += "        raise ValueError('a fault')\n"
    with serving_source(tmp_path / "m", source, CONFIG) as model, pytest.raises(ServeError):
        model.execute([request(X=X)])
    assert "a word" in caplog.text
    assert "ValueError: a fault" in caplog.text


def test_an_output_that_the_configuration_does_not_have(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is said once of each, but not of an output beside an error, which counts instead of the outputs."""
    others = "pb_utils.Tensor('y', np.ones(1, np.float32)), pb_utils.Tensor('Z', np.ones(1, np.float32))"
    failed = "pb_utils.Tensor('F', np.ones(1, np.float32))"
    source = f"{HEAD}    def execute(self, requests):\n        return [answer(requests[0]),"
    source += f" pb_utils.InferenceResponse([{others}]),"
    source += f" pb_utils.InferenceResponse([{failed}], error=pb_utils.TritonError('a fault'))]\n"
    with serving_source(tmp_path / "m", source, CONFIG) as model:
        for _ in range(2):
            first, second, _ = model.execute([request(X=X), request(X=X), request(X=X)])
            assert [*outputs(first)] == ["Y"]
            assert not outputs(second)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
        f"model 'm' returned the output '{name}', which its configuration lacks, so no client gets it; its outputs are:"
        " Y"
        for name in ("y", "Z")
    ]


def test_what_a_spawned_child_finds() -> None:
    """A child gets the model's sys.path from multiprocessing, and imports model.py from it."""
    program = """
import numpy as np, triton_python_backend_utils as pb_utils
tensor = pb_utils.Tensor("X", np.zeros(2))
call = pb_utils.InferenceRequest(model_name="m", requested_output_names=["Y"], inputs=[tensor])
for forbidden in (call.exec, lambda: pb_utils.get_model_dir()):
    try:
        forbidden()
    except (pb_utils.TritonModelException, AttributeError) as error:
        print(error)
"""
    folder = Path(engine.__file__).with_name("spawned")
    lines = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({str(folder)!r})\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert lines == [
        "BLS is only supported during the 'execute' function.",
        "module 'triton_python_backend_utils' has no attribute 'get_model_dir'",
    ]
