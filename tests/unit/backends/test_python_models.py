"""Python models in this process: what they receive, and what they may answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from support.machine import ToldMachine
from support.models import drop
from support.python_models import (
    MODELS,
    FakeCalls,
    RecordingResponder,
    loaded,
    outputs,
    request,
    serving,
    serving_source,
)

from rocserve.backends.python import BACKEND
from rocserve.backends.request_model import RESCHEDULED, Answer, ModelResponse, readiness_check, reads_in_place
from rocserve.core.errors import ServeError, StatusCode, internal, unavailable
from rocserve.core.model_config import InstanceGroup, InstanceKind, ModelConfig
from rocserve.core.tensors import tensor_from_numpy
from rocserve.repository.engine_plan import plan_workers

NUMBERS = """
backend: "python"
input [ { name: "X" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "Z" data_type: TYPE_FP32 dims: [ -1 ] } ]
"""
DECOUPLED = NUMBERS + "model_transaction_policy { decoupled: true }"

HEAD = """
import numpy as np
import triton_python_backend_utils as pb_utils


def answer(request):
    x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", x + 1), pb_utils.Tensor("Z", x + 2)])


class TritonPythonModel:
"""
X = np.array([1, 2], np.float32)


def method(body: str) -> str:
    lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
    return f"{HEAD}    def execute(self, requests):\n{lines}"


def test_texts_and_modules_beside_the_model() -> None:
    with serving(MODELS / "words") as model:
        texts = np.array([["grüße", ""]], dtype=object)
        (answer,) = model.execute([request(TEXT=texts)])
    assert outputs(answer)["SHOUTED"].tolist() == [["GRÜSSE!".encode(), b"!"]]
    assert outputs(answer)["LENGTHS"].tolist() == [[7, 0]]
    assert not list((MODELS / "words").rglob("__pycache__"))


def test_the_example_of_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/guides/python-models.md").read_text()
    _, source, *_ = page.split("```python\n")
    config = page.split("config.pbtxt`:\n\n```\n")[1]
    with serving_source(tmp_path / "shout", source.split("```")[0], config.split("```")[0]) as model:
        (answer,) = model.execute([request(TEXT=np.array([["hello"]], dtype=object))])
    assert outputs(answer)["SHOUTED"].tolist() == [[b"HELLO!"]]


def test_an_instance_on_a_gpu_finds_it_as_the_first() -> None:
    config = ModelConfig("mirror", instance_groups=(InstanceGroup("group", InstanceKind.GPU, 1),))
    machine = ToldMachine(gpus=(2, 5))
    plans, _ = plan_workers(config, BACKEND.engine_for(config, machine), machine, 0)
    assert [(plan.kind, plan.device, plan.instance_name) for plan in plans] == [
        (InstanceKind.GPU, 2, "group_0"),
        (InstanceKind.GPU, 5, "group_1"),
    ]
    with serving(MODELS / "mirror", kind=InstanceKind.GPU, device=5) as model:
        (answer,) = model.execute([request(X=np.zeros((1, 1), np.int32))])
    arguments = json.loads(outputs(answer)["SEEN"][0, 0])["args"]
    assert (arguments["model_instance_kind"], arguments["model_instance_device_id"]) == ("GPU", "0")


@pytest.mark.parametrize("gpus", [(), (2, 5)])
def test_an_instance_of_kind_model_gets_its_kind_and_all_gpus(gpus: tuple[int, ...]) -> None:
    config = ModelConfig("mirror", instance_groups=(InstanceGroup("group", InstanceKind.MODEL, 2),))
    machine = ToldMachine(gpus=gpus)
    plans, _ = plan_workers(config, BACKEND.engine_for(config, machine), machine, 0)
    assert [(plan.kind, plan.device, plan.instance_name) for plan in plans] == [
        (InstanceKind.MODEL, None, "group_0"),
        (InstanceKind.MODEL, None, "group_1"),
    ]
    with serving(MODELS / "mirror", kind=InstanceKind.MODEL) as model:
        (answer,) = model.execute([request(X=np.zeros((1, 1), np.int32))])
    arguments = json.loads(outputs(answer)["SEEN"][0, 0])["args"]
    assert (arguments["model_instance_kind"], arguments["model_instance_device_id"]) == ("MODEL", "0")


def test_a_request_that_names_no_outputs_gets_all(tmp_path: Path) -> None:
    body = """
