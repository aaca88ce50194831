"""JPEG bytes in, the right label out: the sample repository on the real server."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.infer_inputs import infer_input
from support.waiting import wait_until
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

IMAGES = sorted((Path(__file__).parents[1] / "data" / "digits").glob("*.jpg"))
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def label_of(path: Path) -> str:
    return path.stem.rpartition("_")[2]


def encoded(*images: bytes) -> triton.InferInput:
    return infer_input("ENCODED", np.array([[image] for image in images], dtype=object))


def test_single_images_by_name_and_by_class(rocserve_server):
    client = rocserve_server.client()
    wanted = [triton.InferRequestedOutput("PROBABILITIES", class_count=3), triton.InferRequestedOutput("LABEL")]
    right = 0
    for path in IMAGES[:20]:
        result = client.infer("digits", [encoded(path.read_bytes())], outputs=wanted)
        label = result.as_numpy("LABEL")[0, 0].decode()
        classes = [text.decode().split(":") for text in result.as_numpy("PROBABILITIES")[0]]
        assert len(classes) == 3
        assert classes[0][2] == label
        assert NAMES[int(classes[0][1])] == label
        right += label == label_of(path)
    assert right >= 18


def test_all_held_out_images_in_batches(rocserve_server):
    client = rocserve_server.client()
    right = 0
    for start in range(0, len(IMAGES), 32):
        paths = IMAGES[start : start + 32]
        result = client.infer("digits", [encoded(*(path.read_bytes() for path in paths))])
        assert result.as_numpy("PROBABILITIES").shape == (len(paths), 10)
        labels = result.as_numpy("LABEL")[:, 0]
        right += sum(label.decode() == label_of(path) for label, path in zip(labels, paths, strict=True))
    assert right / len(IMAGES) >= 0.97


def test_the_answer_does_not_depend_on_the_company(rocserve_server):
    client = rocserve_server.client()
    images = [path.read_bytes() for path in IMAGES[:32]]
    together = client.infer("digits", [encoded(*images)]).as_numpy("PROBABILITIES")
    alone = np.vstack([client.infer("digits", [encoded(image)]).as_numpy("PROBABILITIES") for image in images])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fault", ["not a JPEG", "truncated", "empty"])
def test_one_bad_image_among_31_good_ones(rocserve_server, fault):
    """32 concurrent requests, one of them corrupt: 31 right answers and one INVALID_ARGUMENT that names the fault."""
    images = [path.read_bytes() for path in IMAGES[:32]]
    bad = 13
    images[bad] = {"not a JPEG": b"GIF89a" + bytes(200), "truncated": images[bad][:300], "empty": b""}[fault]
    answers: dict[int, object] = {}
    everybody_is_here = threading.Barrier(len(images))

    def ask(index: int) -> None:
        client = rocserve_server.client()
        entry = encoded(images[index])
        client.is_server_live()
        everybody_is_here.wait()
        try:
            answers[index] = client.infer("digits", [entry]).as_numpy("LABEL")[0, 0].decode()
        except InferenceServerException as error:
            answers[index] = error

    def were_batched() -> bool:
        before = executions(rocserve_server, "digits_preprocess")
        threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(images))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return executions(rocserve_server, "digits_preprocess") - before < len(images)

    wait_until(were_batched, "a batch of several requests")
    error = answers.pop(bad)
    assert isinstance(error, InferenceServerException)
    assert error.status() == "StatusCode.INVALID_ARGUMENT"
    assert error.message().startswith("in ensemble 'digits', ")
    assert "JPEG" in error.message() or "image" in error.message()
    client = rocserve_server.client()
    alone = {
        index: client.infer("digits", [encoded(images[index])]).as_numpy("LABEL")[0, 0].decode() for index in answers
    }
    assert answers == alone


def test_a_bad_image_within_a_request_is_named(rocserve_server):
    images = [path.read_bytes() for path in IMAGES[:4]]
    images[2] = b"nothing"
    with pytest.raises(InferenceServerException, match="2") as caught:
        rocserve_server.client().infer("digits", [encoded(*images)])
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def executions(server, model: str) -> int:
    return server.client().get_inference_statistics(model).model_stats[0].execution_count


async def test_tritons_asyncio_client(rocserve_server):
    async with aio.InferenceServerClient(rocserve_server.address) as client:
        result = await client.infer("digits", [encoded(IMAGES[0].read_bytes())])
    assert result.as_numpy("LABEL").ravel().tolist() == [label_of(IMAGES[0]).encode()]


def test_reflection_is_off_by_default(rocserve_server):
    with grpc.insecure_channel(rocserve_server.address) as channel:
        with pytest.raises(grpc.RpcError) as error:
            list(ProtoReflectionDescriptorDatabase(channel).get_services())
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
