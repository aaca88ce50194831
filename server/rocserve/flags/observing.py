"""Flags of metrics, traces and the log."""

from __future__ import annotations

from typing import Any

from rocserve.flags.flag import Flag
from rocserve.flags.values import COUNT, PORT, POSITIVE_MILLISECONDS, boolean, file, part_of, scoped_setting, setting

METRICS = (
    Flag("allow-metrics", "metrics.allow", boolean, "serve metrics over HTTP, at /metrics (default true)"),
    Flag("metrics-address", "metrics.address", str, "the address to listen on (default 0.0.0.0)", value="ADDRESS"),
    Flag("metrics-port", "metrics.port", PORT, "the port to listen on; 0 = any free one (default 8002)"),
    Flag(
        "metrics-interval-ms",
        "metrics.interval_ms",
        POSITIVE_MILLISECONDS,
        "how often the gauges of GPUs and CPUs are read (default 2000)",
    ),
    Flag("allow-gpu-metrics", "metrics.gpu", boolean, "metrics of GPUs (default true)"),
    Flag("allow-cpu-metrics", "metrics.cpu", boolean, "metrics of the processors and of memory (default true)"),
    Flag(
        "metrics-config",
        "metrics.config",
        setting,
        "which latencies are told how: counter_latencies, summary_latencies or histogram_latencies=true|false,"
        " summary_quantiles=0.5:0.05,...; repeatable",
        repeatable=True,
    ),
)

_IN_FULL = "the same as --trace-config={}=VALUE"
_OLDER: dict[str, Any] = {"repeatable": True, "value": "VALUE"}

TRACE = (
    Flag(
        "trace-config",
        "trace.values",
        scoped_setting,
        "how requests are traced: mode, level, rate, count, and of a mode its own: triton,file=trace.json or"
        " opentelemetry,url=http://localhost:4318/v1/traces; repeatable",
        repeatable=True,
        value="[MODE,]SETTING=VALUE",
    ),
    # tritonserver's older flags; what is written last counts, whichever way.
    Flag("trace-file", "trace.values", part_of("triton", "file"), _IN_FULL.format("triton,file"), **_OLDER),
    Flag("trace-level", "trace.values", part_of("", "level"), _IN_FULL.format("level"), **_OLDER),
    Flag("trace-rate", "trace.values", part_of("", "rate"), _IN_FULL.format("rate"), **_OLDER),
    Flag("trace-count", "trace.values", part_of("", "count"), _IN_FULL.format("count"), **_OLDER),
    Flag(
        "trace-log-frequency",
        "trace.values",
        part_of("triton", "log-frequency"),
        _IN_FULL.format("triton,log-frequency"),
        **_OLDER,
    ),
)

LOG = (
    Flag("log-info", "log.info", boolean, "write information (default true)"),
    Flag("log-warning", "log.warning", boolean, "write warnings (default true)"),
    Flag("log-error", "log.error", boolean, "write errors (default true)"),
    Flag("log-verbose", "log.verbose", COUNT, "write details from 1 on (default 0)"),
    Flag("log-format", "log.format", str, "how a line begins (default default)", choices=("default", "ISO8601")),
    Flag("log-file", "log.file", file, "write to this file, not to standard error"),
)
