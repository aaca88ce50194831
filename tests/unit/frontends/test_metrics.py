"""The metrics endpoint: its text, the text's meaning, and its HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from support.waiting import PATIENCE_SECONDS

from rocserve.core.custom_metrics import EventLabels, MetricFamily, Sample, event_labels
from rocserve.core.errors import unavailable
from rocserve.core.latencies import LatencyOptions
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.statistics import Execution, ModelStatistics, Statistics
from rocserve.frontends.http.connection import ConnectionLimits
from rocserve.frontends.listen_address import ListenAddress
from rocserve.frontends.metrics.collection import load_check_families, server_families
from rocserve.frontends.metrics.endpoint import MOST_CONNECTIONS, metrics_listener
from rocserve.frontends.metrics.exposition import exposition
from rocserve.scheduling.scheduler import cancelled
from rocserve.workers.resource_watch import memory_bytes

LOG = logging.getLogger("test")


def test_the_text_format() -> None:
    families = [
        MetricFamily(
            "nv_some_count",
            "counter",
            "Of lines\nand \\",
            (Sample({"model": 'a"b\\c\nd', "version": "1"}, 3), Sample({"model": "ü", "version": "2"}, 0)),
        ),
        MetricFamily("nv_some_gauge", "gauge", "Of none", ()),
        MetricFamily("nv_seconds", "gauge", "Of parts", (Sample({"model": "m"}, 0.25),)),
    ]
    assert exposition(families) == (
        "# HELP nv_some_count Of lines\\nand \\\\\n"
        "# TYPE nv_some_count counter\n"
        'nv_some_count{model="a\\"b\\\\c\\nd",version="1"} 3\n'
        'nv_some_count{model="ü",version="2"} 0\n'
        "# HELP nv_some_gauge Of none\n"
        "# TYPE nv_some_gauge gauge\n"
        "# HELP nv_seconds Of parts\n"
        "# TYPE nv_seconds gauge\n"
        'nv_seconds{model="m"} 0.25\n'
    )


@dataclass
class ToldVersion:
    """A version that only has counts."""

    name: str
    version: int
    statistics: ModelStatistics = field(default_factory=ModelStatistics)
    config: ModelConfig = field(default_factory=lambda: ModelConfig(name="m"))
    properties: Mapping[str, str] = field(default_factory=dict)
    has_statistics: bool = True
    pending_requests: int = 0
    load_seconds: float = 0.0
    worker_pids: Mapping[int, int] = field(default_factory=dict)
    worker_restarts: int = 0
    load_check: LoadCheckReport = NOT_CHECKED


def samples_of(
    *versions: ToldVersion, fallbacks: Mapping[EventLabels, int] | None = None, options: LatencyOptions | None = None
) -> dict[str, str]:
    """Metric with its labels -> value."""
    holder = ServingTableHolder()
    models: dict[str, ServedModel] = {}
    for version in versions:
        others = models[version.name].versions if version.name in models else {}
        models[version.name] = ServedModel(version.name, {**others, version.version: version}, version)  # type: ignore[dict-item, arg-type]
    holder.table = ServingTable(models)
    text = exposition(server_families(holder, fallbacks or {}, options or LatencyOptions()))
    return dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))


def test_what_is_counted() -> None:
    version = ToldVersion("m", 3, pending_requests=7, load_seconds=1.5, worker_restarts=2)
    second = 10**9
    version.statistics.record_batch(
        Execution(
            compute_start=3 * second,
            input_end=4 * second,
            output_start=7 * second,
            compute_end=9 * second,
            queue_starts=[second, 2 * second],
            request_end=10 * second,
            rows=5,
        )
    )
    version.statistics.record_refusal(unavailable("full"), 0, 1)
    version.statistics.record_failure(0, 1)
    version.statistics.record_failure(0, 1, by_backend=True)
    version.statistics.record_failure(0, 1, by_backend=True)
    version.statistics.record_refusal(cancelled(), 0, 1)
    labels = '{model="m",version="3"}'
    failures = {
        f'nv_inference_request_failure{{model="m",reason="{reason}",version="3"}}': count
        for reason, count in (("REJECTED", "1"), ("CANCELED", "1"), ("BACKEND", "2"), ("OTHER", "1"))
    }
    assert samples_of(version) == {
        f"nv_inference_request_success{labels}": "2",
        f"nv_inference_count{labels}": "5",
        f"nv_inference_exec_count{labels}": "1",
        f"nv_inference_request_duration_us{labels}": "17000000",
        f"nv_inference_queue_duration_us{labels}": "3000000",
        f"nv_inference_compute_input_duration_us{labels}": "2000000",
        f"nv_inference_compute_infer_duration_us{labels}": "6000000",
        f"nv_inference_compute_output_duration_us{labels}": "4000000",
        f"nv_inference_pending_request_count{labels}": "7",
        f"nv_model_load_duration_secs{labels}": "1.5",
        f"rocserve_worker_restarts_total{labels}": "2",
        **failures,
    }


def test_every_version_has_its_own_numbers() -> None:
    samples = samples_of(ToldVersion("a", 1), ToldVersion("a", 2), ToldVersion("b", 1))
    counts = [name for name in samples if name.startswith("nv_inference_count")]
    assert counts == [
        'nv_inference_count{model="a",version="1"}',
        'nv_inference_count{model="a",version="2"}',
        'nv_inference_count{model="b",version="1"}',
    ]


def test_the_metrics_of_models_of_one_name_have_their_namespaces() -> None:
    holder = ServingTableHolder()
    served = [ServedModel("m", {1: ToldVersion("m", 1)}, None, {}, namespace) for namespace in ("/a", "/b")]  # type: ignore[dict-item]
    holder.table = ServingTable({}, tuple(served))
    text = exposition(server_families(holder, {}, LatencyOptions()))
    counts = [line for line in text.splitlines() if line.startswith("nv_inference_count")]
    assert counts == [f'nv_inference_count{{model="m",namespace="{name}",version="1"}} 0' for name in ("/a", "/b")]


def test_tags_and_the_cache() -> None:
    version = ToldVersion("m", 1, config=ModelConfig(name="m", metric_tags={"team": "blue"}, response_cache=True))
    version.statistics.record_cache_hit(1000, 6000)
    version.statistics.record_cache_miss(7000)
    samples = samples_of(version)
    labels = '{_team="blue",model="m",version="1"}'
    assert samples[f"nv_inference_request_success{labels}"] == "1"
    assert samples[f"nv_cache_num_hits_per_model{labels}"] == "1"
    assert samples[f"nv_cache_hit_duration_per_model{labels}"] == "5"
    assert samples[f"nv_cache_num_misses_per_model{labels}"] == "1"
    assert samples[f"nv_cache_miss_duration_per_model{labels}"] == "7"


def test_a_tag_that_is_no_labels_name_is_made_one() -> None:
    config = ModelConfig(name="m", metric_tags={"cost centre-7 \N{SNOWMAN}": 'a "b"'})
    samples = samples_of(ToldVersion("m", 1, config=config))
    assert samples['nv_inference_count{_cost_centre_7__="a \\"b\\"",model="m",version="1"}'] == "0"


def test_without_a_cache_nothing_is_said_of_one() -> None:
    holder = ServingTableHolder()
    holder.table = ServingTable({"m": ServedModel("m", {1: ToldVersion("m", 1)}, None)})  # type: ignore[dict-item]
    text = exposition(server_families(holder, {}, LatencyOptions()))
    assert "nv_inference_request_success" in text
    assert "nv_cache" not in text


def test_summaries_and_histograms_instead_of_counters() -> None:
    options = LatencyOptions(counters=False, summaries=True, histograms=True, quantiles=(0.5, 0.99))
    config = ModelConfig(name="m", histogram_buckets={"rocserve_request_duration_ms": (1.0, 2.5)})
    version = ToldVersion("m", 1, ModelStatistics(options.distributions(config)), config=config)
    version.statistics.record_batch(Execution(1_000_000, 1_500_000, 2_000_000, 2_000_000, [0, 1_000_000], 3_000_000, 2))
    samples = samples_of(version, options=options)
    assert not any(name.startswith("nv_inference_request_duration_us") for name in samples)
    labels = 'model="m",version="1"'
    assert samples[f"nv_inference_request_summary_us_count{{{labels}}}"] == "2"
    assert samples[f"nv_inference_request_summary_us_sum{{{labels}}}"] == "5000"
    assert f'nv_inference_queue_summary_us{{{labels},quantile="0.99"}}' in samples
    name = "rocserve_request_duration_ms"
    assert {bound: samples[f'{name}_bucket{{{labels},le="{bound}"}}'] for bound in ("1", "2.5", "+Inf")} == {
        "1": "0",
        "2.5": "1",
        "+Inf": "2",
    }
    assert (samples[f"{name}_count{{{labels}}}"], samples[f"{name}_sum{{{labels}}}"]) == ("2", "5.0")


def test_engines_and_those_that_took_their_place() -> None:
    fallbacks = {event_labels(model="m", version=1, engine="migraphx", replaced_by="onnxruntime"): 2}
    samples = samples_of(
        ToldVersion("m", 1, properties={"engine": "onnxruntime", "engine_replaces": "migraphx", "devices": "cpu"}),
        ToldVersion("n", 1, properties={"engine": "rocal"}),
        ToldVersion("ensemble", 1),
        fallbacks=fallbacks,
    )
    assert {
        name: value for name, value in samples.items() if name.startswith(("rocserve_model", "rocserve_engine"))
    } == {
        'rocserve_model_engine_info{engine="onnxruntime",model="m",replaces="migraphx",version="1"}': "1",
        'rocserve_model_engine_info{engine="rocal",model="n",replaces="",version="1"}': "1",
        'rocserve_engine_fallback_total{engine="migraphx",model="m",replaced_by="onnxruntime",version="1"}': "2",
    }


def test_the_metrics_count_failed_load_checks() -> None:
    checked = LoadCheckReport(("rows are independent",), seconds=0.4)
    known = LoadCheckReport(("rows are independent",))
    samples = samples_of(
        ToldVersion("m", 1, load_check=checked), ToldVersion("m", 2, load_check=known), ToldVersion("python", 1)
    )
    assert {name: value for name, value in samples.items() if name.startswith("rocserve_load_check")} == {
        'rocserve_load_check_seconds{model="m",version="1"}': "0.4",
        'rocserve_load_check_seconds{model="m",version="2"}': "0.0",
    }
    (family,) = load_check_families({event_labels(model="m", version=1, kind="recorded answers"): 2})
    assert family.name == "rocserve_load_check_failures_total"
    assert family.samples == [Sample({"model": "m", "version": "1", "kind": "recorded answers"}, 2)]


def test_models_that_share_a_worker_have_parts_of_its_memory() -> None:
    name = "rocserve_model_memory_bytes"
    before = memory_bytes(os.getpid())
    samples = samples_of(ToldVersion("m", 1, worker_pids={os.getpid(): 4}), ToldVersion("ensemble", 1))
    (label,) = (label for label in samples if label.startswith(name))
    assert label == f'{name}{{model="m",version="1"}}'
    assert before / 2 < int(samples[label]) * 4 < before * 2


class Written:
    """Writes metrics, or fails."""

    text = "metrics ü\n"
    fails = False

    def __call__(self) -> str:
        if self.fails:
            raise RuntimeError("no metrics today")
        return self.text


@asynccontextmanager
async def endpoint(written: Written) -> AsyncIterator[int]:
    running = metrics_listener(written, ConnectionLimits(most=MOST_CONNECTIONS), LOG)
    port = await running.start(ListenAddress("metrics", "metrics", "127.0.0.1", 0))
    try:
        yield port
    finally:
        await running.stop()


async def ask(port: int, request: bytes) -> tuple[str, str, str]:
    """Status line, headers and body of the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request.replace(b"\r\n\r\n", b"\r\nHost: x\r\nConnection: close\r\n\r\n"))
    answer = (await asyncio.wait_for(reader.read(), PATIENCE_SECONDS)).decode()
    writer.close()
    head, _, body = answer.partition("\r\n\r\n")
    status, _, headers = head.partition("\r\n")
    return status, headers, body


