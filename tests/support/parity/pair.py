"""Runs Triton (or its recorded answers) and rocserve on the same folders, in explicit control mode."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message
from tritonclient.grpc import service_pb2 as pb

from benchmarks.server_process import ServerFailed, free_port, http_flags
from benchmarks.triton_peer import TritonPeer
from support.parity.contrast import contrast
from support.parity.counting import Comparisons
from support.parity.differences import Difference
from support.parity.exchange import GRPC_SERVICE, Exchange, Outcome, digest_of
from support.parity.recorded import RecordedTriton, folder_digest
from support.server import RocserveProcess
from support.waiting import PATIENCE_SECONDS

_RESPONSES: dict[str, type[Message]] = {
    f"{GRPC_SERVICE}{method.name}": getattr(pb, method.output_type.name)
    for method in pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
}
_TIMES = frozenset({"ns", "last_inference", "total_ns"})


def unary_answer(path: str, data: bytes) -> Any:
    """The response of the method with this path; bytes if Triton does not have the method."""
    response = _RESPONSES.get(path)
    return data if response is None else plain_message(response.FromString(data))


def stream_answer(data: bytes) -> Any:
    return plain_message(pb.ModelStreamInferResponse.FromString(data))


def plain_message(message: Message) -> Any:
    """Dictionaries and lists with the names of the .proto file; tensors as bytes."""
    if isinstance(message, pb.ModelInferResponse):
        plain = json_format.MessageToDict(message, preserving_proto_field_name=True)
        if message.raw_output_contents:
            plain["raw_output_contents"] = list(message.raw_output_contents)
        return plain
    if isinstance(message, pb.ModelStreamInferResponse):
        found: dict[str, Any] = {"infer_response": plain_message(message.infer_response)}
        if message.error_message:
            found["error_message"] = message.error_message
        return found
    return plain_values(json_format.MessageToDict(message, preserving_proto_field_name=True))


def plain_values(value: Any) -> Any:
    """JSON with each time as 1 (above zero) or 0, and the rows of lists of models sorted: Triton's order is
    undefined."""
    if isinstance(value, dict):
        return {key: int(int(entry) > 0) if key in _TIMES else _ordered(key, entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [plain_values(entry) for entry in value]
    return value


def _ordered(key: str, value: Any) -> Any:
    plain = plain_values(value)
    return sorted(plain, key=repr) if key in ("models", "model_stats") else plain


ANSWER_SECONDS = PATIENCE_SECONDS
_MESSAGE_BYTES = 1 << 28
_COMPARED_HEADERS = ("content-type", "content-encoding", "inference-header-content-length")
_GONE = ("failed to connect to all addresses", "Socket closed", "Connection reset", "Deadline Exceeded")
_OPTIONS = [
    ("grpc.max_receive_message_length", _MESSAGE_BYTES),
    ("grpc.max_send_message_length", _MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
]


class Side:
    """A running server and its ports; a context manager that closes the connection. Raises AssertionError if the server
    ends, or does not answer in time."""

    def __init__(self, name: str, grpc_address: str, http_port: int) -> None:
        self.name = name
        self.http_port = http_port
        self._channel = grpc.insecure_channel(grpc_address, options=_OPTIONS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()

    def take(self, exchange: Exchange) -> list[Outcome]:
        return exchange.ask(self)

    def unary(self, path: str, message: bytes) -> Outcome:
        call = self._channel.unary_unary(path, request_serializer=None, response_deserializer=None)
        try:
            data = call(message, timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return self._refusal(error)
        return Outcome("OK", answer=unary_answer(path, data))

    def stream(self, messages: Iterable[bytes]) -> Outcome:
        call = self._channel.stream_stream(
            f"{GRPC_SERVICE}ModelStreamInfer", request_serializer=None, response_deserializer=None
        )
        responses = call(iter(messages), timeout=ANSWER_SECONDS)
        answers: list[Any] = []
        try:
            for data in responses:
                answers.append(stream_answer(data))
        except grpc.RpcError as error:
            return replace(self._refusal(error), answer=answers)
        return Outcome("OK", answer=answers)

    def _refusal(self, error: Any) -> Outcome:
        """An error's code and text. Some of Triton's texts end in line breaks and spaces."""
        text = (error.details() or "").rstrip()
        if any(sign in text for sign in _GONE):
            raise AssertionError(f"{self.name} gives no answer: {text}")
        return Outcome(error.code().name, text)

    def http(self, method: str, path: str, body: bytes, headers: Mapping[str, str]) -> Outcome:
        """The answer over HTTP: server-sent events as one text; JSON and binary parts as values."""
        connection = http.client.HTTPConnection("127.0.0.1", self.http_port, timeout=ANSWER_SECONDS)
        try:
            connection.request(method, path, body or None, dict(headers))
            response = connection.getresponse()
            data = response.read()
            found = {name.lower(): value for name, value in response.getheaders()}
        except (OSError, http.client.HTTPException) as error:
            raise AssertionError(f"{self.name} gives no answer: {error!r}") from None
        finally:
            connection.close()
        kept = {name: found[name] for name in _COMPARED_HEADERS if name in found}
        return _http_outcome(str(response.status), kept, data)


def _http_outcome(status: str, headers: Mapping[str, str], data: bytes) -> Outcome:
    encoding = headers.get("content-encoding")
    if encoding == "gzip":
        data = gzip.decompress(data)
    elif encoding == "deflate":
        data = zlib.decompress(data)
    length = int(headers.get("inference-header-content-length", len(data)))
    text = data[:length].decode(errors="replace")
    answer: Any = text
    with suppress(ValueError):
        answer = plain_values(json.loads(text))
    # The length of the JSON depends on its spaces, which mean nothing.
    shown = {name: value for name, value in headers.items() if name != "inference-header-content-length"}
    return Outcome(status, answer={"headers": shown, "body": answer, "binary": data[length:]})


TRITON_FLAGS = (
    "--model-control-mode=explicit",
    "--exit-on-error=false",
    # Processes that its models leave behind are ended with it.
    "--exit-timeout-secs=1",
    "--allow-metrics=false",
)
ROCSERVE_FLAGS = (
    "--model-control-mode=explicit",
    "--allow-client-shm=true",
    # Triton's default.
    "--backend-config=default-max-batch-size=4",
    # Triton allows these calls to everybody.
    "--allow-remote-files=true",
    "--allow-remote-models=true",
)


_HINT = re.compile(
    r"(; ((its inputs|its outputs|served|the datatypes) are: |'[^']*' has no version folder )"
    r"| The model has no input ').*$",
    re.DOTALL,
)
"""What rocserve appends to Triton's texts: the known names after an unknown name, the repair after a misplaced file."""

