"""Fuzzes gRPC: mutated messages of all methods. The server answers each with an error text, none with an internal
failure."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from google.protobuf.message import Message
from support.waiting import PATIENCE_SECONDS
from tritonclient.grpc import model_config_pb2 as configs
from tritonclient.grpc import service_pb2 as messages

from campaign import models
from campaign.action import Kind
from campaign.requests import MOST_BYTES, call, channel, infer_message
from campaign.stage import Stage

MESSAGES_EACH = 60
CHANGES = (0, 0, 1, 1, 2, 6)
"""Few changes, so that most messages are parsed far."""
INNER = ("UNKNOWN", "INTERNAL")
"""Statuses of failures that the server did not foresee."""
INNER_BY_TRITON = "shared memory region|failed to register|shared memory size specified|failed to load"
"""Texts of errors that Triton, too, reports with INTERNAL."""
NUMBERS = (0, 1, -1, 127, 128, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
TEXTS = ("", "..", "/", "\x00", "a" * 300, "INPUT0", "sequence_id", "binary_data_output", "shared_memory_region")


def _sequence() -> Message:
    request = infer_message(models.FUZZED)
    request.parameters["sequence_id"].int64_param = 7
    request.parameters["priority"].uint64_param = 1
    request.inputs[0].parameters["shared_memory_region"].string_param = "fuzzed"
    request.inputs[0].parameters["shared_memory_byte_size"].int64_param = 8
    del request.raw_input_contents[:]
    return request


def _contents() -> Message:
    request = infer_message(models.FUZZED)
    request.inputs[0].contents.fp32_contents.extend([1.0, 2.0])
    request.outputs.add(name="Y").parameters["classification"].int64_param = 2
    del request.raw_input_contents[:]
    return request


TEMPLATES: dict[str, tuple[Callable[[], Message], ...]] = {
    "ServerLive": (messages.ServerLiveRequest,),
    "ServerReady": (messages.ServerReadyRequest,),
    "ServerMetadata": (messages.ServerMetadataRequest,),
    "ModelReady": (lambda: messages.ModelReadyRequest(name=models.FUZZED, version="1"),),
    "ModelMetadata": (lambda: messages.ModelMetadataRequest(name=models.FUZZED, version="1"),),
    "ModelConfig": (lambda: messages.ModelConfigRequest(name=models.FUZZED, version="1"),),
    "ModelStatistics": (lambda: messages.ModelStatisticsRequest(name=models.FUZZED, version="1"),),
    "RepositoryIndex": (lambda: messages.RepositoryIndexRequest(ready=True),),
    "ModelInfer": (lambda: infer_message(models.FUZZED, 3), _sequence, _contents),
    "SystemSharedMemoryStatus": (lambda: messages.SystemSharedMemoryStatusRequest(name="fuzzed"),),
    "SystemSharedMemoryRegister": (
        lambda: messages.SystemSharedMemoryRegisterRequest(name="fuzzed", key="/fuzzed", offset=8, byte_size=64),
    ),
    "SystemSharedMemoryUnregister": (lambda: messages.SystemSharedMemoryUnregisterRequest(name="fuzzed"),),
    "CudaSharedMemoryStatus": (lambda: messages.CudaSharedMemoryStatusRequest(name="fuzzed"),),
    "CudaSharedMemoryRegister": (
        lambda: messages.CudaSharedMemoryRegisterRequest(name="fuzzed", raw_handle=bytes(64), byte_size=64),
    ),
    "TraceSetting": (lambda: messages.TraceSettingRequest(model_name=models.FUZZED),),
    "LogSettings": (messages.LogSettingsRequest,),
    "RepositoryModelLoad": (lambda: messages.RepositoryModelLoadRequest(model_name="no_such_model"),),
    "RepositoryModelUnload": (lambda: messages.RepositoryModelUnloadRequest(model_name="no_such_model"),),
    "WorkerLoad": (lambda: messages.ModelReadyRequest(name="no_such_worker"),),
    "WorkerUnload": (lambda: messages.ModelReadyRequest(name="no_such_worker"),),
    "ModelLoad": (lambda: messages.ModelReadyRequest(name="no_such_model"),),
    "ModelList": (messages.ServerLiveRequest,),
    "HasHardware": (lambda: messages.ModelReadyRequest(name="GPU"),),
    "NoSuchMethod": (lambda: configs.ModelConfig(name="x"),),
}


def mutated(data: bytes, random: random.Random) -> bytes:
    """A message with bytes changed, removed, doubled or inserted, or unchanged."""
    changed = bytearray(data)
    for _ in range(random.choice(CHANGES)):
        place = random.randint(0, len(changed))
        how = random.randrange(5)
        if how == 0 and place < len(changed):
            changed[place] ^= 1 << random.randrange(8)
        elif how == 1:
            del changed[place : place + random.randint(1, 8)]
        elif how == 2:
            changed[place:place] = random.randbytes(random.randint(1, 8))
        elif how == 3:
            changed[place:place] = changed[place : place + random.randint(1, 32)]
        else:
            changed[place:place] = _varint(random.choice(NUMBERS) & (2**64 - 1))
    return bytes(changed)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def spoilt(request: Message, random: random.Random) -> Message:
    """A valid message with a senseless value in one field; unchanged if the field is repeated or a message."""
    field = random.choice(request.DESCRIPTOR.fields) if request.DESCRIPTOR.fields else None
    if field is None or field.message_type is not None or field.is_repeated:
        return request
    if field.cpp_type == field.CPPTYPE_STRING:
        value = random.choice(TEXTS) if field.type == field.TYPE_STRING else random.randbytes(9)
        # Without a name the call would unregister all regions, the honest clients' too.
        if not (field.name == "name" and not value):
            setattr(request, field.name, value)
    elif field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
        top = 2**63 - 1 if field.cpp_type == field.CPPTYPE_INT64 else 2**64 - 1
        setattr(request, field.name, min(top, abs(random.choice(NUMBERS))))
    return request


def messages_of_all_methods(stage: Stage, random: random.Random) -> None:
    name = random.choice(list(stage.servers))
    server = stage.servers[name]
    stage.damage.unregistered()
    with channel(server.address) as opened:
        for _ in range(MESSAGES_EACH):
            method = random.choice(list(TEMPLATES))
            template = spoilt(random.choice(TEMPLATES[method])(), random)
            request = mutated(template.SerializeToString(), random)
            status, text, answer = call(opened, method, request)
            judge(stage, f"{name} {method}", request, status, text, answer)
    stage.damage.unregistered()


def streams(stage: Stage, random: random.Random) -> None:
    """Send mutated requests among good ones on a stream: each is answered, or the stream ends with an error text."""
    with channel(stage.poll.address) as opened:
        method = opened.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        for _ in range(4):
            sent = [mutated(infer_message(models.FUZZED).SerializeToString(), random) for _ in range(12)]
            try:
                received = sum(len(answer) for answer in method(iter(sent), timeout=PATIENCE_SECONDS))
                stage.tally.count("fuzz: ModelStreamInfer", "OK")
                assert received < MOST_BYTES
            except Exception as error:
                code = error.code().name  # type: ignore[attr-defined]
                judge(stage, "poll ModelStreamInfer", b"".join(sent), code, error.details(), b"")  # type: ignore[attr-defined]


def judge(stage: Stage, where: str, request: bytes, status: str, text: str, answer: bytes) -> None:
    stage.tally.count(f"fuzz: {where.partition(' ')[2]}", status)
    stage.canaries.search(where, answer + text.encode())
    if status in INNER and not re.search(INNER_BY_TRITON, text):
        stage.findings.add("fuzz answered by a failure", f"{where}: {status} {text!r} to {request.hex()}")
    if status == "DEADLINE_EXCEEDED":
        stage.findings.add("fuzz not answered", f"{where}: {request.hex()}")
    if "Traceback" in text:
        stage.findings.add("traceback told", f"{where}: {text!r} to {request.hex()}")


KINDS = (Kind("fuzz-grpc.messages", messages_of_all_methods), Kind("fuzz-grpc.streams", streams, 2))