assert requests[0].requested_output_names() == {"Y", "Z"}
return [answer(request) for request in requests]
"""
    with serving_source(tmp_path / "m", method(body), NUMBERS) as model:
        assert list(outputs(model.execute([request(X=X)])[0])) == ["Y", "Z"]


def test_a_model_may_take_requests_out_of_its_list(tmp_path: Path) -> None:
    body = "answers = []\nwhile requests:\n    answers.append(answer(requests.pop(0)))\nreturn answers"
    with serving_source(tmp_path / "m", method(body), NUMBERS) as model:
        assert len([outputs(one) for one in model.execute([request(X=X), request(X=X)])]) == 2


def test_a_model_reads_inputs_in_place_if_it_says_so(tmp_path: Path) -> None:
    body = """
x = pb_utils.get_input_tensor_by_name(requests[0], "X")
assert not x.as_numpy().flags.writeable
assert np.from_dlpack(x).tolist() == [1, 2]
return [answer(request) for request in requests]
"""
    source = method(body).replace("PythonModel:", "PythonModel:\n    READS_INPUTS_IN_PLACE = {}")
    with serving_source(tmp_path / "m", source.format(True), NUMBERS) as model:
        assert reads_in_place(model)
        asked = request(X=X)
        asked.inputs["X"].data = bytes(asked.inputs["X"].data)
        assert outputs(model.execute([asked])[0])["Y"].tolist() == [2, 3]
    with serving(MODELS / "words") as model:
        assert not reads_in_place(model)
    with pytest.raises(ServeError) as fault, serving_source(tmp_path / "wrong", source.format('"no"'), NUMBERS):
        pass
    assert fault.value.text == "model 'wrong' has READS_INPUTS_IN_PLACE 'no'; expected True or False"


def test_a_decoupled_model_returns_none(tmp_path: Path) -> None:
    source = method("return [answer(request) for request in requests]")
    with serving_source(tmp_path / "faulty", source, DECOUPLED) as model, pytest.raises(ServeError) as fault:
        model.execute([request(X=X)])
    assert "is using the decoupled mode and the execute function must return None." in fault.value.text


def test_a_sender_answers_once_unless_decoupled(tmp_path: Path) -> None:
    body = """
sender = requests[0].get_response_sender()
faults = []
def attempt(*arguments, **options):
    try:
        sender.send(*arguments, **options)
    except pb_utils.TritonModelException as error:
        faults.append(str(error))
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
attempt(flags=FINAL)
attempt(answer(requests[0]), flags=7)
attempt()
attempt(answer(requests[0]))
attempt(answer(requests[0]))
attempt(flags=FINAL)
attempt(flags=FINAL)
self.faults = faults
"""
    responder = RecordingResponder()
    with serving_source(tmp_path / "single", method(body), NUMBERS) as model:
        assert model.execute([request(X=X, outputs=("Z",), responder=responder)]) == [None]
        assert model._model.faults == [  # type: ignore[attr-defined]
            "Unable to send response. Non-decoupled model cannot send complete final before sending a response.",
            "Unable to send response. Unsupported flag provided.",
            "Inference Response object must be provided when the response flags is set to zero.",
            "Unable to send response. Non-decoupled model cannot send more than one response.",
            "Unable to send response. Response sender has been closed.",
        ]
    (first, is_last), end = responder.sent
    assert outputs(first)["Z"].tolist() == [3, 4]
    assert (is_last, end) == (False, (None, True))


class Narrow(RecordingResponder):
    """Sends no tensors, as if memory were full."""

    def send(self, answer: Answer | None, final: bool) -> None:
        if isinstance(answer, ModelResponse):
            raise internal("no room for that")
        super().send(answer, final)


@pytest.mark.parametrize("config", [NUMBERS, DECOUPLED])
@pytest.mark.parametrize("goes_on", [False, True])
def test_a_response_that_cannot_be_sent_was_not_sent(tmp_path: Path, config: str, goes_on: bool) -> None:
    """Also from a thread, where nobody sees what it raises: the request must still be answered."""
    body = f"""
sender, ended = requests[0].get_response_sender(), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
def respond(request, sender):
    try:
        sender.send(answer(request), ended)
    except pb_utils.TritonModelException as error:
        if {goes_on}:
            sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"sorry, {{error}}")), ended)
import threading
threading.Thread(target=respond, args=(requests[0], sender)).start()
"""
    responder = Narrow()
    with serving_source(tmp_path / "m", method(body), config) as model:
        assert model.execute([request(X=X, responder=responder)]) == [None]
        ((error, final),) = responder.wait()
    if goes_on or config is NUMBERS:
        assert isinstance(error, ServeError)
        assert error.text == (
            "sorry, no room for that" if goes_on else "model 'm' released a request without a response"
        )
    else:
        assert error is None
    assert final


def test_after_an_exception_nothing_more_can_be_sent(tmp_path: Path) -> None:
    body = """