Answers = tuple[Sequence[Outcome] | None, Sequence[Outcome]]
"""Triton's outcomes (None if it was not asked), and rocserve's."""
_ASKED_AT_ONCE = 4
_TRIES = 10
"""Of a timed exchange with rocserve, which may be late on a busy machine."""
_TRITON_STARTS = 3
"""Triton crashes at times while it loads its models. A Triton that never starts is a failure of the test."""


@dataclass(frozen=True, slots=True)
class Servers:
    """The running servers, and their files."""

    triton: Side | None
    """None: the recorded outcomes replace it."""
    rocserve: Side
    folder: Path
    """The folder of the model repositories."""
    scratch: Path
    """A repository of both servers, into which tests write models."""
    digest: str
    """A digest of the models and flags with which both were started."""


class Pair:
    """Compares Triton (running or recorded) with rocserve for one test module."""

    def __init__(
        self, servers: Servers, recorded: RecordedTriton, comparisons: Comparisons, differences: Sequence[Difference]
    ) -> None:
        self.triton = servers.triton or recorded
        self.rocserve = servers.rocserve
        self.scratch = servers.scratch
        self._recorded = recorded
        self._comparisons = comparisons
        self._differences = differences
        self._ahead: dict[str, Future[Answers]] = {}
        recorded.depend_on(servers.digest)

    def dropped(self, model: Path) -> None:
        """Record that a model's folder has been written into `scratch`. Called before the first exchange."""
        self._recorded.depend_on(folder_digest(model))

    @contextmanager
    def asking_ahead(self, *groups: Sequence[Exchange]) -> Iterator[None]:
        """A context in which groups of independent exchanges run concurrently, before `compare` asks for them: Triton
        is slow to start a model's process. The exchanges of one group run in order."""
        self._ahead = {exchange.name: Future() for group in groups for exchange in group}
        answers = [[(exchange, self._ahead[exchange.name]) for exchange in group] for group in groups]
        with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
            for group in answers:
                pool.submit(self._ask_in_order, group)
            try:
                yield
            finally:
                for _, answer in chain.from_iterable(answers):
                    answer.cancel()

    def _ask_in_order(self, group: Sequence[tuple[Exchange, Future[Answers]]]) -> None:
        for exchange, answer in group:
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(self._ask(exchange))
                except BaseException as error:
                    answer.set_exception(error)

    def _known(self, exchange: Exchange) -> list[Difference]:
        return [entry for entry in self._differences if exchange.name in entry.exchanges]

    def _ask(self, exchange: Exchange) -> Answers:
        left_out = any(entry.triton is None for entry in self._known(exchange))
        if left_out:
            return None, self.rocserve.take(exchange)
        if not exchange.at_once:
            return self._of_triton(exchange), self.rocserve.take(exchange)
        with ThreadPoolExecutor(1) as beside:
            expected = beside.submit(self._of_triton, exchange)
            found = self.rocserve.take(exchange)
            return expected.result(), found

    def _of_triton(self, exchange: Exchange) -> Sequence[Outcome]:
        """Triton's outcomes, or the recorded ones after it has failed to answer: concurrent loads crash it at times."""
        if not self._comparisons.triton_failed_at:
            try:
                return self.triton.take(exchange)
            except AssertionError:
                if self._recorded.is_recording:
                    raise
                self._comparisons.triton_failed_at = exchange.name
        return self._recorded.take(exchange)

    def _confirmed(self, exchange: Exchange, outcomes: Sequence[Outcome]) -> Sequence[Outcome]:
        """Triton's outcomes, which must equal the recorded ones. The recorded outcomes replace those of a Triton that
        was late."""
        try:
            self._recorded.confirm(exchange, outcomes)
        except AssertionError:
            if self._recorded.is_recording or not exchange.timed:
                raise
            self._comparisons.late.append(exchange.name)
            return self._recorded.take(exchange)
        return outcomes

    def compare(self, exchange: Exchange, configuration: str = "", anew: Sequence[Exchange] = ()) -> None:
        """Run the exchange's steps on both servers. Raises AssertionError if outcomes differ without a known
        difference. `configuration`: the name of the model configuration that the exchange tests, for counting.
        `anew`: exchanges after which a timed exchange can be repeated."""
        known = self._known(exchange)
        ahead = self._ahead.pop(exchange.name, None)
        expected, found = self._ask(exchange) if ahead is None else ahead.result()
        if expected is not None:
            expected = self._confirmed(exchange, expected)
        for _ in range(_TRIES - 1 if exchange.timed else 0):
            with suppress(AssertionError):
                shown = self._compared(exchange, expected, found, known)
                break
            for other in anew:
                self.rocserve.take(other)
            found = self.rocserve.take(exchange)
        else:
            shown = self._compared(exchange, expected, found, known)
        for entry in known:
            assert entry in shown, f"this difference has gone: {entry}"
            self._comparisons.count_difference(entry)
        if configuration:
            self._comparisons.configurations.add(configuration)

    def _compared(
        self,
        exchange: Exchange,
        expected: Sequence[Outcome] | None,
        found: Sequence[Outcome],
        known: Sequence[Difference],
    ) -> list[Difference]:
        """Compare the outcomes of each step; return the known differences between them."""
        shown: list[Difference] = []
        for index, step in enumerate(exchange.steps):
            theirs = None if expected is None else expected[index]
            digest = step.digest()
            if digest:
                self._comparisons.requests.add(digest)
                if (found[index] if theirs is None else theirs).is_bad:
                    self._comparisons.bad_requests.add(digest)
            shown += _explained(exchange.name, index, theirs, found[index], known)
        return shown