async def test_metrics_are_served() -> None:
    async with endpoint(Written()) as port:
        status, headers, body = await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert (status, body) == ("HTTP/1.1 200 OK", "metrics ü\n")
        assert "Content-Type: text/plain; version=0.0.4; charset=utf-8" in headers
        assert "Content-Length: 11" in headers
        assert (await ask(port, b"GET /metrics?name=x HTTP/1.0\r\n\r\n"))[2] == "metrics ü\n"
        assert (await ask(port, b"HEAD /metrics HTTP/1.1\r\n\r\n"))[0::2] == ("HTTP/1.1 200 OK", "")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"GET /metrics/more HTTP/1.1\r\n\r\n", "404 Not Found"),
        (b"POST /metrics HTTP/1.1\r\n\r\n", "405 Method Not Allowed"),
        (b"\x16\x03\x01 hello\r\n\r\n", "400 Bad Request"),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 100_000 + b"\r\n\r\n", "400 Bad Request"),
    ],
)
async def test_other_requests(request_bytes: bytes, status: str) -> None:
    async with endpoint(Written()) as port:
        assert (await ask(port, request_bytes))[0].split(" ", 1)[1] == status
        assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"


async def test_a_connection_that_ends_early() -> None:
    async with endpoint(Written()) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /met")
        writer.close()
        await writer.wait_closed()
        assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"


