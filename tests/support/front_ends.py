"""What tests of front-end processes share, over gRPC and HTTP."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import psutil

from support.models import drop
from support.waiting import wait_until

CLIENTS = 12
KILLS = int(os.environ.get("KILLS", "4"))
"""Front ends that one run kills, one after another, under load."""

PATIENT = """
import pathlib
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            time.sleep(0.2)
            try:
                with open(pathlib.Path(__file__).parents[3] / "executed", "a") as file:
                    file.write("x")
            except PermissionError:
                pass  # Where nobody looks for it, its user may not be allowed to.
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("Y", pb_utils.get_input_tensor_by_name(request, "X").as_numpy())]
            )
            for request in requests
        ]
"""
PATIENT_CONFIG = """
backend: "python"
input { name: "X" data_type: TYPE_FP32 dims: [ 1, 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 1, 2 ] }
"""


class Asking(Protocol):
    """A client that sends requests without a pause in its own thread until its event is set."""

    answers: int
    thread: threading.Thread


AskingClient = TypeVar("AskingClient", bound=Asking)


def drop_patient(repository: Path) -> None:
    """Drop the model `patient`: each request takes 0.2 s and appends to the file `executed` next to the repository."""
    drop(repository, "patient", PATIENT, PATIENT_CONFIG)


@contextmanager
def asking_clients(make: Callable[[int, threading.Event], AskingClient]) -> Iterator[list[AskingClient]]:
    """Start clients and wait until each has received an answer. `make` takes a client's number and the event that stops
    it."""
    stop = threading.Event()
    made = [make(number, stop) for number in range(CLIENTS)]
    try:
        wait_until(lambda: all(client.answers for client in made), "an answer for each client")
        yield made
    finally:
        stop.set()
        for client in made:
            client.thread.join(30)


def wait_for_more(asking: Sequence[Asking]) -> None:
    counts = [client.answers for client in asking]
    wait_until(
        lambda: all(client.answers > count for client, count in zip(asking, counts, strict=True)),
        "further answers for each client",
    )


def check_others_go_on(asking: Sequence[Asking], still: psutil.Process, other: psutil.Process) -> None:
    """Check that the clients of the front end `other` are served while `still` is stopped; let `still` continue."""
    still.send_signal(signal.SIGSTOP)
    try:
        for _ in range(3):
            counts = [client.answers for client in asking]
            time.sleep(0.3)
            went_on = sum(client.answers > count for client, count in zip(asking, counts, strict=True))
            assert went_on >= clients_of(other)
    finally:
        still.send_signal(signal.SIGCONT)


def clients_of(front_end: psutil.Process) -> int:
    return sum(each.status == psutil.CONN_ESTABLISHED for each in front_end.net_connections("tcp"))


def listens(process: psutil.Process, port: int) -> bool:
    try:
        connections = process.net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections)