def _without_hints(outcome: Outcome) -> Outcome:
    return replace(outcome, text=_HINT.sub("", outcome.text), answer=_answer_without_hints(outcome.answer))


def _answer_without_hints(value: Any) -> Any:
    if isinstance(value, str):
        return _HINT.sub("", value)
    if isinstance(value, dict):
        return {key: _answer_without_hints(entry) for key, entry in value.items()}
    return [_answer_without_hints(entry) for entry in value] if isinstance(value, list) else value


def _called_json(outcome: Outcome | None) -> Outcome | None:
    """Triton's outcome with the content type that rocserve gives to errors over HTTP. Triton calls some text/plain."""
    if outcome is None or not outcome.status.isdecimal() or int(outcome.status) < 400 or not outcome.answer["body"]:
        return outcome
    headers = {**outcome.answer["headers"], "content-type": "application/json"}
    return replace(outcome, answer={**outcome.answer, "headers": headers})


def _explained(
    name: str, index: int, triton: Outcome | None, rocserve: Outcome, known: Sequence[Difference]
) -> list[Difference]:
    """The known differences that explain a step's outcomes; none if they are equal."""
    triton = _called_json(triton)
    if triton in (rocserve, _without_hints(rocserve)):
        return []
    fitting = [entry for entry in known if entry.explains(triton, rocserve)]
    # If Triton is not asked, the steps that lead to the one in question cannot be compared.
    assert fitting or triton is None, f"{name}, step {index}:\n{contrast(triton, rocserve)}"
    return fitting


