"""Further servers for the time of an action, with logs of JSON: one whose clients connect through Unix sockets, and one
whose front ends come and go."""

from __future__ import annotations

import random
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.models import add_constant
from support.server import RocserveProcess
from support.unix_server import UnixServer
from support.waiting import PATIENCE_SECONDS, wait_until

from campaign import models
from campaign.action import Kind
from campaign.actions.frames import DATA, END_HEADERS, HEADERS, frame, head, opening
from campaign.actions.fuzz_http import http_request
from campaign.honest.client import Asker
from campaign.honest.constants import ByRocserveStream, ByTritonGrpc, ByTritonHttp, Model
from campaign.requests import OWN_CONNECTION, infer_message, json_body
from campaign.stage import SETTLE_SECONDS, Stage
from campaign.truth import Constants
from campaign.watch.ending import check_json

EAGER_SERVER = (str(Path(__file__).parents[2] / "support" / "eager_server.py"),)
COME, GO = "front ends take the ports", "the front ends leave the ports"
MOST_HANG_UPS = 20


@contextmanager
def _repository(stage: Stage, random: random.Random) -> Iterator[Path]:
    """A repository with one model, and beside it a file for the log, whose lines are checked at the end."""
    folder = stage.staging / f"own_{random.getrandbits(32):x}"
    models.drop_constant(folder / "models", models.STEADY)
    log = folder / "log"
    try:
        yield folder / "models"
    except BaseException:
        shutil.copyfile(log, stage.folder / f"{folder.name}.log")
        raise
    check_json(stage.findings, folder.name, log.read_text())
    shutil.rmtree(folder)


def _environment(stage: Stage) -> dict[str, str]:
    return {"TMPDIR": str(stage.folder / "temporary"), "HOME": str(stage.folder / "temporary")}


def unix_sockets(stage: Stage, random: random.Random) -> None:
    """Clients ask, hang up in the middle, and find the server again at the same files after it was killed."""
    with _repository(stage, random) as repository, tempfile.TemporaryDirectory() as sockets:
        server = UnixServer(
            repository,
            Path(sockets),
            repository.parent / "log",
            "--log-format=json",
            environment=_environment(stage),
            outlives=False,
        )
        with server:
            for _ in range(2):
                _ask(server)
                for _ in range(random.randint(1, MOST_HANG_UPS)):
                    _hang_up(server, random)
                _ask(server)
                server.kill()
                assert len(list(Path(sockets).iterdir())) == 2, "a killed server leaves its sockets' files"
                server.start()
            _ask(server)
            status = server.terminate(PATIENCE_SECONDS)
            assert status == 0, f"the server on Unix sockets ended with {status}"
            assert not list(Path(sockets).iterdir()), "a server that ends removes its sockets' files"


def _ask(server: UnixServer) -> None:
    values = np.array([[1, 2]], np.float32)
    with triton.InferenceServerClient(server.grpc, channel_args=list(OWN_CONNECTION)) as client:
        answer = client.infer(models.STEADY, [infer_input("X", values)], client_timeout=PATIENCE_SECONDS)
    assert np.array_equal(answer.as_numpy("Y"), values + np.float32(models.FIRST)), answer.as_numpy("Y")
    status, text = server.call("POST", f"/v2/models/{models.STEADY}/infer", json_body(models.STEADY))
    assert status == 200, text
    assert f'"data":[{1 + models.FIRST},{2 + models.FIRST}]' in text.replace(" ", ""), text


def _hang_up(server: UnixServer, random: random.Random) -> None:
    """Send a part of a request over one of the protocols, and close the socket."""
    if random.random() < 0.5:
        path, body = server.http, b'{"inputs":[{"name":"X","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
        whole = http_request("POST", f"/v2/models/{models.STEADY}/infer", body, {"Content-Length": str(len(body))})
    else:
        path, message = server.grpc.removeprefix("unix:"), infer_message(models.STEADY).SerializeToString()
        data = b"\0" + len(message).to_bytes(4, "big") + message
        whole = opening() + frame(HEADERS, END_HEADERS, 1, head()) + frame(DATA, 1, 1, data)
    with socket.socket(socket.AF_UNIX) as client, suppress(OSError):
        client.settimeout(PATIENCE_SECONDS)
        client.connect(path)
        client.sendall(whole[: random.randint(0, len(whole))])
        if random.random() < 0.3:
            client.shutdown(socket.SHUT_WR)


def moves(stage: Stage, random: random.Random) -> None:
    """Front ends come and go under load, while the model is swapped: no client notices."""
    rounds, constants = random.randint(1, 3), Constants(models.FIRST)
    with _repository(stage, random) as repository:
        server = RocserveProcess(
            [repository],
            "--front-ends=auto",
            "--log-format=json",
            f"--repository-settle-secs={SETTLE_SECONDS}",
            "--repository-poll-secs=1",
            log=repository.parent / "log",
            environment=_environment(stage),
            outlives=False,
            program=EAGER_SERVER,
        )
        with server:
            server.wait_until_ready()
            model = Model(models.STEADY, constants)
            askers: list[Asker] = [
                ByTritonGrpc(server.address, [model]),
                ByTritonHttp(server.http_address, [model]),
                ByRocserveStream(server.address, [model]),
            ]
            with _asking(askers, random.getrandbits(32)):
                for number in range(rounds):
                    constant = models.FIRST + number + 1
                    constants.offer(constant)
                    file = repository / models.STEADY / "1" / "model.onnx"
                    draft = file.with_name("model.onnx.tmp")
                    draft.write_bytes(add_constant(constant))
                    draft.rename(file)
                    _wait_for_moves(server, number + 1)
            status = server.terminate(PATIENCE_SECONDS)
            assert status == 0, f"the server whose front ends move ended with {status}"


def _wait_for_moves(server: RocserveProcess, count: int) -> None:
    def have_moved() -> bool:
        text = server.log_text
        return min(text.count(COME), text.count(GO)) >= count

    wait_until(have_moved, f"{count} moves of the front ends")


@contextmanager
def _asking(askers: Sequence[Asker], seed: int) -> Iterator[None]:
    """Let each asker send requests on its thread until the block ends; then raise the first error."""
    ending, errors = threading.Event(), list[BaseException]()

    def run(asker: Asker, draws: random.Random) -> None:
        try:
            while not ending.wait(0.01):
                asker.ask(draws)
            asker.close()
        except BaseException as error:
            errors.append(error)

    threads = [
        threading.Thread(target=run, args=(asker, random.Random(seed + number))) for number, asker in enumerate(askers)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ending.set()
        for thread in threads:
            thread.join(2 * PATIENCE_SECONDS)
    assert not errors, f"clients of a server whose front ends move: {errors}"


KINDS = (Kind("own.unix-sockets", unix_sockets, 3), Kind("own.moves", moves, 3))
