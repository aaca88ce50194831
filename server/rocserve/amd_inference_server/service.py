"""Answers the calls that AMD Inference Server has in addition to KServe's: models, workers and hardware by name."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.serving import ServingTableHolder
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol.parameters import read_parameters
from rocserve.repository.machine import ThisMachine
from rocserve.repository.model_repository import ModelRepository
from rocserve.services.methods import Method


class AmdInferenceServerService:
    """Answers each call; loads and unloads run on the event loop. Raises ServeError as Triton's load methods do."""

    def __init__(self, tables: ServingTableHolder, repository: ModelRepository, machine: ThisMachine) -> None:
        self._tables = tables
        self._repository = repository
        self._machine = machine

    def methods(self) -> Mapping[str, Method]:
        return {
            "ModelLoad": Method(pb.ModelLoadRequest, self.model_load, is_slow=True),
            "ModelUnload": Method(pb.ModelUnloadRequest, self.model_unload, is_slow=True),
            "WorkerLoad": Method(pb.WorkerLoadRequest, self.worker_load, is_slow=True),
            "WorkerUnload": Method(pb.WorkerUnloadRequest, self.worker_unload, is_slow=True),
            "ModelList": Method(pb.ModelListRequest, self.model_list, is_slow=True),
            "HasHardware": Method(pb.HasHardwareRequest, self.has_hardware),
        }

    async def model_load(self, request: pb.ModelLoadRequest) -> pb.ModelLoadResponse:
        """Load a model. In any control mode a served model counts as loaded, because that server has no modes."""
        name = self._known_name(request.name)
        if request.parameters:
            raise invalid_argument(
                f"failed to load '{name}', a model of the repository takes no parameters from a client, got"
                f" {', '.join(sorted(request.parameters))}; set them in its configuration"
            )
        try:
            self._tables.table.find(name, request.version)
        except ServeError:
            await self._repository.load(name, {})
            self._tables.table.find(name, request.version)
        return pb.ModelLoadResponse()

    async def model_unload(self, request: pb.ModelUnloadRequest) -> pb.ModelUnloadResponse:
        """Unload a model or a worker's endpoint, which that server treats alike."""
        name = self._known_name(request.name)
        if name in self._tables.table.models:
            await self._repository.unload(name, unload_dependents=False)
        return pb.ModelUnloadResponse()

    async def worker_load(self, request: pb.WorkerLoadRequest) -> pb.WorkerLoadResponse:
        endpoint = await self._repository.endpoints.load(request.name.lower(), read_parameters(request.parameters))
        return pb.WorkerLoadResponse(endpoint=endpoint)

    async def worker_unload(self, request: pb.WorkerUnloadRequest) -> pb.WorkerUnloadResponse:
        await self._repository.endpoints.unload(request.name.lower())
        return pb.WorkerUnloadResponse()

    async def model_list(self, request: pb.ModelListRequest) -> pb.ModelListResponse:
        return pb.ModelListResponse(models=self._repository.endpoints.listed_models())

    def has_hardware(self, request: pb.HasHardwareRequest) -> pb.HasHardwareResponse:
        """Answer whether there are `num`, at least one, of "CPU", "GPU", or an architecture such as "gfx90a"."""
        name = request.name.lower()
        gpus = [self._machine.architecture(gpu) for gpu in self._machine.gpus]
        if name == "cpu":
            count = len(os.sched_getaffinity(0))
        else:
            count = len(gpus) if name == "gpu" else sum(name == one for one in gpus)
        return pb.HasHardwareResponse(found=0 < count >= request.num)

    def _known_name(self, name: str) -> str:
        """Return the name, or its lower case if no model has it, because that server converts names to lower case."""
        known = {entry.name for entry in self._repository.index(ready_only=False)}
        return name if name in known else name.lower()
