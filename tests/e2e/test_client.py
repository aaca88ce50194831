"""rocserve_client, `rocserve status` and the examples against the real server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.models import add_sub, drop
from support.server import RocserveProcess
from support.tools import Command
from support.waiting import PATIENCE_SECONDS

from rocserve_client import (
    AsyncClient,
    Client,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    Output,
    RocserveError,
    StatusCode,
    TensorMetadata,
)

ROOT = Path(__file__).parents[2]
DIGITS = sorted((ROOT / "tests" / "data" / "digits").glob("*.jpg"))
WANTED = ("LABEL", Output("PROBABILITIES", classification=3))


def encoded(images: Sequence[Path]) -> dict[str, np.ndarray]:
    return {"ENCODED": np.array([[image.read_bytes()] for image in images], dtype=object)}


def true_label(image: Path) -> str:
    return image.stem.rpartition("_")[2]


def rightly_named(labels: np.ndarray, images: Sequence[Path]) -> int:
    return sum(label.decode() == true_label(image) for label, image in zip(labels[:, 0], images, strict=True))


def test_one_array_is_enough_for_a_model_with_one_input(rocserve_server: RocserveProcess):
    images = encoded(DIGITS[:2])
    with Client(rocserve_server.address) as client:
        named = client.infer("digits", images)["PROBABILITIES"]
        np.testing.assert_array_equal(client.infer("digits", images["ENCODED"])["PROBABILITIES"], named)

    async def ask() -> np.ndarray:
        async with AsyncClient(rocserve_server.address) as client:
            return (await client.infer("digits", images["ENCODED"], version="1"))["PROBABILITIES"]

    np.testing.assert_array_equal(asyncio.run(ask()), named)


def test_numpy_s_default_is_refused_with_the_cast_that_helps(rocserve_server: RocserveProcess):
    zeros = np.zeros((1, 1, 16, 16))
    with Client(rocserve_server.address) as client:
        with pytest.raises(InvalidArgument) as caught:
            client.infer("digits_classifier", {"IMAGE": zeros})
        assert caught.value.text.endswith(
            "data-type is 'FP64', but model 'digits_classifier' expects 'FP32'; numpy makes float64 by default: send"
            " array.astype('float32'); infer(..., cast=True) converts the inputs to the model's datatypes"
        )
        wanted = client.infer("digits_classifier", {"IMAGE": zeros.astype(np.float32)})["PROBABILITIES"]
        for inputs in ({"IMAGE": zeros}, zeros, zeros.tolist()):
            np.testing.assert_array_equal(client.infer("digits_classifier", inputs, cast=True)["PROBABILITIES"], wanted)

    async def ask() -> np.ndarray:
        async with AsyncClient(rocserve_server.address) as client:
            return (await client.infer("digits_classifier", zeros.tolist(), cast=True))["PROBABILITIES"]

    np.testing.assert_array_equal(asyncio.run(ask()), wanted)


def test_an_http_port_is_recognised(rocserve_server: RocserveProcess):
    with (
        Client(rocserve_server.http_address) as client,
        pytest.raises(RocserveError, match=r"this looks like an HTTP port: give the server's gRPC port \(8001 by"),
    ):
        client.server_live(timeout=PATIENCE_SECONDS)


def test_a_batch_of_jpegs_gives_labels_and_classes(rocserve_server: RocserveProcess):
    images = DIGITS[:16]
    with Client(rocserve_server.address) as client:
        result = client.infer("digits", encoded(images), WANTED, request_id="batch", timeout=PATIENCE_SECONDS)
        probabilities = client.infer("digits", encoded(images), ["PROBABILITIES"])["PROBABILITIES"]
    assert (result.model_name, result.request_id) == ("digits", "batch")
    assert rightly_named(result["LABEL"], images) >= 15
    assert probabilities.shape == (16, 10)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-4)
    for row, label, classes in zip(probabilities, result["LABEL"][:, 0], result.classes("PROBABILITIES"), strict=True):
        assert [found.class_index for found in classes] == np.argsort(-row, kind="stable")[:3].tolist()
        assert classes[0].label == label.decode()
        assert classes[0].score == pytest.approx(row.max(), abs=1e-5)


async def test_asyncio_many_at_once(rocserve_server: RocserveProcess):
    images = DIGITS[:64]
    async with AsyncClient(rocserve_server.address) as client:
        results = await asyncio.gather(*(client.infer("digits", encoded([image]), ["LABEL"]) for image in images))
    labels = np.concatenate([result["LABEL"] for result in results])
    assert rightly_named(labels, images) >= 62


def test_a_stream_goes_on_behind_a_bad_image(rocserve_server: RocserveProcess):
    with Client(rocserve_server.address) as client, client.stream() as stream:
        stream.send("digits", encoded(DIGITS[:1]), WANTED, request_id="good")
        assert stream.receive().request_id == "good"
        stream.send("digits", {"ENCODED": np.array([[b"no JPEG"]], dtype=object)}, request_id="bad")
        with pytest.raises(RocserveError) as caught:
            stream.receive()
        assert caught.value.request_id == "bad"
        stream.send("digits", encoded(DIGITS[:1]), request_id="good again")
        stream.close_sending()
        assert [result.request_id for result in stream] == ["good again"]


async def test_asyncio_stream(rocserve_server: RocserveProcess):
    images = DIGITS[:20]
    async with AsyncClient(rocserve_server.address) as client, client.stream() as stream:
        for image in images:
            await stream.send("digits", encoded([image]), ["LABEL"], request_id=image.stem)
        await stream.close_sending()
        results = {result.request_id: result async for result in stream}
    labels = np.concatenate([results[image.stem]["LABEL"] for image in images])
    assert rightly_named(labels, images) >= 19


def test_errors_carry_the_servers_status_and_text(rocserve_server: RocserveProcess):
    with Client(rocserve_server.address) as client:
        with pytest.raises(NotFound) as unknown:
            client.infer("nothing", encoded(DIGITS[:1]))
        assert unknown.value.text.startswith("Request for unknown model: 'nothing' is not found; served are: ")
        with pytest.raises(InvalidArgument, match="unexpected inference output 'NOPE' for model 'digits'"):
            client.infer("digits", encoded(DIGITS[:1]), ["NOPE"])
        with pytest.raises(InvalidArgument):
            client.infer("digits", {"ENCODED": np.array([[b"no JPEG"]], dtype=object)})
        with pytest.raises(DeadlineExceeded, match=r"model 'nothing' is not ready"):
            client.wait_until_ready(0.2, model="nothing")


def test_questions(rocserve_server: RocserveProcess):
    with Client(rocserve_server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS)
        client.wait_until_ready(PATIENCE_SECONDS, model="digits")
        assert client.server_live()
        assert client.server_ready()
        assert client.model_ready("digits", "1")
        assert not client.model_ready("nothing")
        server = client.server_metadata()
        assert server.name == "rocserve" and "statistics" in server.extensions
        metadata = client.model_metadata("digits")
        assert metadata.inputs == (TensorMetadata("ENCODED", "BYTES", (-1, 1)),)
        assert not metadata.properties
        member = client.model_metadata("digits_classifier").properties
        assert (member["engine"], member["devices"]) == ("onnxruntime", "cpu")
        assert member["engine_reason"].startswith("no AMD GPU was found")
        assert client.model_config("digits").max_batch_size == 32
        assert ("digits", "READY") in {(entry.name, entry.state) for entry in client.repository_index(ready=True)}
        before = client.statistics("digits")[0].success.count
        client.infer("digits", encoded(DIGITS[:3]))
        assert client.statistics("digits")[0].success.count == before + 1


def test_load_and_unload(serve: Callable[..., RocserveProcess], repository: Path):
    for name in ("add_sub", "named"):
        drop(repository, name, add_sub())
    drop(repository, "add_sub", add_sub(), version=2)
    server = serve(repository, flags=("--model-control-mode=explicit", "--load-model=named"))
    numbers = {"INPUT0": np.ones((1, 16), np.int32), "INPUT1": np.ones((1, 16), np.int32)}
    with Client(server.address) as client:
        client.wait_until_ready(PATIENCE_SECONDS)
        assert client.model_ready("named")
        assert not client.model_ready("add_sub")
        with pytest.raises(RocserveError, match="failed to load 'nothing'"):
            client.load_model("nothing")
        client.load_model("add_sub", timeout=PATIENCE_SECONDS)
        assert client.infer("add_sub", numbers)["OUTPUT0"].tolist() == [[2] * 16]
        client.load_model("add_sub", version="1", timeout=PATIENCE_SECONDS)
        assert client.model_ready("add_sub", "1")
        assert client.model_ready("add_sub", "2")
        client.unload_model("add_sub", version="2")
        assert client.infer("add_sub", numbers).model_version == "1"
        with pytest.raises(RocserveError, match="it has no version 3; its versions are: 1, 2"):
            client.load_model("add_sub", version="3")
        with pytest.raises(RocserveError, match="remove it or 'version'"):
            client.unload_model("add_sub", version="1", unload_dependents=True)
        client.unload_model("add_sub")
        with pytest.raises(RocserveError) as caught:
            client.infer("add_sub", numbers)
        assert caught.value.status in (StatusCode.NOT_FOUND, StatusCode.UNAVAILABLE)


def test_the_status_verb(rocserve_server: RocserveProcess, command: Command):
    shown = command("status", "--once", "--url", rocserve_server.address)
    assert shown.status == 0, shown.err
    rows = {line.split()[0]: line.split()[1:3] for line in shown.out.splitlines() if line.strip()}
    assert rows["digits"] == ["1", "READY"]
    assert rows["digits_classifier"] == ["1", "READY"]
    absent = command("status", "--once", "--url", "127.0.0.1:1")
    assert absent.status == 1
    assert "no answer from a server at 127.0.0.1:1" in absent.err
