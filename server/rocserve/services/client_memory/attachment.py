"""Attaches clients' shared memory to requests: reads inputs from it, and writes outputs to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument
from rocserve.core.exchange import HELD, Exchange, Held, Hook, HookOrder
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.serving import ServingTableHolder
from rocserve.core.steps import Steps
from rocserve.core.tensor_places import ALIGNMENT, PlacedTensors, TensorPlaces
from rocserve.core.tensors import TensorHead
from rocserve.plane.guarded_mapping import GuardedMapping
from rocserve.plane.heap import COPIED_AT_ONCE
from rocserve.services.client_memory.regions import (
    AnyRegion,
    ClientRegion,
    ClientRegions,
    RegionReference,
    read_reference,
)

PartInPlace = tuple[ClientRegion, GuardedMapping, int]
"""A part of a region that a model reads in place: the region, its mapping, and the part's end."""
WantedPart = tuple[AnyRegion, RegionReference]


@dataclass(eq=False)
class ClientMemory:
    """Attaches shared memory to requests, on the data plane's thread."""

    _tables: ServingTableHolder
    _regions: ClientRegions
    most_bytes: int
    """Bound on one request's inputs, because a file may claim to be longer than all memory."""
    work_off: Callable[[Steps[None]], object]
    """Runs long work step by step."""

    def attach(self, request: InferRequest, exchange: Exchange) -> Sequence[Steps[None]]:
        """Put inputs in regions into the request's data, and let the exchange write outputs to regions. Returns the
        steps that copy large inputs, for the dispatcher. This method and the steps raise ServeError if there is no such
        model, region or part; then no region stays acquired."""
        head = request.head
        config = self._tables.table.find(head.model_name, head.model_version).config
        left = self.most_bytes
        reads_in_place = request.trace is None and _only_copies(config)
        in_place: list[PartInPlace] = []
        copying: list[Steps[None]] = []
        data = list(request.data)
        for index, entry in enumerate(head.inputs):
            reference = read_reference(entry.name, entry.parameters)
            if reference is None:
                continue
            region = self._regions.checked(reference)
            fits = not _has_other_size(entry, reference.nbytes)
            # Smaller inputs are copied when their request arrives.
            if reads_in_place and fits and reference.nbytes > 64 * 1024 and isinstance(region, ClientRegion):
                data[index], mapping = region.view(reference.offset, reference.nbytes)
                in_place.append((region, mapping, reference.offset + reference.nbytes))
                continue
            left -= reference.nbytes
            if not fits:
                # Validation refuses the input for its length, so zeros replace the data: they take no memory.
                data[index] = np.broadcast_to(np.zeros(1, np.uint8), reference.nbytes).data
            elif left < 0:
                raise ServeError(
                    StatusCode.RESOURCE_EXHAUSTED,
                    f"the inputs in shared memory have more bytes than may wait for a model ({self.most_bytes};"
                    " --max-queue-bytes)",
                )
            elif request.trace is None and reference.nbytes > COPIED_AT_ONCE:
                data[index] = into = np.empty(reference.nbytes, np.uint8).data
                copying.append(region.read_into(into, reference.offset))
            else:
                # A trace records the inputs immediately.
                data[index] = region.read(reference.offset, reference.nbytes)
        request.data = data
        if in_place and len(in_place) == len(data):
            request.data = _placed(head, in_place) or data
        wanted = _wanted_parts(head)
        if not wanted and not in_place:
            return copying
        parts: dict[str, WantedPart] = {}
        try:
            for name, reference in wanted.items():
                parts[name] = self._regions.acquire(reference), reference
        except ServeError:
            self.release(parts)
            raise
        exchange.add(_RegionHook(self, parts, in_place, config))
        return copying

    def release(self, parts: Mapping[str, WantedPart]) -> None:
        for region, _ in parts.values():
            self._regions.release(region)


