"""Reports the differences between the versions of a model, for the page at the HTTP port."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Sequence

from rocserve.config.pbtxt import format_model_config, parse_model_config
from rocserve.core.errors import ServeError
from rocserve.core.latencies import counts_between
from rocserve.core.printable import encodable
from rocserve.core.serving import ServingTableHolder
from rocserve.protocol import page_pb2
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.repository.model_repository import ModelRepository


async def version_details(
    tables: ServingTableHolder, repository: ModelRepository, request: page_pb2.VersionDetailsRequest
) -> page_pb2.VersionDetailsResponse:
    version = tables.table.find(request.name, request.version)
    report, _ = await repository.load_report(request.name, version.version)
    # Long configurations take a while.
    response = await asyncio.to_thread(_with_config, version.config_message, report)
    # Microseconds, from 0.1 ms to 5 s.
    bounds_us = tuple(step * 10**power for power in range(2, 7) for step in (1, 2, 5))
    counts = counts_between(version.statistics.latency_buckets(), bounds_us)
    met = [index for index, count in enumerate(counts) if count]
    for index in range(met[0], met[-1] + 1) if met else ():
        bound = bounds_us[index] if index < len(bounds_us) else 0
        response.latencies.add(up_to_us=bound, count=counts[index])
    return response


def _with_config(config_message: bytes, report: page_pb2.LoadReportResponse) -> page_pb2.VersionDetailsResponse:
    completed = ModelConfig.FromString(config_message)
    response = page_pb2.VersionDetailsResponse()
    lines = None
    if report.config_file.endswith(".pbtxt") and not report.config_is_cut:
        try:
            lines = compared(parse_model_config(report.config_text, report.config_file), completed)
        except ServeError:
            pass  # The file has changed since: the report of its load shows the fault.
    if lines is not None:
        response.config_file = report.config_file
    for mark, text in lines if lines is not None else (("", line) for line in config_lines(completed)):
        response.config.add(mark=mark, text=encodable(text))
    return response


def config_lines(message: ModelConfig) -> Sequence[str]:
    """Return a configuration in protobuf's text format."""
    return format_model_config(message).splitlines()


def compared(written: ModelConfig, completed: ModelConfig) -> Sequence[tuple[str, str]] | None:
    """Return the lines of both, each with "+" if it was completed, "-" if it was written and replaced, "" if it is in
    both; None if they are too long to compare. Order, comments and brackets of the file do not count."""
    before, after = config_lines(written), config_lines(completed)
    # In the worst case the time grows with the square of the lines.
    if len(before) + len(after) > 3000:
        return None
    lines: list[tuple[str, str]] = []
    for what, first, end, other_first, other_end in difflib.SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if what == "equal":
            lines += [("", line) for line in before[first:end]]
        else:
            lines += [("-", line) for line in before[first:end]]
            lines += [("+", line) for line in after[other_first:other_end]]
    return lines
