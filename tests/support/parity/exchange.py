"""Requests to both servers and their outcomes, in a form that can be compared and printed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from google.protobuf.message import Message

GRPC_SERVICE = "/inference.GRPCInferenceService/"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A server's outcome of one step."""

    status: str
    """`OK` or the name of the gRPC code; the number over HTTP; `DONE` for a step without a request."""
    text: str = ""
    """The error's text."""
    answer: Any = None
    """Plain values: the message without fields that cannot be equal. A list of messages for a stream."""

    @property
    def is_bad(self) -> bool:
        """Whether the server refused the request, also by error_message in a stream."""
        if isinstance(self.answer, list):
            return any(isinstance(entry, dict) and entry.get("error_message") for entry in self.answer)
        return self.status not in ("OK", "200", "DONE")

    def __str__(self) -> str:
        answer = "" if self.answer is None else f" {self.answer}"
        return f"{self.status}: {self.text}{answer}"


class Asked(Protocol):
    name: str
    """`triton` or `rocserve`."""

    def unary(self, path: str, message: bytes) -> Outcome: ...
    def stream(self, messages: Iterable[bytes]) -> Outcome: ...
    def http(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Outcome: ...


class Step(Protocol):
    """One action on a server."""

    def digest(self) -> str:
        """A digest that is the same for equal requests; empty for a step without a request."""

    def ask(self, server: Asked) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class Call:
    """A unary RPC."""

    rpc: str
    """The name in Triton's service, or a whole path that begins with a slash."""
    message: Message | bytes = b""
    """Bytes are sent unchanged, so they need not be a valid message."""

    @property
    def path(self) -> str:
        return self.rpc if self.rpc.startswith("/") else GRPC_SERVICE + self.rpc

    def digest(self) -> str:
        return digest_of(self.path.encode(), serialised(self.message))

    def ask(self, server: Asked) -> Outcome:
        return server.unary(self.path, serialised(self.message))


@dataclass(frozen=True, slots=True)
class Stream:
    """A ModelStreamInfer call: sends all messages, then reads all responses."""

    messages: Sequence[Message | bytes]

    def digest(self) -> str:
        return digest_of(b"stream", *map(serialised, self.messages))

    def ask(self, server: Asked) -> Outcome:
        return server.stream([serialised(message) for message in self.messages])


@dataclass(frozen=True, slots=True)
class HttpCall:
    """A request of HTTP/1.1."""

    method: str
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        headers = repr(sorted(self.headers.items())).encode()
        return digest_of(self.method.encode(), self.path.encode(), self.body, headers)

    def ask(self, server: Asked) -> Outcome:
        return server.http(self.method, self.path, self.body, self.headers)


@dataclass(frozen=True, slots=True)
class Local:
    """An action without a request, such as making or reading a file or a shared memory region. Its results are
    compared."""

    action: Callable[[Asked], Any]

    def digest(self) -> str:
        return ""

    def ask(self, server: Asked) -> Outcome:
        return Outcome("DONE", answer=self.action(server))


@dataclass(frozen=True, slots=True)
class Exchange:
    """Steps that both servers get; each pair of outcomes must be equal."""

    name: str
    steps: Sequence[Step]
    ordered: bool = True
    """Whether the order of a response's outputs matters. Triton's order is undefined for ensembles."""
    at_once: bool = False
    """Whether both servers are asked simultaneously; else rocserve is asked after Triton has answered."""
    timed: bool = False
    """Whether the answers depend on when the requests arrive, or on when the server counts them: on a busy machine a
    server may be late."""
    about: str = ""
    """What a step without a request changes for the servers."""

    def digest(self) -> str:
        """A digest that is the same for equal exchanges."""
        steps = [f"{type(step).__name__} {step.digest()}" for step in self.steps]
        return digest_of(*(part.encode() for part in (*steps, str(self.ordered), self.about)))

    def ask(self, server: Asked) -> list[Outcome]:
        outcomes = [step.ask(server) for step in self.steps]
        return outcomes if self.ordered else [replace(entry, answer=sort_outputs(entry.answer)) for entry in outcomes]


def sort_outputs(answer: Any) -> Any:
    """A response with its outputs and their bytes ordered by name; other answers unchanged."""
    if not isinstance(answer, dict) or "raw_output_contents" not in answer:
        return answer
    pairs = zip(answer["outputs"], answer["raw_output_contents"], strict=True)
    outputs, contents = zip(*sorted(pairs, key=lambda pair: pair[0]["name"]), strict=True)
    return {**answer, "outputs": list(outputs), "raw_output_contents": list(contents)}


def serialised(message: Message | bytes) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString(deterministic=True)


def digest_of(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()
