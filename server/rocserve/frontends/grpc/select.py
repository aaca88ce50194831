"""Which transport serves: the reactor where the installed grpcio is known to carry it, otherwise grpc.aio."""

from __future__ import annotations

import logging
import re
import time

import grpc

from rocserve.core.request_memory import RequestMemory
from rocserve.frontends.grpc.aio import AioTransport
from rocserve.frontends.grpc.dense_traffic import Companion
from rocserve.frontends.grpc.transport import Routes, Transport, TransportOptions, UnaryCall, UnaryRoute

FIRST_TESTED_GRPCIO = (1, 62)
FIRST_UNTESTED_GRPCIO = (1, 90)

SELF_CHECK_METHOD = "/rocserve.SelfCheck/Echo"
SELF_CHECK_SECONDS = 5.0


def create_transport(
    kind: str,
    options: TransportOptions,
    routes: Routes,
    log: logging.Logger,
    companion: Companion | None = None,
    memory: RequestMemory | None = None,
) -> Transport:
    """A transport that has not been started.

    Args:
        kind: "reactor", "aio", or "auto" for the reactor unless it does not suit the installed grpcio.
        companion: the thread whose work the reactor's may do as well.
        memory: what answers that clients do not read count against; None = one of its own.

    Raises:
        ValueError: there is no such kind.
        RuntimeError: the reactor was asked for by name and does not work here.
    """
    if kind not in ("auto", "reactor", "aio"):
        raise ValueError(f"the gRPC transport must be one of auto, reactor, aio; got '{kind}'")
    if kind == "aio":
        return AioTransport(options, routes, log, memory)
    fault = untested_version(grpc.__version__) or reactor_fault(log)
    if fault:
        if kind == "reactor":
            raise RuntimeError(f"the reactor transport cannot be used: {fault}; choose the transport aio or auto")
        log.warning("gRPC is served by grpc.aio, which is slower than the reactor: %s", fault)
        return AioTransport(options, routes, log, memory)
    from rocserve.frontends.grpc.reactor import ReactorTransport

    return ReactorTransport(options, routes, log, companion, memory)


def untested_version(version: str) -> str:
    """Why the reactor should not be tried on this version of grpcio; empty = it may."""
    parts = re.match(r"(\d+)\.(\d+)", version)
    if parts is None:
        return f"grpcio's version '{version}' cannot be read"
    if FIRST_TESTED_GRPCIO <= (int(parts[1]), int(parts[2])) < FIRST_UNTESTED_GRPCIO:
        return ""
    tested = f"{FIRST_TESTED_GRPCIO[0]}.{FIRST_TESTED_GRPCIO[1]} up to {FIRST_UNTESTED_GRPCIO[0]}"
    return f"grpcio {version} is outside the tested range, {tested}.{FIRST_UNTESTED_GRPCIO[1] - 1}"


def reactor_fault(log: logging.Logger) -> str:
    """What goes wrong when the reactor answers a call on a port of its own; empty = nothing."""
    try:
        # Imported here because a grpcio without the private names fails at the import.
        from rocserve.frontends.grpc.reactor import ReactorTransport

        options = TransportOptions(address="127.0.0.1", port=0)
        transport = ReactorTransport(options, {SELF_CHECK_METHOD: UnaryRoute(_check_call)}, log)
        port = transport.start()
        try:
            _round_trip(port)
        finally:
            transport.stop(0)
    except Exception as error:
        return f"its self-check failed with {type(error).__name__}: {error}"
    return ""


def _check_call(call: UnaryCall) -> None:
    """Answers with the message, once every part of a call that the service uses has been touched."""
    deadline = call.deadline
    # The client rounds its time-out up; a second is far more than that.
    if deadline is None or not 0 < deadline - time.monotonic() < SELF_CHECK_SECONDS + 1:
        raise RuntimeError(f"a call's deadline is {deadline}")
    if ("self-check", "1") not in [tuple(entry) for entry in call.metadata] or not call.peer:
        raise RuntimeError("a call's metadata or peer cannot be read")
    call.watch_cancellation(lambda: None)
    call.reply(call.message)


def _round_trip(port: int) -> None:
    options = (("grpc.enable_http_proxy", 0), ("grpc.use_local_subchannel_pool", 1))
    with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
        echo = channel.unary_unary(SELF_CHECK_METHOD)
        answer = echo(b"self-check", timeout=SELF_CHECK_SECONDS, metadata=(("self-check", "1"),))
    if answer != b"self-check":
        raise RuntimeError(f"the answer to a call was {answer!r}")
