"""The metrics endpoint of a real server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from support.infer_inputs import infer_input
from support.metrics import FLAGS, port_of, scrape
from support.models import add_constant, drop
from support.processes import has_ended
from support.server import RocserveProcess, Start
from support.waiting import wait_until
from tritonclient.utils import InferenceServerException

ENSEMBLE = """
platform: "ensemble"
max_batch_size: 4
input { name: "IN" data_type: TYPE_FP32 dims: [ 1, 2 ] reshape { shape: [ 2 ] } }
output { name: "OUT" data_type: TYPE_FP32 dims: [ 2, 1 ] reshape { shape: [ 2 ] } }
ensemble_scheduling {
  step { model_name: "c" model_version: -1 input_map { key: "X" value: "IN" } output_map { key: "Y" value: "OUT" } }
}
"""


def ask(client: triton.InferenceServerClient, shape: list[int], model: str = "m") -> None:
    client.infer(model, [infer_input("X", np.ones(shape, np.float32))])


@pytest.fixture(scope="module")
def server(start: Start, tmp_path_factory: pytest.TempPathFactory) -> RocserveProcess:
    """Each test loads models under its own names."""
    return start(tmp_path_factory.mktemp("metrics"), *FLAGS, "--model-control-mode=explicit")


def test_requests_are_counted(server: RocserveProcess) -> None:
    load(server, "m", add_constant(1.0))
    client, port = server.client(), port_of(server)
    for _ in range(3):
        ask(client, [2, 2])
    try:
        ask(client, [1, 3])
    except InferenceServerException:
        pass
    # The server updates the counters after it has answered.
    wait_until(lambda: scrape(port)['nv_inference_request_success{model="m",version="1"}'] == "3", "the count")
    samples = scrape(port)
    labels = '{model="m",version="1"}'
    assert samples[f"nv_inference_count{labels}"] == "6"
    assert samples[f"nv_inference_exec_count{labels}"] == "3"
    # A request that does not fit the model never reached it.
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert samples[f'nv_inference_request_failure{{model="m",reason="{reason}",version="1"}}'] == "0"
    assert samples[f"nv_inference_pending_request_count{labels}"] == "0"
    assert int(samples[f"nv_inference_request_duration_us{labels}"]) > 0
    assert float(samples[f"nv_model_load_duration_secs{labels}"]) > 0
    assert int(samples[f"rocserve_model_memory_bytes{labels}"]) > 1_000_000
    assert 0 <= float(samples["nv_cpu_utilization"]) <= 1
    assert int(samples["nv_cpu_memory_total_bytes"]) > int(samples["nv_cpu_memory_used_bytes"]) > 0
    assert samples['rocserve_model_engine_info{engine="onnxruntime",model="m",replaces="",version="1"}'] == "1"


def load(server: RocserveProcess, name: str, model: bytes | str | None, config: str = "") -> Path:
    folder = drop(server.repositories[0], name, model, config)
    server.client().load_model(name)
    return folder


def test_the_metrics_before_the_first_request(server: RocserveProcess) -> None:
    load(server, "c", add_constant(1.0), "response_cache { enable: true }")
    load(server, "e", None, ENSEMBLE)
    samples = scrape(port_of(server))
    for model in ("c", "e"):
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
            assert samples[f'nv_inference_request_failure{{model="{model}",reason="{reason}",version="1"}}'] == "0"
    # The model asks for a cache that the server does not have.
    assert not [name for name in samples if name.startswith("nv_cache")]


def test_summaries_histograms_and_tags(serve, repository: Path) -> None:
    config = """
    metric_tags { key: "team" value: "blue" }
    model_metrics { metric_control {
      metric_identifier { family: "rocserve_batch_size" } histogram_options { buckets: [ 1, 2 ] }
    } }
    """
    drop(repository, "m", add_constant(1.0), config)
    options = ("summary_latencies=true", "histogram_latencies=true", "counter_latencies=false", "other=1")
    flags = (
        *FLAGS,
        *(f"--metrics-config={option}" for option in options),
        "--metrics-config=summary_quantiles=0.5:0.1",
    )
    server: RocserveProcess = serve(repository, flags=flags)
    server.wait_until_ready()
    assert "--metrics-config: other=1: unknown setting, expected counter_latencies" in server.log_text
    client, port = server.client(), port_of(server)
    for rows in (1, 2, 3):
        ask(client, [rows, 2])
    labels = '_team="blue",model="m",version="1"'
    wait_until(lambda: scrape(port)[f"nv_inference_request_success{{{labels}}}"] == "3", "the count")
    samples = scrape(port)
    assert not any(name.startswith("nv_inference_request_duration_us") for name in samples)
    assert samples[f"nv_inference_compute_infer_summary_us_count{{{labels}}}"] == "3"
    assert float(samples[f'nv_inference_request_summary_us{{{labels},quantile="0.5"}}']) > 0
    assert samples[f'rocserve_request_duration_ms_bucket{{{labels},le="+Inf"}}'] == "3"
    sizes = [samples[f'rocserve_batch_size_bucket{{{labels},le="{bound}"}}'] for bound in ("1", "2", "+Inf")]
    assert sizes == ["1", "2", "3"]


METERED = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        family = pb_utils.MetricFamily("seen_rows", "Rows that were seen", pb_utils.MetricFamily.COUNTER)
        self.rows = family.Metric(labels={"model": args["model_name"]})
        family = pb_utils.MetricFamily("last_rows", "Rows of the last", pb_utils.MetricFamily.GAUGE)
        self.last = family.Metric()

    def execute(self, requests):
        responses = []
        for request in requests:
            rows = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            self.rows.increment(len(rows))
            self.last.set(len(rows))
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", rows)]))
        return responses
"""
METERED_CONFIG = """
backend: "python"
max_batch_size: 8
input { name: "X" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ 2 ] }
instance_group { count: 2 kind: KIND_CPU }
"""


def test_metrics_of_python_models(server: RocserveProcess) -> None:
    load(server, "metered", METERED, METERED_CONFIG)
    client, port = server.client(), port_of(server)
    wait_until(lambda: scrape(port).get('seen_rows{model="metered"}') == "0.0", "the metric")
    for rows in (1, 2, 3, 4):
        ask(client, [rows, 2], "metered")
    wait_until(lambda: scrape(port)['seen_rows{model="metered"}'] == "10.0", "the sum over both instances")
    # A worker's counts stay after its crash; the other instance goes on.
    crashed = server.workers("metered")[0]
    crashed.kill()
    wait_until(lambda: has_ended(crashed.pid), "the worker's end")
    wait_until(lambda: len(server.workers("metered")) == 2, "the worker that takes its place")
    for _ in range(4):
        ask(client, [1, 2], "metered")
    wait_until(lambda: scrape(port)['seen_rows{model="metered"}'] == "14.0", "the sum after a crash")
    wait_until(lambda: scrape(port)["last_rows"] == "1.0", "the last of the gauge")
    client.unload_model("metered")
    wait_until(lambda: 'seen_rows{model="metered"}' not in scrape(port), "the end of the model's metrics")


def test_models_come_and_go(server: RocserveProcess) -> None:
    port = port_of(server)
    folder = drop(server.repositories[0], "passing", add_constant(1.0))
    assert not any('model="passing"' in name for name in scrape(port))
    client = server.client()
    client.load_model("passing")
    assert any('model="passing"' in name for name in scrape(port))
    client.unload_model("passing")
    wait_until(lambda: not any('model="passing"' in name for name in scrape(port)), "the end of the model's numbers")
    assert folder.is_dir()
