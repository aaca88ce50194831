"""Cases to measure: a model, a request with its right answer, a load, and the target ratios."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype, serialize_byte_tensor

from benchmarks.http_request import HttpRequest, http_request
from benchmarks.models import ADD_SUB_LENGTH, IDENTITY_LENGTH
from benchmarks.probe import Outputs
from benchmarks.shared_region import SharedRegion

SEED = 20_24


class Quantity(enum.Enum):
    """The quantity of a ratio. More than 1 is better for rocserve in each."""

    RATE = "rate"
    """rocserve's rate over the peer's."""
    P50 = "p50"
    """The peer's median latency over rocserve's."""
    CPU = "cpu"
    """The peer's CPU time a request over rocserve's."""


@dataclass(frozen=True, slots=True)
class Target:
    """A ratio that rocserve must hold."""

    quantity: Quantity
    peer: str
    at_least: float


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the comparison."""

    group: str
    """The name for `--only`."""
    title: str
    model: str
    dynamic_batching: bool | None
    """What the model's effective configuration must say on each server; None: the servers may differ."""
    unit: str
    units_per_request: float
    connections: int
    streams: int
    message: bytes
    """A serialised ModelInferRequest; empty if the request goes over HTTP."""
    check: Callable[[Outputs], None]
    """Raises AssertionError or KeyError if the outputs are not those of the message."""
    targets: tuple[Target, ...] = ()
    region: SharedRegion | None = None
    """The region that the message names. It exists while the case is measured, and each contender registers it."""
    http: HttpRequest | None = None
    """The request, if it goes over HTTP instead of the message."""
    load_threads: int = 1
    """Threads of the load generator, if one cannot keep the server busy."""


def infer_request(model: str, inputs: Mapping[str, NDArray[numpy.generic]]) -> bytes:
    """A ModelInferRequest with raw contents; an array of bytes objects becomes BYTES."""
    request = service_pb2.ModelInferRequest(model_name=model)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
        raw = serialize_byte_tensor(array).item() if array.dtype == numpy.object_ else array.tobytes()
        request.raw_input_contents.append(raw)
    return bytes(request.SerializeToString())


ADD_SUB_TARGETS = {
    ("add_sub", 1): (Target(Quantity.P50, "triton", 1.0),),
    ("add_sub", 32): (Target(Quantity.RATE, "triton", 1.4),),
    ("add_sub_batched", 32): (Target(Quantity.RATE, "triton", 1.1),),
}


def expect_outputs(*arrays: NDArray[numpy.generic]) -> Callable[[Outputs], None]:
    """Make a check that OUTPUT0, OUTPUT1, ... are these."""

    def check(outputs: Outputs) -> None:
        for index, array in enumerate(arrays):
            numpy.testing.assert_array_equal(outputs[f"OUTPUT{index}"], array)

    return check


def add_sub_cases(group: str, model_prefix: str = "") -> list[Case]:
    """16 INT32 at 1, 8 and 32 streams of one connection and on 32 connections, without and with dynamic batching."""
    numbers = numpy.random.default_rng(SEED).integers(-1000, 1000, (2, 1, ADD_SUB_LENGTH), dtype=numpy.int32)
    left, right = numbers

    return [
        Case(
            group=group,
            title=f"{model_prefix}add_sub, {'dynamic batching' if batching else 'no batching'}, "
            + (f"concurrency {streams}" if connections == 1 else f"{connections} connections"),
            model=model_prefix + model,
            dynamic_batching=batching,
            unit="requests/s",
            units_per_request=1.0,
            connections=connections,
            streams=streams,
            message=infer_request(model_prefix + model, {"INPUT0": left, "INPUT1": right}),
            check=expect_outputs(left + right, left - right),
            targets=ADD_SUB_TARGETS.get((model_prefix + model, connections * streams), ()),
        )
        for model, batching in (("add_sub", False), ("add_sub_batched", True))
        for connections, streams in ((1, 1), (1, 8), (1, 32), (32, 1))
    ]


def identity_cases() -> list[Case]:
    """4 MiB of FP32 on 1 and 8 connections, one stream each."""
    numbers = numpy.random.default_rng(SEED).random(IDENTITY_LENGTH, dtype=numpy.float32)

    return [
        Case(
            group="identity",
            title=f"identity of 4 MiB FP32, {connections} connection{'s' if connections > 1 else ''}",
            model="identity",
            dynamic_batching=False,
            unit="MB/s each way",
            units_per_request=numbers.nbytes / 1e6,
            connections=connections,
            streams=1,
            message=infer_request("identity", {"INPUT0": numbers}),
            check=expect_outputs(numbers),
            targets=(Target(Quantity.RATE, "triton", at_least),),
        )
        for connections, at_least in ((1, 1.1), (8, 1.3))
    ]


def http_cases() -> list[Case]:
    """add_sub on 1 and 32 connections and the identity on 1, over HTTP/1.1."""
    generator = numpy.random.default_rng(SEED)
    left, right = generator.integers(-1000, 1000, (2, 1, ADD_SUB_LENGTH), dtype=numpy.int32)
    numbers = generator.random(IDENTITY_LENGTH, dtype=numpy.float32)

    small = [
        Case(
            group="http",
            title=f"http_add_sub over HTTP, concurrency {connections}",
            model="http_add_sub",
            dynamic_batching=False,
            unit="requests/s",
            units_per_request=1.0,
            connections=connections,
            streams=1,
            message=b"",
            check=expect_outputs(left + right, left - right),
            http=http_request("http_add_sub", {"INPUT0": left, "INPUT1": right}),
        )
        for connections in (1, 32)
    ]
    large = Case(
        group="http",
        title="identity of 4 MiB FP32 over HTTP, 1 connection",
        model="http_identity",
        dynamic_batching=False,
        unit="MB/s each way",
        units_per_request=numbers.nbytes / 1e6,
        connections=1,
        streams=1,
        message=b"",
        check=expect_outputs(numbers),
        http=http_request("http_identity", {"INPUT0": numbers}),
    )
    return [*small, large]


def shared_memory_cases() -> list[Case]:
    """The same tensor through shared memory: the request only names it."""
    region = SharedRegion("identity", numpy.random.default_rng(SEED).random(IDENTITY_LENGTH, dtype=numpy.float32))

    def check(outputs: Outputs) -> None:
        if outputs["OUTPUT0"].size:
            raise AssertionError("the output came in the answer")
        numpy.testing.assert_array_equal(region.take_output(), region.tensor)

    return [
        Case(
            group="shared_memory",
            title=f"identity of 4 MiB FP32 through shared memory, concurrency {streams}",
            model="shared_identity",
            dynamic_batching=False,
            unit="MB/s each way",
            units_per_request=region.tensor.nbytes / 1e6,
            connections=1,
            streams=streams,
            message=region.request("shared_identity", "INPUT0", "OUTPUT0"),
            check=check,
            targets=(Target(Quantity.RATE, "triton", at_least),),
            region=region,
        )
        for streams, at_least in ((1, 1.3), (4, 1.5))
    ]
