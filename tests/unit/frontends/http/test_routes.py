"""Which URL asks for what."""

from __future__ import annotations

import pytest

from rocserve.frontends.http.management import ManagementRoute, Place
from rocserve.frontends.http.routes import InferenceUrl, find_destination


@pytest.mark.parametrize(
    ("path", "method", "place"),
    [
        ("/v2", "ServerMetadata", Place()),
        ("/v2/health/live", "ServerLive", Place()),
        ("/v2/health/ready", "ServerReady", Place()),
        ("/v2/models/m", "ModelMetadata", Place("m")),
        ("/v2/models/m/versions/3", "ModelMetadata", Place("m", "3")),
        ("/v2/models/a%20b%2Fc/ready", "ModelReady", Place("a b/c")),
        ("/v2/models/m/versions/3/ready", "ModelReady", Place("m", "3")),
        ("/v2/models/m/config", "ModelConfig", Place("m")),
        ("/v2/models/m/stats", "ModelStatistics", Place("m")),
        ("/v2/models/stats", "ModelStatistics", Place()),
        ("/v2/models/stats/stats", "ModelStatistics", Place("stats")),
        ("/v2/repository/index", "RepositoryIndex", Place()),
        ("/v2/repository/r/index", "RepositoryIndex", Place(repository="r")),
        ("/v2/repository/models/m/load", "RepositoryModelLoad", Place("m")),
        ("/v2/repository/r/models/m/unload", "RepositoryModelUnload", Place("m", repository="r")),
        ("/v2/systemsharedmemory/status", "SystemSharedMemoryStatus", Place()),
        ("/v2/systemsharedmemory/region/r%C3%A9/register", "SystemSharedMemoryRegister", Place(region="ré")),
        ("/v2/cudasharedmemory/unregister", "CudaSharedMemoryUnregister", Place()),
        ("/v2/trace/setting", "TraceSetting", Place()),
        ("/v2/models/m/trace/setting", "TraceSetting", Place("m")),
        ("/v2/logging", "LogSettings", Place()),
        ("/v2/models", "ModelList", Place()),
        ("/v2/hardware", "HasHardware", Place()),
        ("/v2/workers/migraphx/load", "WorkerLoad", Place("migraphx")),
        ("/v2/repository/models/m/versions/2/unload", "ModelUnload", Place("m", "2")),
    ],
)
def test_methods(path: str, method: str, place: Place) -> None:
    destination = find_destination("GET", path.encode())
    assert destination is not None
    assert isinstance(destination.to, ManagementRoute)
    assert (destination.to.method, destination.place) == (method, place)


@pytest.mark.parametrize("what", list(InferenceUrl))
def test_inference(what: InferenceUrl) -> None:
    destination = find_destination("POST", f"/v2/models/m/versions/2/{what.value}".encode())
    assert destination is not None
    assert (destination.to, destination.place) == (what, Place("m", "2"))


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v2/",
        "/v2/health",
        "/v2/models/",
        "/v2/models/m/",
        "/v2/models/m/versions/x",
        "/v2/models/m/versions/1/trace/setting",
        "/v2/models/m/other",
        "/v2/repository/models/m",
        "/v2/systemsharedmemory",
        "/v2/health/live/",
    ],
)
def test_nothing_there(path: str) -> None:
    assert find_destination("GET", path.encode()) is None
