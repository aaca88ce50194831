"""What tells versions of a model apart: the completed configuration beside its file, and latencies."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from rocserve.config.pbtxt import parse_model_config
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.statistics import ModelStatistics
from rocserve.protocol import page_pb2
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.services.version_details import compared, config_lines, version_details

COMPLETED = ModelConfig(name="m", max_batch_size=4)


def report(file: str = "", text: str = "", is_cut: bool = False) -> page_pb2.LoadReportResponse:
    return page_pb2.LoadReportResponse(config_file=file, config_text=text, config_is_cut=is_cut)


class Models:
    def __init__(self, report: page_pb2.LoadReportResponse) -> None:
        self.statistics = ModelStatistics()
        version: Any = SimpleNamespace(
            version=1, config_message=COMPLETED.SerializeToString(), statistics=self.statistics
        )
        tables = ServingTableHolder()
        tables.table = ServingTable({"m": ServedModel("m", {1: version}, version)})
        repository: Any = SimpleNamespace(load_report=self.load_report)
        self.report = report
        self.parts = tables, repository

    async def load_report(self, name: str, version: int) -> Any:
        assert (name, version) == ("m", 1)
        return self.report, None

    async def details(self) -> page_pb2.VersionDetailsResponse:
        return await version_details(*self.parts, page_pb2.VersionDetailsRequest(name="m", version="1"))

    async def lines(self) -> list[tuple[str, str]]:
        return [(line.mark, line.text) for line in (await self.details()).config]


async def test_the_configuration_beside_its_file() -> None:
    models = Models(report("config.pbtxt", "max_batch_size: 8 # or so"))
    assert await models.lines() == [("-", "max_batch_size: 8"), ("+", 'name: "m"'), ("+", "max_batch_size: 4")]
    assert (await models.details()).config_file == "config.pbtxt"


@pytest.mark.parametrize(
    "written",
    [
        report(),
        report("config.pbtxt", "max_batch_sise: 8"),
        report("config.pbtxt", "max_batch_size: 8", is_cut=True),
        report("model.toml", "max_batch_size = 8"),
    ],
    ids=["none", "faulty", "too long", "another dialect"],
)
async def test_without_a_file_to_compare_with_no_line_is_marked(written: page_pb2.LoadReportResponse) -> None:
    models = Models(written)
    assert await models.lines() == [("", 'name: "m"'), ("", "max_batch_size: 4")]
    assert (await models.details()).config_file == ""


async def test_latencies_by_bucket_without_the_empty_ends() -> None:
    models = Models(report())
    assert len((await models.details()).latencies) == 0
    now = time.monotonic_ns()
    for milliseconds in (0.3, 1.5, 1.5, 7, 7000):
        models.statistics.record_cache_hit(now - int(1e6 * milliseconds), now)
    found = [(bucket.up_to_us, bucket.count) for bucket in (await models.details()).latencies]
    assert found[:5] == [(500, 1), (1000, 0), (2000, 2), (5000, 0), (10_000, 1)]
    assert found[-1] == (0, 1)
    assert sum(count for _, count in found) == 5


def test_what_was_completed_and_what_does_not_hold() -> None:
    written = parse_model_config('# a comment\nmax_batch_size: 8, input [{ dims: [ 4 ], name: "X" }]', "config.pbtxt")
    completed = parse_model_config(
        'name: "m" max_batch_size: 4 input { name: "X" data_type: TYPE_FP32 dims: 4 }', "config.pbtxt"
    )
    assert compared(written, completed) == [
        ("-", "max_batch_size: 8"),
        ("+", 'name: "m"'),
        ("+", "max_batch_size: 4"),
        ("", "input {"),
        ("", '  name: "X"'),
        ("+", "  data_type: TYPE_FP32"),
        ("", "  dims: 4"),
        ("", "}"),
    ]
    assert compared(completed, completed) == [("", line) for line in config_lines(completed)]


def test_texts_of_any_language_are_readable() -> None:
    assert config_lines(ModelConfig(name="模型 <b>")) == ['name: "模型 <b>"']


def test_what_is_too_long_is_not_compared() -> None:
    long = ModelConfig(input=[{"name": str(number)} for number in range(1000)])
    assert compared(long, long) is None