if len(requests) == 2:
    self.kept = requests[0].get_response_sender()
    raise ValueError("not now")
self.kept.send(answer(requests[0]))
"""
    with serving_source(tmp_path / "m", method(body), DECOUPLED) as model:
        with pytest.raises(ServeError, match="not now"):
            model.execute([request(X=X), request(X=X)])
        with pytest.raises(ServeError, match="Response sender has been closed"):
            model.execute([request(X=X)])


def test_coroutines_of_a_decoupled_model_go_on_side_by_side(caplog: pytest.LogCaptureFixture) -> None:
    responders = {number: RecordingResponder() for number in (3, 13, 0)}
    with serving(MODELS / "square_async") as model:
        for number, responder in responders.items():
            assert model.execute([request(IN=np.array([number], np.int32), responder=responder)]) == [None]
        sent = {number: responder.wait() for number, responder in responders.items()}
    assert [outputs(answer)["OUT"].tolist() for answer, _ in sent[3][:-1]] == [[9]] * 3
    assert sent[0] == [(None, True)]
    (error, final) = sent[13][-1]
    assert isinstance(error, ServeError)
    assert "ValueError: thirteen is out of the question" in error.text
    assert final
    assert "in respond" in caplog.text


ITERATIVE = "sequence_batching { iterative_sequence: true }"
AGAIN = "set_release_flags(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)"


@pytest.mark.parametrize(
    "body",
    [
        f"await asyncio.sleep(0.01); requests[0].{AGAIN}",
        # What comes after the flag belongs to the same run.
        f"requests[0].{AGAIN}; await asyncio.sleep(0.01)",
        # Nobody waits for this task.
        "asyncio.create_task(later(requests[0]))",
    ],
)
def test_a_coroutine_of_a_decoupled_model_may_want_its_request_again(tmp_path: Path, body: str) -> None:
    source = f"""
import asyncio
{HEAD}
    async def execute(self, requests):
        {body}
        if "later" not in {body!r}:
            requests[0].get_response_sender().send(answer(requests[0]))


async def later(request):
    await asyncio.sleep(0.01)
    request.{AGAIN}
    request.get_response_sender().send(answer(request))
"""
    responder = RecordingResponder()
    with serving_source(tmp_path / "m", source, DECOUPLED + ITERATIVE) as model:
        assert model.execute([request(X=X, responder=responder)]) == [None]
        (answer, final), last = responder.wait()
    assert outputs(answer)["Y"].tolist() == [2, 3]
    assert not final
    assert last == (RESCHEDULED, True)


@pytest.mark.parametrize(
    ("config", "body", "text"),
    [
        (
            NUMBERS,
            f"sender.send(answer(requests[0])); requests[0].{AGAIN}",
            "Unable to reschedule the request: its last",
        ),
        (
            NUMBERS,
            f"requests[0].{AGAIN}; sender.send(answer(requests[0]))",
            "Unable to send response. The request is re",
        ),
        (
            DECOUPLED,
            f"sender.send(answer(requests[0]), 1); requests[0].{AGAIN}",
            "Unable to reschedule the request: its",
        ),
    ],
)
def test_a_request_that_has_its_last_response_does_not_run_again(
    tmp_path: Path, config: str, body: str, text: str
) -> None:
    source = method(f"sender = requests[0].get_response_sender()\n{body}")
    with serving_source(tmp_path / "m", source, config + ITERATIVE) as model, pytest.raises(ServeError, match=text):
        model.execute([request(X=X)])


def test_coroutines_that_have_not_ended_are_cancelled_when_the_model_is_closed(tmp_path: Path) -> None:
    source = """
import asyncio


class TritonPythonModel:
    async def execute(self, requests):
        await asyncio.Event().wait()
"""
    responder = RecordingResponder()
    with serving_source(tmp_path / "m", source, DECOUPLED) as model:
        assert model.execute([request(X=X, responder=responder)]) == [None]
        assert responder.sent == []
    ((error, final),) = responder.wait()
    assert isinstance(error, ServeError)
    assert "Failed to process the request(s) for model 'm_0_0', message: CancelledError" in error.text
    assert final


def test_requests_that_a_model_lets_go_of_are_ended(tmp_path: Path) -> None:
    silent, spoken, decoupled = RecordingResponder(), RecordingResponder(), RecordingResponder()
    body = """
if len(requests) == 2:
    requests[1].get_response_sender().send(answer(requests[1]))