@pytest.mark.parametrize("sent", [b"", b"GET /metr", b"POST /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"])
async def test_half_requests_lock_nobody_out(sent: bytes) -> None:
    async with endpoint(Written()) as port:
        writers = []
        for _ in range(70):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            writers.append(writer)
        assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"
        for writer in writers:
            writer.close()


async def test_metrics_that_cannot_be_written(caplog: pytest.LogCaptureFixture) -> None:
    written = Written()
    written.fails = True
    async with endpoint(written) as port:
        status, _, body = await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n")
        assert (status, body) == ("HTTP/1.1 500 Internal Server Error", "the server's log says why\n")
        assert "no metrics today" in caplog.text
        written.fails = False
        assert (await ask(port, b"GET /metrics HTTP/1.1\r\n\r\n"))[0] == "HTTP/1.1 200 OK"


class WideStatistics(ModelStatistics):
    def snapshot(self) -> Statistics:
        raise AssertionError("it copies what was counted of each batch size, while no batch can be counted")


def test_a_scrape_reads_nothing_by_batch_size() -> None:
    version = ToldVersion("m", 1, WideStatistics())
    for rows in range(1, 1000):
        version.statistics.record_batch(Execution(0, 1, 2, 3, [0], 4, rows))
    assert samples_of(version)['nv_inference_exec_count{model="m",version="1"}'] == "999"
