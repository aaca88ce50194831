"""Which methods are only for clients that send a secret header: both front ends ask here."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from rocserve.core.errors import ServeError, unavailable
from rocserve.settings import RestrictedProtocols

_POLL_SECONDS = 1.0
"""Between two checks of the file: not each call has one."""


GRPC_HEADER_PREFIX = "triton-grpc-protocol-"
"""Precedes the name that --grpc-restricted-protocol gives; --http-restricted-api's is the header's whole name."""

PROTOCOLS: Mapping[str, str] = MappingProxyType(
    {
        "ServerLive": "health",
        "ServerReady": "health",
        "ModelReady": "health",
        "Check": "health",
        "Watch": "health",
        "ServerMetadata": "metadata",
        "ModelMetadata": "metadata",
        "HasHardware": "metadata",
        "ModelInfer": "inference",
        "ModelStreamInfer": "inference",
        "ModelConfig": "model-config",
        "ModelStatistics": "statistics",
        "TraceSetting": "trace",
        "LogSettings": "logging",
        "RepositoryIndex": "model-repository",
        "RepositoryModelLoad": "model-repository",
        "RepositoryModelUnload": "model-repository",
        "ModelList": "model-repository",
        "ModelLoad": "model-repository",
        "ModelUnload": "model-repository",
        "WorkerLoad": "model-repository",
        "WorkerUnload": "model-repository",
        "SystemSharedMemoryStatus": "shared-memory",
        "SystemSharedMemoryRegister": "shared-memory",
        "SystemSharedMemoryUnregister": "shared-memory",
        "CudaSharedMemoryStatus": "shared-memory",
        "CudaSharedMemoryRegister": "shared-memory",
        "CudaSharedMemoryUnregister": "shared-memory",
    }
)
"""The protocol that a method belongs to: all of inference.GRPCInferenceService and of grpc.health.v1.Health."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """The header that a client must send, and its value."""

    header: str
    """As the flag has it; headers' names are compared without regard to case."""
    value: str = ""
    file: SecretFile | None = None
    """Holds the value in place of `value`."""

    def admits(self, value: str | bytes | None) -> bool:
        """Whether this is the header's value; None where the client sent no such header."""
        if value is None:
            return False
        given = value.encode(errors="surrogateescape") if isinstance(value, str) else value
        expected = self.value if self.file is None else self.file.value()
        return hmac.compare_digest(given, expected.encode(errors="surrogateescape"))

    def admits_metadata(self, metadata: Sequence[tuple[str, str | bytes]]) -> bool:
        """Whether a call's metadata has the header; where it is there twice, the first counts."""
        name = self.header.lower()
        return self.admits(next((value for key, value in metadata if key.lower() == name), None))

    def refusal(self) -> ServeError:
        """The error for gRPC clients without the header."""
        return unavailable(f"This protocol is restricted, expecting header '{self.header}'")


def restrictions(
    settings: Sequence[RestrictedProtocols], log: logging.Logger, header_prefix: str = ""
) -> Mapping[str, Restriction]:
    """The restrictions by method; methods that anybody may call are not in it.

    Raises:
        OSError, ValueError: a file holds no secret.
    """
    by_protocol: dict[str, Restriction] = {}
    for group in settings:
        file = None if group.file is None else SecretFile(group.file, log)
        restriction = Restriction(header_prefix + group.header, group.value, file)
        by_protocol |= dict.fromkeys(group.protocols, restriction)
    return {method: by_protocol[protocol] for method, protocol in PROTOCOLS.items() if protocol in by_protocol}


class SecretFile:
    """May be asked from any thread."""

    def __init__(self, path: Path, log: logging.Logger) -> None:
        """Raises: OSError, ValueError: there is no secret in it."""
        self._path = path
        self._log = log
        self._mark = self._read_marks()
        self._value = self._read()
        self._checked_at = time.monotonic()

    def value(self) -> str:
        """The secret; while the file cannot be read, or is empty, the last one."""
        now = time.monotonic()
        if now - self._checked_at >= _POLL_SECONDS:
            self._checked_at = now
            self._renew()
        return self._value

    def _renew(self) -> None:
        try:
            mark = self._read_marks()
            if mark != self._mark:
                self._value = self._read()
                self._mark = mark
                self._log.info("the secret in %s has been renewed", self._path)
        except (OSError, ValueError) as error:
            self._log.warning("the secret in %s stays as it was: %s", self._path, error)

    def _read_marks(self) -> tuple[int, int, int]:
        found = self._path.stat()
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> str:
        text = self._path.read_bytes().decode(errors="surrogateescape").rstrip("\r\n")
        if not text:
            raise ValueError(f"{self._path} holds no secret: it is empty")
        return text