"""
    with serving_source(tmp_path / "m", method(body), NUMBERS) as model:
        assert model.execute([request(X=X, responder=silent), request(X=X, responder=spoken)]) == [None, None]
        ((error, final),) = silent.wait()
        assert isinstance(error, ServeError)
        assert final
        assert "released a request without a response" in error.text
        assert spoken.wait()[1:] == [(None, True)]
    with serving_source(tmp_path / "d", method("pass"), DECOUPLED) as model:
        model.execute([request(X=X, responder=decoupled)])
        assert decoupled.wait() == [(None, True)]


class Gone(RecordingResponder):
    """The responder of a server that has died."""

    def send(self, answer: Answer | None, final: bool) -> None:
        raise unavailable("the server is gone")


@pytest.mark.parametrize("config", [NUMBERS, DECOUPLED])
def test_a_dropped_request_of_a_server_that_has_died_keeps_no_other_waiting(tmp_path: Path, config: str) -> None:
    """The next server has the model, and its clients the same promise."""
    responder = RecordingResponder()
    with serving_source(tmp_path / "m", method("pass"), config) as model:
        model.execute([request(X=X, responder=Gone())])
        model.execute([request(X=X, responder=responder)])
        assert [final for _, final in responder.wait()] == [True]


# Calls


def _counter(call, on_answer) -> None:
    for number in call.inputs[0].numpy():
        on_answer(ModelResponse([tensor_from_numpy("OUT", np.array([number], np.int32))]), False)
    on_answer(None, True)


def test_responses_of_a_call_are_iterated_asynchronously_too(tmp_path: Path) -> None:
    source = """
import triton_python_backend_utils as pb_utils
import numpy as np

class TritonPythonModel:
    async def execute(self, requests):
        call = pb_utils.InferenceRequest(
            model_name="repeat", requested_output_names=["OUT"], inputs=requests[0].inputs(),
            request_id="q", correlation_id=9, model_version=2, flags=1, timeout=30, parameters={"a": 1},
            preferred_memory=pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0), trace=requests[0].trace())
        responses = await call.async_exec(decoupled=True)
        one_way = [r.output_tensors()[0].as_numpy()[0] async for r in responses if r.output_tensors()]
        again = [r.output_tensors()[0].as_numpy()[0] for r in responses if r.output_tensors()]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(one_way + again, np.float32))])]
"""
    config = NUMBERS.replace("FP32", "INT32")
    calls = FakeCalls(repeat=_counter)
    with serving_source(tmp_path / "m", source, config, calls) as model:
        (answer,) = model.execute([request(X=np.array([5, 6], np.int32))])
    assert outputs(answer)["Y"].tolist() == [5, 6, 5, 6]
    (call,) = calls.calls
    assert (call.id, call.correlation_id, call.model_version, call.flags) == ("q", 9, 2, 1)
    assert (call.timeout_microseconds, call.parameters) == (30, {"a": 1})


def test_no_calls_outside_of_execute(tmp_path: Path) -> None:
    source = (
        HEAD
        + """
    def initialize(self, args):
        pb_utils.InferenceRequest(model_name="m", requested_output_names=[], inputs=[]).exec()
    def execute(self, requests):
        pass
