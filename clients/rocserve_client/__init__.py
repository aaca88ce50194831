"""The Python client of rocserve: numpy arrays in and out, blocking or with asyncio.

with Client("localhost:8001") as client:
    result = client.infer("digits", {"ENCODED": images}, [Output("PROBABILITIES", classification=3)])
    best = result.classes("PROBABILITIES")[0][0]
"""

from __future__ import annotations

from rocserve.core.errors import StatusCode
from rocserve_client.async_client import AsyncClient
from rocserve_client.async_stream import AsyncStream
from rocserve_client.client import Client
from rocserve_client.connection import Balancing, KeepAlive, Tls
from rocserve_client.errors import (
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    RocserveError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from rocserve_client.messages import RequestOptions
from rocserve_client.results import (
    BatchStatistics,
    Duration,
    IndexEntry,
    InferResult,
    ModelMetadata,
    ModelStatistics,
    ServerMetadata,
    TensorMetadata,
)
from rocserve_client.stream import Stream
from rocserve_client.tensors import Classification, Input, Output

__all__ = [
    "AlreadyExists",
    "AsyncClient",
    "AsyncStream",
    "Balancing",
    "BatchStatistics",
    "Cancelled",
    "Classification",
    "Client",
    "DeadlineExceeded",
    "Duration",
    "IndexEntry",
    "InferResult",
    "Input",
    "Internal",
    "InvalidArgument",
    "KeepAlive",
    "ModelMetadata",
    "ModelStatistics",
    "NotFound",
    "Output",
    "PermissionDenied",
    "RequestOptions",
    "ResourceExhausted",
    "RocserveError",
    "ServerMetadata",
    "StatusCode",
    "Stream",
    "TensorMetadata",
    "Tls",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
]
