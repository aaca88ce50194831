"""Shared memory between the benchmark, as a client, and the servers, for inputs and outputs."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy
from numpy.typing import NDArray
from tritonclient.grpc import service_pb2
from tritonclient.utils import np_to_triton_dtype

FOLDER = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class SharedRegion:
    """A file of POSIX shared memory with room for one tensor twice: the input, then the output."""

    name: str
    """Its name on the servers, and part of its file's name."""
    tensor: NDArray[numpy.generic]

    @property
    def key(self) -> str:
        return f"/rocserve_bench_{os.getpid()}_{self.name}"

    @property
    def nbytes(self) -> int:
        return 2 * self.output_offset

    @property
    def output_offset(self) -> int:
        """Bytes; at the beginning of a page."""
        return -(-self.tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @contextmanager
    def created(self) -> Iterator[None]:
        """The file exists within the block."""
        path = FOLDER / self.key.removeprefix("/")
        path.write_bytes(self.tensor.tobytes().ljust(self.nbytes, b"\0"))
        try:
            yield
        finally:
            path.unlink()

    def take_output(self) -> NDArray[numpy.generic]:
        """Return the output in the region, and erase it, so that it cannot be taken for the next one."""
        with (FOLDER / self.key.removeprefix("/")).open("r+b") as file:
            file.seek(self.output_offset)
            found = file.read(self.tensor.nbytes)
            file.seek(self.output_offset)
            file.write(bytes(self.tensor.nbytes))
        return numpy.frombuffer(found, self.tensor.dtype).reshape(self.tensor.shape)

    def request(self, model: str, input_name: str, output_name: str) -> bytes:
        """A ModelInferRequest whose input and output lie in the region."""
        request = service_pb2.ModelInferRequest(model_name=model)
        entry = request.inputs.add(
            name=input_name, datatype=np_to_triton_dtype(self.tensor.dtype), shape=self.tensor.shape
        )
        self._refer(entry.parameters, 0)
        self._refer(request.outputs.add(name=output_name).parameters, self.output_offset)
        return bytes(request.SerializeToString())

    def _refer(self, parameters: Mapping[str, service_pb2.InferParameter], offset: int) -> None:
        parameters["shared_memory_region"].string_param = self.name
        parameters["shared_memory_offset"].int64_param = offset
        parameters["shared_memory_byte_size"].int64_param = self.tensor.nbytes
