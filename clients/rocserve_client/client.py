"""The blocking client."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Self, Unpack

import grpc

from rocserve.core.parameters import ParameterValue
from rocserve.protocol import model_config_pb2
from rocserve_client import calls
from rocserve_client.calls import Answer
from rocserve_client.connection import BaseClient, Headers, grpc_timeout
from rocserve_client.embedding import (
    REQUESTS_AT_ONCE,
    Embedding,
    TimeLeft,
    generated_name,
    makes_vectors,
    no_vectors,
)
from rocserve_client.errors import CLOSED, Cancelled, InvalidArgument, NotFound, RocserveError, error_from_grpc
from rocserve_client.messages import Inputs, OneInput, Outputs, RequestOptions
from rocserve_client.readiness import ReadinessWait
from rocserve_client.results import IndexEntry, InferResult, ModelMetadata, ModelStatistics, ServerMetadata
from rocserve_client.stream import Stream
from rocserve_client.tensors import Array


class Client(BaseClient):
    """Calls a server and waits for its answers. Safe on any thread.

    Every call takes `timeout` (seconds after which client and server give up; None = never) and `headers`, and raises a
    RocserveError if it fails.
    """

    _grpc = grpc

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection and all calls on it."""
        self._channel.close()

    def infer(
        self,
        model: str,
        inputs: Inputs | OneInput,
        outputs: Outputs = None,
        *,
        cast: bool = False,
        timeout: float | None = None,
        headers: Headers = None,
        **options: Unpack[RequestOptions],
    ) -> InferResult:
        """Run a model. Without `outputs`, the model returns all of its outputs. `options`: see RequestOptions.

        If the model has one input, `inputs` may be its array alone. `cast`: convert the inputs, which may then also be
        lists, to the model's datatypes. In both cases one more call asks the server for the model's inputs.
        """
        self._connection.check_request(options)
        if cast or not isinstance(inputs, Mapping):
            version = options.get("version", "")
            metadata = self.model_metadata(model, version, timeout=timeout, headers=headers)
            inputs = calls.described_inputs(metadata, inputs, cast)
        try:
            return self._call(calls.infer(model, inputs, outputs, options), timeout, headers)
        except InvalidArgument as error:
            raise calls.with_cast_advice(error, cast) from error.__cause__

    def embed(
        self,
        model: str,
        texts: str | Sequence[str],
        *,
        priority: int = 0,
        parameters: Mapping[str, ParameterValue] | None = None,
        timeout: float | None = None,
        headers: Headers = None,
    ) -> Array:
        """Return the vector of a text, or of several texts a row each, in their order.

        `model`: one that takes TEXT and returns EMBEDDING, or the encoder for which `preprocess: text` generates it.
        One more call asks for the model's configuration: a request has as many texts as the model takes. Eight requests
        at most are under way at once; if one fails, its error is raised and the others are cancelled.
        """
        options = RequestOptions(priority=priority, parameters=parameters or {})
        self._connection.check_request(options)
        left = TimeLeft(timeout)
        embedding = Embedding(self._vector_model(model, left, headers), texts, options)
        results: list[InferResult] = []
        waiting: deque[_Begun[InferResult]] = deque()
        try:
            for call in embedding.calls():
                if len(waiting) == REQUESTS_AT_ONCE:
                    results.append(waiting.popleft().result())
                waiting.append(self._begin(call, left.seconds(), headers))
            while waiting:
                results.append(waiting.popleft().result())
        finally:
            for begun in waiting:
                begun.cancel()
        return embedding.vectors(results)

    def _vector_model(self, model: str, left: TimeLeft, headers: Headers) -> model_config_pb2.ModelConfig:
        """Return the configuration of the model that makes the vectors. Raises InvalidArgument if it does not."""
        config = self.model_config(model, timeout=left.seconds(), headers=headers)
        if makes_vectors(config):
            return config
        try:
            generated = self.model_config(generated_name(model), timeout=left.seconds(), headers=headers)
        except NotFound:
            raise no_vectors(config) from None
        if not makes_vectors(generated):
            raise no_vectors(generated)
        return generated

    def stream(self, *, timeout: float | None = None, headers: Headers = None) -> Stream:
        """Open a stream of requests and answers, to be used in a `with` statement."""
        method = self._channel.stream_stream(calls.STREAM_METHOD)
        return Stream(method, grpc_timeout(timeout), self._connection.metadata(headers))

    def server_live(self, *, timeout: float | None = None, headers: Headers = None) -> bool:
        return self._call(calls.server_live(), timeout, headers)

    def server_ready(self, *, timeout: float | None = None, headers: Headers = None) -> bool:
        return self._call(calls.server_ready(), timeout, headers)

    def model_ready(
        self, model: str, version: str = "", *, timeout: float | None = None, headers: Headers = None
    ) -> bool:
        return self._call(calls.model_ready(model, version), timeout, headers)

    def server_metadata(self, *, timeout: float | None = None, headers: Headers = None) -> ServerMetadata:
        return self._call(calls.server_metadata(), timeout, headers)

    def model_metadata(
        self, model: str, version: str = "", *, timeout: float | None = None, headers: Headers = None
    ) -> ModelMetadata:
        return self._call(calls.model_metadata(model, version), timeout, headers)

    def model_config(
        self, model: str, version: str = "", *, timeout: float | None = None, headers: Headers = None
    ) -> model_config_pb2.ModelConfig:
        """Return the configuration that the server uses, completed from the model file, as a protobuf message."""
        return self._call(calls.model_config(model, version), timeout, headers)

    def statistics(
        self, model: str = "", version: str = "", *, timeout: float | None = None, headers: Headers = None
    ) -> tuple[ModelStatistics, ...]:
        """Return the counters of each ready version, of all models or of one."""
        return self._call(calls.statistics(model, version), timeout, headers)

    def repository_index(
        self, *, ready: bool = False, timeout: float | None = None, headers: Headers = None
    ) -> tuple[IndexEntry, ...]:
        """Return all model versions, and why some are not ready. `ready`: only ready versions."""
        return self._call(calls.repository_index(ready), timeout, headers)

    def load_model(
        self,
        name: str,
        config: str | None = None,
        files: Mapping[str, bytes] | None = None,
        *,
        version: str | int = "",
        timeout: float | None = None,
        headers: Headers = None,
    ) -> None:
        """Load or reload a model, optionally with a config (JSON) and files ("<version>/<path>") of this call.
        `version`: load this version, and keep those that are loaded; "" = those of the version policy."""
        self._call(calls.load_model(name, config, files, version), timeout, headers)

    def unload_model(
        self,
        name: str,
        *,
        version: str | int = "",
        unload_dependents: bool = False,
        timeout: float | None = None,
        headers: Headers = None,
    ) -> None:
        """Unload a model, or one version of it. `unload_dependents`: also the members, if the model is an ensemble."""
        self._call(calls.unload_model(name, unload_dependents, version), timeout, headers)

    def wait_until_ready(self, timeout: float, model: str | None = None) -> None:
        """Wait until the server, or a model, is ready. Raises DeadlineExceeded, whose text says why it is not ready."""
        wait = ReadinessWait(timeout, model)
        while True:
            try:
                if self._call(wait.probe(), wait.probe_timeout, None):
                    return
                wait.note_unready(self.repository_index(timeout=wait.probe_timeout))
            except RocserveError as error:
                wait.note_failure(error)
            wait.check_time()
            time.sleep(wait.pause)

    def _call(self, call: calls.UnaryCall[Answer], timeout: float | None, headers: Headers) -> Answer:
        method = self._method(call.path)
        with _grpc_errors():
            message = method(call.request, timeout=grpc_timeout(timeout), metadata=self._connection.metadata(headers))
        return call.decode(message)

    def _begin(self, call: calls.UnaryCall[Answer], timeout: float | None, headers: Headers) -> _Begun[Answer]:
        method, metadata = self._method(call.path), self._connection.metadata(headers)
        with _grpc_errors():
            return _Begun(method.future(call.request, timeout=grpc_timeout(timeout), metadata=metadata), call.decode)

    def _method(self, path: str) -> Any:
        method = self._methods.get(path)
        if method is None:
            method = self._methods[path] = self._channel.unary_unary(path)
        return method


@dataclass(frozen=True, slots=True)
class _Begun(Generic[Answer]):
    """A call that is under way."""

    _future: Any
    """gRPC's."""
    _decode: Callable[[bytes], Answer]

    def result(self) -> Answer:
        """Wait for the answer. Raises RocserveError."""
        with _grpc_errors():
            message = self._future.result()
        return self._decode(message)

    def cancel(self) -> None:
        self._future.cancel()


@contextmanager
def _grpc_errors() -> Iterator[None]:
    """Translate what grpc raises in a `with` block to this package's exceptions."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_grpc(error) from error
    except ValueError as error:
        raise Cancelled(CLOSED) from error