class _RegionHook(Hook):
    """Writes outputs to regions on their way to the client."""

    __slots__ = ("_in_place", "_memory", "_parts", "_where")

    order = HookOrder.REGION

    def __init__(
        self,
        memory: ClientMemory,
        parts: Mapping[str, WantedPart],
        in_place: Sequence[PartInPlace],
        config: ModelConfig,
    ) -> None:
        """`parts`: output -> part; released before the last answer, after which clients may unregister their regions.
        `in_place`: the parts that the model reads in place."""
        self._memory = memory
        self._parts = parts
        self._in_place = in_place
        self._where = f"in ensemble '{config.name}', " if config.ensemble_steps else ""

    def on_answer(self, exchange: Exchange, answer: Answer, final: bool) -> Answer | Held:
        if not isinstance(answer, InferResponse):
            return self._released(answer, final)
        steps = self._write(exchange, answer, final)
        if answer.is_large:
            self._memory.work_off(steps)
        else:
            for _ in steps:
                pass
        return HELD

    def _released(self, answer: Answer, final: bool) -> Answer:
        if final:
            self._memory.release(self._parts)
        return answer

    def _write(self, exchange: Exchange, response: InferResponse, final: bool) -> Steps[None]:
        data = list(response.data)
        answer: Answer
        try:
            for region, mapping, end in self._in_place:
                # If the client has cut the file meanwhile, the model has read zeros.
                region.check_whole(mapping, end)
            for index, head in enumerate(response.head.outputs):
                if head.name in self._parts:
                    wanted, part = self._parts[head.name]
                    output = memoryview(data[index])
                    if len(output) > part.nbytes:
                        raise internal(
                            f"{self._where}shared memory size specified with the request for output '{head.name}'"
                            f" ({part.nbytes} bytes) should be at least {len(output)} bytes to hold the results"
                        )
                    yield from wanted.write(part.offset, output)
                    data[index] = b""
        except ServeError as error:
            answer = error
        else:
            # A new response, because the original may be kept to answer other requests.
            answer = replace(response, data=data, in_shared_memory=self._parts.keys())
        exchange.pass_on(self, self._released(answer, final), final)


def _only_copies(config: ModelConfig) -> bool:
    """Return whether the server only copies the model's inputs to a worker."""
    return not (
        config.is_ensemble
        or config.response_cache
        or config.batch_inputs
        or config.sequence_batching is not None
        or any(entry.datatype is DataType.BYTES or entry.allow_ragged_batch for entry in config.inputs)
    )


def _placed(head: RequestHead, in_place: Sequence[PartInPlace]) -> PlacedTensors | None:
    """Return the inputs in the region's file for workers to read; None if they do not lie as in a heap's slot."""
    places = TensorPlaces([TensorHead(entry.name, DataType(entry.datatype), entry.shape) for entry in head.inputs])
    if places.sizes is None:
        return None  # Strings for a model without BYTES inputs.
    region, _, end = in_place[0]
    begin = end - places.sizes[0]
    at = region.offset + begin
    if at % ALIGNMENT or begin + places.end > region.nbytes:
        return None
    ends = [begin + finish for _, finish in places.bounds]
    if [(part[0], part[2]) for part in in_place] != [(region, finish) for finish in ends]:
        return None
    return PlacedTensors(region.file.view, places.end, places, region.file, at, region)


def _wanted_parts(head: RequestHead) -> Mapping[str, RegionReference]:
    """Return the part of a region for each output."""
    wanted: dict[str, RegionReference] = {}
    for output in head.outputs:
        reference = read_reference(output.name, output.parameters)
        if reference is None:
            continue
        if "classification" in output.parameters:
            raise invalid_argument("output can't set both 'shared_memory_region' and 'classification'")
        wanted[output.name] = reference
    return wanted


def _has_other_size(entry: InputHead, nbytes: int) -> bool:
    """Return whether the input's shape and datatype need another number of bytes. BYTES may have any."""
    try:
        datatype = DataType(entry.datatype)
    except ValueError:
        return True
    return datatype is not DataType.BYTES and math.prod(entry.shape) * datatype.itemsize != nbytes
