"""Hostile workers: models whose code writes arbitrary bytes to every descriptor that it holds. The server ends such a
worker with a reason, and serves the others as before."""

from __future__ import annotations

import re
import time
import urllib.request

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import answering, drop
from support.repository_index import models_of
from support.server import RocserveProcess, Start
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

CONFIG = """
backend: "python"
input { name: "ATTACK" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "OUT" data_type: TYPE_UINT8 dims: [ -1 ] }
"""

HONEST = answering("ATTACK", "OUT", "np.zeros(1, np.uint8)")

HOSTILE = """
import os
import socket
import stat
import sys
import time

import triton_python_backend_utils as pb_utils
from rocserve.backends.request_model import ModelCall
from rocserve.core.tensors import Tensor, TensorHead
from rocserve.core.custom_metrics import MetricChange, MetricChanges, MetricKind
from rocserve.core.datatypes import DataType
from rocserve.core.plain import to_json
from rocserve.links.entries import CALL, DONE, ENTRY, RESPONSE, RESULTS_HEADER, TEXT
from rocserve.workers.messages import Progress, Unload, encode_frame
from rocserve.workers.model_service import RequestService


def descriptors():
    return sorted(int(name) for name in os.listdir("/proc/self/fd"))


def is_socket(descriptor):
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False  # The one that the folder itself was read by.


def serving():
    # The end of the instance and the running batch, from their owner.
    frame = sys._getframe()
    while not isinstance(frame.f_locals.get("self"), RequestService) or "received" not in frame.f_locals:
        frame = frame.f_back
    return frame.f_locals["self"]._end, frame.f_locals["received"]


def control(*messages):
    end, _ = serving()
    others = {os.fstat(other.fileno()).st_ino for other in (end._connection, end.back_connection)}
    found = {os.fstat(each).st_ino: each for each in filter(is_socket, descriptors())}
    own = [socket.socket(fileno=os.dup(each)) for inode, each in found.items() if inode not in others]
    (control,) = [each for each in own if each.type == socket.SOCK_STREAM]
    for message in messages:
        control.sendall(message)


def say(*entries):
    end, _ = serving()
    for entry in entries:
        end.post(entry)


def answer(heads, nbytes, times=None):
    # A result of so many bytes.
    now = time.monotonic_ns()
    end, batch = serving()
    text = to_json(heads)
    layout = ENTRY.pack(TEXT, 0, 0, 99, 0, end.sender.put_text(text), len(text))
    header = RESULTS_HEADER.pack(1, *(times or (now, now, now)))
    slot = (header + ENTRY.pack(RESPONSE, 0, 0, 99, 1, 64, 0)).ljust(64 + nbytes, b"\\0")
    return layout + ENTRY.pack(DONE, 0, 0, 0, batch.id, end.sender.put_text(slot), len(slot))


def out(nbytes):
    return TensorHead("OUT", DataType.UINT8, (nbytes,))


def garbage():
    for descriptor in descriptors():
        for data in (b"", b"x", os.urandom(4000)):
            try:
                os.write(descriptor, data)
            except OSError:
                pass


def sparse():
    for descriptor in descriptors():
        try:
            os.ftruncate(descriptor, 1 << 40)
        except OSError:
            pass
    end, batch = serving()
    say(ENTRY.pack(DONE, 0, 0, 0, batch.id, end._heap.allocate(1 << 32)[0], 1 << 32))


def posted():
    end, _ = serving()
    end._results._own_words[end._results._posted_at] = 1 << 62
    end._connection.send(b"!")


def same_call_twice():
    # Of the model itself, whose only instance is busy: both wait.
    end, _ = serving()
    inputs = (Tensor("ATTACK", DataType.BYTES, (1,), b"\\x04\\x00\\x00\\x00none"),)
    layout, place, nbytes = end.sender.put(inputs, to_json(ModelCall("hostile", (), ("OUT",))))
    call = ENTRY.pack(CALL, 0, 0, end.sender.number(layout), 7, place, nbytes)
    say(call, call)


def flood():
    letters = "abcdefghijklmnop"
    for number in range(4):
        # Phases are distinguished by their words.
        words = ("".join(letters[int(digit, 16)] for digit in hex(number * 1000 + index)[2:]) for index in range(1000))
        control(b"".join(encode_frame(Progress(word)) for word in words))
    control(encode_frame(Progress("")))


def metrics():
    for family, labels, kind, bounds, counts in (
        ("nv_inference_count", {}, MetricKind.COUNTER, (), ()),
        ("two\\nlines 1", {}, MetricKind.COUNTER, (), ()),
        ("good", {"no label": "x"}, MetricKind.COUNTER, (), ()),
        ("steep", {}, MetricKind.HISTOGRAM, (float("nan"), float("inf")), (1, 1, 1)),
        ("short", {}, MetricKind.HISTOGRAM, (1.0, 2.0), (-5,)),
    ):
        control(encode_frame(MetricChanges((MetricChange(family, kind, "", labels, 1.0, False, bounds, counts),))))
    control(
        *(
            encode_frame(
                MetricChanges(tuple(
                    MetricChange("many", MetricKind.COUNTER, "", {"number": str(first + index)}, 1.0)
                    for index in range(1000)
                ))
            )
            for first in range(0, 15_000, 1000)
        )
    )


ATTACKS = {
    "none": lambda: None,
    "garbage": garbage,
    "a frame without end": lambda: control(b"\\xff\\xff\\xff\\xff"),
    "no message": lambda: control(b"\\x05\\x00\\x00\\x00abcde"),
    "JSON without end": lambda: control(b"\\x10\\x27\\x00\\x00Progress " + b"[" * 9991),
    "a message of the server's": lambda: control(encode_frame(Unload())),
    "a batch that it has not": lambda: say(ENTRY.pack(DONE, 0, 0, 0, 200, 0, 0)),
    "results of no kind": lambda: say(ENTRY.pack(200, 255, 65535, 1 << 31, 1 << 63, 1 << 63, 1 << 63)),
    "results elsewhere": lambda: say(ENTRY.pack(DONE, 0, 0, 0, serving()[1].id, 1 << 62, 64)),
    "times to come": lambda: say(answer((out(1),), 64, (1 << 62,) * 3)),
    "times before the request": lambda: say(answer((out(1),), 64, (3, 4, 5))),
    "more outputs than memory": lambda: say(answer((out(64),) * 500, 64)),
    "counts of what it posted": posted,
    "an output that nobody wrote": sparse,
    "one call twice": same_call_twice,
    "flood": flood,
    "metrics": metrics,
}


class TritonPythonModel:
    def execute(self, requests):
        (attack,) = pb_utils.get_input_tensor_by_name(requests[0], "ATTACK").as_numpy().tolist()
        ATTACKS[attack.decode()]()
        if attack not in (b"none", b"flood", b"metrics"):
            time.sleep(60)
        return [pb_utils.InferenceResponse(error=pb_utils.TritonError("done")) for _ in requests]
"""