Paired = Callable[[Servers, Sequence[Difference]], AbstractContextManager[Pair]]
"""Makes a test module's pair on running servers, with the known differences."""


@contextmanager
def running_servers(
    peer: TritonPeer | None, repositories: Sequence[Path], folder: Path, both: Sequence[str] = ()
) -> Iterator[Servers]:
    """A context with both servers, ready. `peer`: None = rocserve runs alone. `repositories`: the model repositories of
    both, in `folder`; the last one is `Servers.scratch`. `folder`: also for the logs. `both`: flags of both."""
    flags = [*TRITON_FLAGS, *both]
    digest = digest_of(*(part.encode() for part in (*flags, *map(folder_digest, repositories))))
    http_port = free_port()

    def filled(server: str, flags: Sequence[str]) -> list[str]:
        return [flag.replace("<folder>", str(folder)).replace("<server>", server) for flag in flags]

    with ExitStack() as running:
        ours = [*ROCSERVE_FLAGS, *http_flags(http_port), *filled("rocserve", both)]
        rocserve = running.enter_context(RocserveProcess(repositories, *ours, log=folder / "rocserve.log"))
        # Entering Triton's context waits until it is ready; rocserve starts meanwhile.
        triton = peer and running.enter_context(_running_triton(peer, repositories, folder, filled("triton", flags)))
        rocserve.wait_until_ready()
        side = running.enter_context(Side("rocserve", rocserve.address, http_port))
        yield Servers(triton, side, folder, repositories[-1], digest)


@contextmanager
def _running_triton(
    peer: TritonPeer, repositories: Sequence[Path], folder: Path, flags: Sequence[str]
) -> Iterator[Side]:
    port, http_port = free_port(), free_port()
    further = [f"--model-repository={repository}" for repository in repositories[1:]]
    server = peer.server(
        "triton", repositories[0], port, folder / "triton.log", (*further, *flags, *http_flags(http_port))
    )
    with ExitStack() as running:
        for _ in range(_TRITON_STARTS - 1):
            with suppress(ServerFailed):
                running.enter_context(server)
                break
        else:
            running.enter_context(server)
        yield running.enter_context(Side("triton", server.address, http_port))