"""
    )
    drop(tmp_path, "m", source, NUMBERS)
    with (
        pytest.raises(ServeError, match="BLS is only supported during the 'execute' function"),
        serving(tmp_path / "m"),
    ):
        pass


# Loading


def completing(line: str) -> str:
    return (
        method("pass")
        + f"    @staticmethod\n    def auto_complete_config(config):\n        {line}\n        return config"
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\nclass TritonPythonModel\n    pass", r"SyntaxError: expected ':' \(1/model.py, line 2\)"),
        ("import not_there_at_all", r"No module named 'not_there_at_all' \(1/model.py, line 1, in <module>\)"),
        ("class Model:\n    pass", "model.py of model 'm' defines no class TritonPythonModel"),
        ("class TritonPythonModel:\n    pass", "does not implement `execute` method"),
        ("import sys\nsys.exit(4)", r"SystemExit: 4 \(1/model.py, line 2, in <module>\)"),
        (HEAD + "    def execute(self, r): pass\n    def auto_complete_config(config): pass", "must return a valid"),
        (
            HEAD + "    def execute(self, r): pass\n    @staticmethod\n    def auto_complete_config(config):\n"
            "        config.add_input({'name': 'X', 'data_type': 'TYPE_INT8', 'dims': [-1]})\n        return config",
            "configuration expects datatype TYPE_FP32 for input 'X', model provides TYPE_INT8",
        ),
        (
            HEAD + "    def execute(self, r): pass\n    @staticmethod\n    def auto_complete_config(config):\n"
            "        config.add_input({'name': 'W', 'data_type': 'FP32', 'dims': [0]})\n        return config",
            "data_type 'FP32'; expected one of",
        ),
        (completing("config.add_output({'name': 5, 'data_type': 'TYPE_FP32', 'dims': [1]})"), "name 5; expected"),
        (completing("config.as_dict()['input'][0]['name'] = ''"), "name ''; expected"),
        (completing("config.add_output({'name': 'W', 'data_type': 'TYPE_FP32', 'dims': [2**63]})"), "expected a list"),
        (completing("config.set_max_batch_size(2**31)"), "max_batch_size 2147483648; expected 2147483647 at most"),
        (completing("config.set_max_batch_size(2.5)"), "max_batch_size 2.5; expected a whole number, 0 or more"),
        (completing("config.as_dict()['max_batch_size'] = -1"), "max_batch_size -1; expected a whole number"),
        (
            completing("config.add_input({'name': 'W', 'data_type': ['x'], 'dims': [1]})"),
            "data_type '.*'; expected one",
        ),
        (completing("config.add_input({'name': 'W', 'data_type': 'TYPE_FP32', 'dims': [1.5]})"), "dims .*; expected a"),
        (
            completing("config.add_input({'name': 'W', 'data_type': 'TYPE_FP32', 'dims': [True]})"),
            "dims .*; expected a",
        ),
        (
            completing("config.add_input({'name': 'W', 'data_type': 'TYPE_FP32', 'dims': [1], 'optional': 'false'})"),
            "input 'W' of model 'm' has optional 'false'; expected True or False",
        ),
        (
            completing("config.set_model_transaction_policy({'decoupled': 'false'})"),
            "model 'm' has decoupled 'false'; expected True or False",
        ),
        (
            completing("config.as_dict()['input'].append({})"),
            "auto_complete_config of model 'm' returns a configuration that cannot be read: KeyError: 'name'",
        ),
    ],
)
def test_a_model_that_cannot_be_loaded_says_why(tmp_path: Path, source: str, message: str) -> None:
    drop(tmp_path, "m", source, NUMBERS)
    with pytest.raises(ServeError, match=message) as fault, loaded(tmp_path / "m"):
        pass
    assert fault.value.code is StatusCode.INVALID_ARGUMENT


def test_sizes_are_read_as_protobuf_reads_json(tmp_path: Path) -> None:
    completed = "config.add_input({'name': 'W', 'data_type': 'TYPE_FP32', 'dims': [3.0, '4', -1]})"
    drop(tmp_path, "m", completing(completed), NUMBERS)
    with loaded(tmp_path / "m") as model:
        assert {spec.name: spec.shape for spec in model.signature.inputs}["W"] == (3, 4, -1)


def test_a_failing_initialize_says_where(tmp_path: Path) -> None:
    source = method("pass") + "    def initialize(self, args):\n        self.weights = open('/no/such/file')\n"
    drop(tmp_path, "m", source, NUMBERS)
    message = r"FileNotFoundError: .* \(1/model.py, line \d+, in initialize\)"
    with pytest.raises(ServeError, match=message), serving(tmp_path / "m"):
        pass


@pytest.mark.parametrize(("value", "name"), [("None", "NoneType"), ("1", "int"), ("np.bool_(True)", r"numpy\.bool_?")])
def test_readiness_that_is_no_boolean_is_named(tmp_path: Path, value: str, name: str) -> None:
    source = method("pass") + f"    def is_ready(self):\n        return {value}\n"
    with serving_source(tmp_path / "m", source, NUMBERS) as model:
        check = readiness_check(model)
        assert check is not None
        with pytest.raises(TypeError, match=rf"is_ready\(\) must return a boolean value, got {name}$"):
            check()


def test_a_failing_finalize_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = method("pass") + "    def finalize(self):\n        raise pb_utils.TritonModelException('stuck')\n"
    with serving_source(tmp_path / "m", source, NUMBERS):
        pass
    assert "stuck" in caplog.text


def test_a_new_file_of_the_same_size_and_second_is_read_again(tmp_path: Path) -> None:
    for number in (3, 4):
        source = method(f"return [pb_utils.InferenceResponse([pb_utils.Tensor('Y', np.full(1, {number}.0))])]")
        folder = drop(tmp_path, "m", source, NUMBERS)
        os.utime(folder / "1" / "model.py", (1_700_000_000, 1_700_000_000))
        with serving(folder) as model:
            assert outputs(model.execute([request(X=X)])[0])["Y"].tolist() == [number]