FATAL = {
    "garbage": "worker of model 'hostile' version 1 ended unexpectedly",
    "a frame without end": "invalid control message: the frame announces 4294967295 bytes",
    "no message": "invalid control message: unknown message b'abcde'",
    "JSON without end": "invalid control message",
    "a message of the server's": "invalid control message: unexpected Unload, which only the server sends",
    "a batch that it has not": "it sent an invalid message: an answer to batch 200, which is not in flight",
    "results of no kind": "it sent an invalid message: unexpected message of kind 200",
    "results elsewhere": "it sent an invalid message: a tensor of 64 bytes at byte 4611686018427387904 lies outside",
    "times to come": "it sent an invalid message: times out of order",
    "times before the request": "it sent an invalid message: times out of order",
    "more outputs than memory": "it sent an invalid message: a result of 32000 bytes at byte 64 of 128",
    "an output that nobody wrote": "was not written to its end",
    "counts of what it posted": "the other end of a link reports 4611686018427387904 bytes posted",
    "one call twice": "it sent an invalid message: call 7 is already open",
}


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    place = tmp_path_factory.mktemp("hostile")
    for name, code in (("honest", HONEST), ("hostile", HOSTILE)):
        drop(place / "models", name, code, CONFIG)
    flags = ("--allow-metrics=true", "--metrics-address=127.0.0.1", "--metrics-port=0")
    return start(place / "models", *flags)


def infer(client: triton.InferenceServerClient, model: str, attack: str = "none") -> None:
    client.infer(
        model, [infer_input("ATTACK", np.array([attack.encode()], np.object_))], client_timeout=PATIENCE_SECONDS
    )


def client_of(server: RocserveProcess) -> triton.InferenceServerClient:
    """A client, once the hostile model has a worker again, and has answered a request."""
    wait_until(lambda: models_of(server)["hostile"] == ("READY", ""), "a worker of the hostile model")
    client = server.client()
    # A worker that has answered a request is restarted immediately when it ends.
    with pytest.raises(InferenceServerException, match="done"):
        infer(client, "hostile", "none")
    return client


@pytest.mark.parametrize("attack", FATAL)
def test_a_worker_that_sends_nonsense_is_ended_with_the_reason(server: RocserveProcess, attack: str):
    client = client_of(server)
    with pytest.raises(InferenceServerException) as refused:
        infer(client, "hostile", attack)
    assert refused.value.status() == "StatusCode.UNAVAILABLE"
    assert FATAL[attack] in refused.value.message()
    infer(client, "honest")
    assert client.is_server_live()
    assert "Traceback" not in server.log_text


def test_a_flood_of_messages_leaves_the_others_their_time(server: RocserveProcess):
    client, other = client_of(server), server.client()
    lines = len(server.log_text.splitlines())
    started = time.monotonic()
    entry = infer_input("ATTACK", np.array([b"flood"], np.object_))
    answers: list[InferenceServerException | None] = []
    client.async_infer("hostile", [entry], lambda result, error: answers.append(error), client_timeout=PATIENCE_SECONDS)
    while not answers and time.monotonic() - started < 5:
        # The loop that reads the flood updates the index.
        other.get_model_repository_index(client_timeout=PATIENCE_SECONDS)
        infer(other, "honest")
    wait_until(lambda: answers, "the end of the flood")
    assert len(server.log_text.splitlines()) - lines < 1000


def test_metrics_that_are_none_leave_the_page_whole(server: RocserveProcess):
    client = client_of(server)
    with pytest.raises(InferenceServerException, match="done"):
        infer(client, "hostile", "metrics")
    wait_until(lambda: "the model already has 10000 time series" in server.log_text, "the bound of the series")
    (address,) = re.findall(r"Started Metrics Service at ([0-9.]+:[0-9]+)", server.log_text)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=PATIENCE_SECONDS) as response:
        page = response.read().decode()
    assert page.count("# TYPE nv_inference_count ") == 1
    assert page.count("\nmany{") == 10_000
    assert not any(word in page for word in ("two", "no label", "steep", "short"))
    infer(client, "honest")
