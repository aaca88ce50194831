"""All methods that take one message and give one, by their names in inference.GRPCInferenceService and in
rocserve.Page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from rocserve.amd_inference_server.service import AmdInferenceServerService
from rocserve.core.errors import ServeError
from rocserve.core.private_paths import PrivatePaths
from rocserve.protocol import grpc_service_pb2 as pb
from rocserve.protocol import page_pb2
from rocserve.services.client_memory.service import ClientMemoryService
from rocserve.services.log_control import LogControlService
from rocserve.services.method import Method, QuickMethod, SlowMethod
from rocserve.services.page import PageService
from rocserve.services.queries import QueryService
from rocserve.services.repository_control import RepositoryControlService
from rocserve.services.trace_control import TraceControlService


@dataclass(frozen=True, slots=True)
class Services:
    """What the methods are made of."""

    queries: QueryService
    repository_control: RepositoryControlService
    client_memory: ClientMemoryService
    trace_control: TraceControlService
    log_control: LogControlService
    amd: AmdInferenceServerService
    page: PageService


def methods(services: Services, paths: PrivatePaths) -> Mapping[str, Method]:
    """By name: all of the services but ModelInfer and ModelStreamInfer, which have ways of their own in each front end.
    What their errors say has no paths of the server."""
    return {name: _without_paths(method, paths) for name, method in _methods(services).items()}


def _without_paths(method: Method, paths: PrivatePaths) -> Method:
    if isinstance(method, SlowMethod):
        ask = method.answer

        async def answer_slowly(request: Any) -> Message:
            try:
                return await ask(request)
            except ServeError as error:
                raise paths.without(error) from None

        return SlowMethod(method.request, answer_slowly)
    query = method.answer

    def answer(request: Any) -> Message:
        try:
            return query(request)
        except ServeError as error:
            raise paths.without(error) from None

    return QuickMethod(method.request, answer)


def _methods(services: Services) -> Mapping[str, Method]:
    queries, control, memory = services.queries, services.repository_control, services.client_memory
    return {
        "ServerLive": QuickMethod(pb.ServerLiveRequest, queries.server_live),
        "ServerReady": QuickMethod(pb.ServerReadyRequest, queries.server_ready),
        "ModelReady": QuickMethod(pb.ModelReadyRequest, queries.model_ready),
        "ServerMetadata": QuickMethod(pb.ServerMetadataRequest, queries.server_metadata),
        "ModelMetadata": QuickMethod(pb.ModelMetadataRequest, queries.model_metadata),
        "ModelConfig": QuickMethod(pb.ModelConfigRequest, queries.model_config),
        "ModelStatistics": QuickMethod(pb.ModelStatisticsRequest, queries.model_statistics),
        "RepositoryIndex": QuickMethod(pb.RepositoryIndexRequest, queries.repository_index),
        "RepositoryModelLoad": SlowMethod(pb.RepositoryModelLoadRequest, control.load),
        "RepositoryModelUnload": SlowMethod(pb.RepositoryModelUnloadRequest, control.unload),
        **services.amd.methods(),
        "TraceSetting": QuickMethod(pb.TraceSettingRequest, services.trace_control.trace_setting),
        "LogSettings": QuickMethod(pb.LogSettingsRequest, services.log_control.log_settings),
        "SystemSharedMemoryStatus": QuickMethod(pb.SystemSharedMemoryStatusRequest, memory.system_status),
        "SystemSharedMemoryRegister": QuickMethod(pb.SystemSharedMemoryRegisterRequest, memory.system_register),
        "SystemSharedMemoryUnregister": QuickMethod(pb.SystemSharedMemoryUnregisterRequest, memory.system_unregister),
        "CudaSharedMemoryStatus": QuickMethod(pb.CudaSharedMemoryStatusRequest, memory.cuda_status),
        "CudaSharedMemoryRegister": SlowMethod(pb.CudaSharedMemoryRegisterRequest, memory.cuda_register),
        "CudaSharedMemoryUnregister": QuickMethod(pb.CudaSharedMemoryUnregisterRequest, memory.cuda_unregister),
        "Overview": SlowMethod(page_pb2.OverviewRequest, services.page.overview),
        "RepositoryEvents": SlowMethod(page_pb2.RepositoryEventsRequest, services.page.events),
    }
