"""Reports the state of the whole server, for the page at the HTTP port."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import cast

from rocserve.core.custom_metrics import MetricFamily
from rocserve.observability.server_history import ServerHistory
from rocserve.protocol import page_pb2
from rocserve.services.methods import Method


@dataclass(eq=False)
class ServerStateService:
    _history: ServerHistory
    _gauges: Callable[[], Iterable[MetricFamily]]
    """Returns the metrics of the machine's processors, memory and GPUs."""
    _started_ms: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    def methods(self) -> Mapping[str, Method]:
        return {"ServerState": Method(page_pb2.ServerStateRequest, self.state, is_slow=True)}

    async def state(self, request: page_pb2.ServerStateRequest) -> page_pb2.ServerStateResponse:
        # GPUs may take their time.
        families = await asyncio.to_thread(self._gauges)
        gauges = {family.name: _values(family) for family in families}
        response = page_pb2.ServerStateResponse(
            now_ms=time.time_ns() // 1_000_000,
            started_ms=self._started_ms,
            cpu_use=gauges.get("nv_cpu_utilization", {}).get("", -1.0),
            memory_used_bytes=int(gauges.get("nv_cpu_memory_used_bytes", {}).get("", 0)),
            memory_total_bytes=int(gauges.get("nv_cpu_memory_total_bytes", {}).get("", 0)),
        )
        used, use = gauges.get("nv_gpu_memory_used_bytes", {}), gauges.get("nv_gpu_utilization", {})
        for gpu, total in gauges.get("nv_gpu_memory_total_bytes", {}).items():
            response.gpus.add(
                use=use.get(gpu, -1.0), memory_used_bytes=int(used.get(gpu, 0)), memory_total_bytes=int(total)
            )
        for point in self._history.after(request.after_ms):
            response.points.add(**asdict(point))
        return response


def _values(family: MetricFamily) -> Mapping[str, float]:
    """Return the values of a gauge by GPU; "" = of the machine."""
    return {sample.labels.get("gpu_uuid", ""): cast(float, sample.value) for sample in family.samples}
