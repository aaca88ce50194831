"""What the two ends of a conversation say, and what they refuse to hear."""

from __future__ import annotations

import fcntl
import os
import random
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from support.workers import open_descriptors

from rocserve.backends.request_model import Answer, ModelCall, ModelResponse
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.tensors import Tensor, tensor_from_numpy
from rocserve.workers.conversation_wire import (
    ANSWER,
    CALL,
    CANCELLED,
    END,
    HEADER,
    INLINE_BYTES,
    LONGEST_JSON,
    Message,
    MessageReader,
    Parcel,
    pack_answer,
    pack_call,
    pack_cancelled,
)
from rocserve.workers.wire import MAXIMUM_DATAGRAM, pack_tail


class Ends:
    """Both ends in one process."""

    def __init__(self) -> None:
        self.here, self.there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MAXIMUM_DATAGRAM)
        self.reader = MessageReader(self.there, memoryview(bytearray(MAXIMUM_DATAGRAM)))

    def through(self, parcel: Parcel) -> Message:
        parcel.send(self.here)
        parcel.close()
        return self.reader.read(socket.MSG_DONTWAIT)


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.here.close()
    ends.there.close()


def tensors(rows: int) -> list[Tensor]:
    generator = np.random.default_rng(rows)
    return [
        tensor_from_numpy("numbers", generator.random((rows, 3), np.float32)),
        tensor_from_numpy("words", np.array([[b"", b"\xff" * rows]], dtype=object)),
        tensor_from_numpy("nothing", np.zeros((0, 4), np.int8)),
        tensor_from_numpy("flags", generator.integers(0, 2, rows).astype(bool)),
    ]


def same(left: Tensor, right: Tensor) -> bool:
    return (left.name, left.datatype, tuple(left.shape), bytes(left.data)) == (
        right.name,
        right.datatype,
        tuple(right.shape),
        bytes(right.data),
    )


@pytest.mark.parametrize("rows", [1, 100, 100_000])
def test_a_response(ends: Ends, rows: int) -> None:
    sent = tensors(rows)
    message = ends.through(pack_answer(7, ModelResponse(sent, {"a": 1, "b": "x", "c": True, "d": 0.5}), False))
    assert (message.kind, message.number, message.is_final) == (ANSWER, 7, False)
    answer = message.answer
    assert isinstance(answer, ModelResponse)
    assert dict(answer.parameters) == {"a": 1, "b": "x", "c": True, "d": 0.5}
    assert all(same(got, was) for got, was in zip(answer.outputs, sent, strict=True))
    # They are the reader's own.
    answer.outputs[0].numpy()[:] = 1.0
    assert (answer.outputs[0].numpy() == 1.0).all()
    assert same(answer.outputs[1], sent[1])


def test_large_tensors_leave_no_descriptors(ends: Ends) -> None:
    before = open_descriptors()
    for _ in range(5):
        message = ends.through(pack_answer(1, ModelResponse(tensors(50_000)), True))
        assert message.answer is not None
        del message
    assert open_descriptors() <= before


def test_an_error_an_end_and_a_cancellation(ends: Ends) -> None:
    message = ends.through(pack_answer(1, ServeError(StatusCode.NOT_FOUND, "x" * 100_000), True))
    assert isinstance(message.answer, ServeError)
    assert message.answer.code is StatusCode.NOT_FOUND
    assert len(message.answer.text) == 8192
    assert ends.through(pack_answer(2, None, True)) == Message(END, 2, True)
    assert ends.through(pack_cancelled(3)) == Message(CANCELLED, 3, True)


def test_a_call(ends: Ends) -> None:
    call = ModelCall("m", tensors(2), ("A", "B"), 3, "id", "correlation", 1, 2, 5000, {"k": "v"})
    message = ends.through(pack_call(9, call))
    assert (message.kind, message.number) == (CALL, 9)
    got = message.call
    assert got is not None
    assert all(same(left, right) for left, right in zip(got.inputs, call.inputs, strict=True))
    assert (got.model_name, got.requested_outputs, got.model_version, got.id) == ("m", ("A", "B"), 3, "id")
    assert (got.correlation_id, got.flags, got.priority, got.timeout_microseconds) == ("correlation", 1, 2, 5000)
    assert got.parameters == {"k": "v"}


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {LONGEST_JSON} can be sent"):
        pack_answer(1, ModelResponse([], {"k": "x" * MAXIMUM_DATAGRAM}), True)
    tensor = tensors(2)[0]
    with pytest.raises(ValueError, match=r"tensor 'numbers' of shape \[2, 4\] needs 32 bytes, got 24"):
        pack_answer(1, ModelResponse([Tensor("numbers", tensor.datatype, (2, 4), tensor.data)]), True)


def test_the_end_of_the_other_side(ends: Ends) -> None:
    with pytest.raises(BlockingIOError):
        ends.reader.read(socket.MSG_DONTWAIT)
    ends.here.close()
    with pytest.raises(EOFError):
        ends.reader.read(socket.MSG_DONTWAIT)


@pytest.mark.parametrize("fault", ["none", "short", "unwritten", "unsealed", "no_memory"])
def test_memory_that_cannot_be_trusted_is_refused(ends: Ends, fault: str) -> None:
    before = open_descriptors()
    good = pack_answer(1, ModelResponse([tensor_from_numpy("x", np.zeros(INLINE_BYTES, np.float32))]), True)
    if fault == "no_memory":
        descriptor = os.open("/dev/null", os.O_RDWR)
    else:
        descriptor = os.memfd_create("x", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 100 if fault == "short" else 4 * INLINE_BYTES)
        if fault != "unwritten":
            os.pwrite(descriptor, bytes(os.fstat(descriptor).st_size), 0)
        if fault != "unsealed":
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    good.close()
    parcel = Parcel(good.data, descriptor)
    if fault == "none":
        assert ends.through(parcel).answer is not None
    else:
        with pytest.raises(ValueError, match=r"tensors of 131072 bytes in memory of|cannot be read"):
            ends.through(parcel)
    assert open_descriptors() <= before


def test_nonsense_raises_nothing_else(ends: Ends) -> None:
    generator = random.Random(0)
    answers: list[Answer] = [ModelResponse(tensors(2), {"k": 1}), ServeError(StatusCode.INTERNAL, "t")]
    good = [pack_answer(1, answer, True).data for answer in answers]
    good.append(pack_call(1, ModelCall("m", tensors(1), ("A",))).data)
    for _ in range(3000):
        data = bytearray(generator.choice(good))
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        data = data[: generator.randint(1, len(data))]
        ends.here.send(data)
        try:
            ends.reader.read(socket.MSG_DONTWAIT)
        except ValueError:
            continue


def test_an_unknown_kind_is_refused(ends: Ends) -> None:
    ends.here.send(HEADER.pack(77, True, 1) + pack_tail((0,), b""))
    with pytest.raises(ValueError, match="a message of kind 77"):
        ends.reader.read()
