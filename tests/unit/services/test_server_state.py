"""The whole server's state: the machine's gauges as the metrics have them, and what is absent where they have none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from rocserve.core.custom_metrics import MetricFamily, Sample
from rocserve.core.serving import ServingTableHolder
from rocserve.protocol import page_pb2
from rocserve.protocol.json_form import plain_values
from rocserve.services.server_state import ServerHistory, server_state


def family(name: str, *values: float, **of_gpus: float) -> MetricFamily:
    samples = [Sample({}, value) for value in values]
    return MetricFamily(name, "gauge", "", samples + [Sample({"gpu_uuid": gpu}, of_gpus[gpu]) for gpu in of_gpus])


async def state(history: ServerHistory, families: Sequence[MetricFamily], after_ms: int = 0) -> dict[str, object]:
    request = page_pb2.ServerStateRequest(after_ms=after_ms)
    return plain_values(await server_state(history, lambda: families, 7, request))


async def test_the_machine() -> None:
    families = [
        family("nv_cpu_utilization", 0.25),
        family("nv_cpu_memory_used_bytes", 3 << 30),
        family("nv_cpu_memory_total_bytes", 8 << 30),
        family("nv_gpu_memory_total_bytes", one=64 << 30, other=32 << 30),
        family("nv_gpu_memory_used_bytes", one=1 << 30, other=2 << 30),
        family("nv_gpu_utilization", one=0.5),
    ]
    told = await state(ServerHistory(ServingTableHolder()), families)
    assert (told["cpu_use"], told["memory_used_bytes"], told["memory_total_bytes"]) == (0.25, 3 << 30, 8 << 30)
    assert told["started_ms"] == 7
    gpus = page_pb2.ServerStateResponse()
    gpus.gpus.add(use=0.5, memory_used_bytes=1 << 30, memory_total_bytes=64 << 30)
    gpus.gpus.add(use=-1, memory_used_bytes=2 << 30, memory_total_bytes=32 << 30)
    assert told["gpus"] == [plain_values(gpu) for gpu in gpus.gpus]


async def test_metrics_that_are_off_and_points_after_a_time() -> None:
    history = ServerHistory(ServingTableHolder())
    service = partial(server_state, history, tuple, 7)
    history.sample()
    told = await service(page_pb2.ServerStateRequest())
    assert told.cpu_use == -1
    assert (told.memory_total_bytes, len(told.gpus), len(told.points)) == (0, 0, 1)
    later = await service(page_pb2.ServerStateRequest(after_ms=told.points[0].at_ms))
    assert len(later.points) == 0
