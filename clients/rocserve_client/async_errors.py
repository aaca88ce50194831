"""What grpc.aio raises, as this package's exceptions."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from rocserve_client.errors import Cancelled, error_from_grpc


@contextmanager
def grpc_errors() -> Iterator[None]:
    """Around each await of a grpc.aio call."""
    try:
        yield
    except grpc.RpcError as error:
        raise error_from_grpc(error) from error
    except asyncio.CancelledError as error:
        # grpc.aio raises this also for a call that was ended by its stream or channel being closed. Nobody has
        # cancelled the task then, and it must not end as if somebody had.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Cancelled("the client or the stream was closed") from error
