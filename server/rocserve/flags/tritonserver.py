"""The effect of each of tritonserver's flags here.

The names are those of tritonserver 2.51 (24.10), those added until 2.73 (26.09), --grpc-infer-cq-count, which was
proposed in September 2026, and those that releases before 2.2 had.
"""

from __future__ import annotations

import argparse
import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PREFIX = "tritonserver."
"""Begins the arguments' names of flags that no setting declares."""


class Handling(enum.Enum):
    SERVED = "served"
    """The settings declare it (settings/)."""
    UNNEEDED = "accepted, without effect"
    """It tunes a part that rocserve does not have. Charts and scripts use it; the log says why it has no effect."""
    REFUSED = "refused"
    """The server would not do what the user expects, so it does not start."""


@dataclass(frozen=True, slots=True)
class TritonFlag:
    name: str
    """Without the leading dashes."""
    handling: Handling = Handling.SERVED
    text: str = ""
    """UNNEEDED: why it has no effect; REFUSED: the alternative."""
    is_boolean: bool = False
    """Needs no value, which means true."""
    switch: str = ""
    """The flag that turns the part of a refused flag on and off: with the value false both are accepted. "" = none."""


_SERVED = """
allow-client-shm allow-cpu-metrics allow-gpu-metrics allow-grpc allow-http allow-metrics backend-config cache-config
cache-directory disable-auto-complete-config exit-on-error exit-timeout-secs grpc-address
grpc-header-forward-pattern grpc-http2-max-ping-strikes grpc-http2-max-pings-without-data
grpc-http2-min-recv-ping-interval-without-data grpc-infer-response-compression-level
grpc-keepalive-permit-without-calls grpc-keepalive-time grpc-keepalive-timeout grpc-max-connection-age
grpc-max-connection-age-grace grpc-port grpc-restricted-protocol grpc-root-cert grpc-server-cert grpc-server-key
grpc-use-ssl grpc-use-ssl-mutual help host-policy http-address http-header-forward-pattern http-max-input-size
http-port http-restricted-api id load-model log-error log-file log-format log-info log-verbose log-warning
metrics-address metrics-config metrics-interval-ms metrics-port model-config-name model-control-mode
model-load-thread-count model-namespacing model-repository model-store rate-limit rate-limit-resource
repository-poll-secs response-cache-byte-size reuse-grpc-port reuse-http-port strict-model-config strict-readiness
trace-config trace-count trace-file trace-level trace-log-frequency trace-rate
"""

_FRONT_END_PROCESSES = "rocserve has no gRPC threads and queues; --front-ends=N sets the processes that serve clients"
_LOADED_AS_PARTS = "are parts of rocserve; it loads none from a folder"
_NO_TENSORFLOW = "remove the flag: no model runs in TensorFlow (docs/guides/from-triton.md has the backends)"


def _unneeded(name: str, why: str, is_boolean: bool = False) -> TritonFlag:
    return TritonFlag(name, Handling.UNNEEDED, why, is_boolean)


def _refused(name: str, instead: str, is_boolean: bool = False, switch: str = "") -> TritonFlag:
    return TritonFlag(name, Handling.REFUSED, instead, is_boolean, switch)


def _front_end(subject: str, prefix: str, *others: str) -> Iterator[TritonFlag]:
    """Yield the flags of a front end that rocserve lacks: its switch, and those that need the switch."""
    switch = f"allow-{prefix}"
    text = f"rocserve has no {subject} front end; remove the flag, or write --{switch}=false"
    yield _refused(switch, text, True, switch)
    yield from (_refused(f"{prefix}-{other}", text, switch=switch) for other in others)


TRITON_FLAGS = {
    one.name: one
    for one in (
        *map(TritonFlag, _SERVED.split()),
        _unneeded("backend-directory", f"the backends {_LOADED_AS_PARTS}"),
        _unneeded("repoagent-directory", f"repository agents (checksum) {_LOADED_AS_PARTS}"),
        _unneeded("buffer-manager-thread-count", "the server's request thread and the models' workers copy tensors"),
        _unneeded("pinned-memory-pool-byte-size", "rocserve has no pool of pinned memory; engines copy to the GPU"),
        _unneeded("cuda-memory-pool-byte-size", "rocserve has no pool of GPU memory; engines allocate it"),
        _unneeded(
            "cuda-virtual-address-size", "rocserve reserves no address space for the implicit state of sequences"
        ),
        _unneeded("enable-peer-access", "engines decide about access between GPUs", is_boolean=True),
        _unneeded(
            "min-supported-compute-capability",
            "instance_group's `gpus` and HIP_VISIBLE_DEVICES choose GPUs",
        ),
        _unneeded("grpc-infer-thread-count", _FRONT_END_PROCESSES),
        _unneeded("grpc-infer-cq-count", _FRONT_END_PROCESSES),
        _unneeded("grpc-infer-allocation-pool-size", "rocserve keeps no request or response objects for reuse"),
        _unneeded(
            "grpc-max-response-pool-size", "--max-request-memory limits the bytes of responses that clients do not read"
        ),
        _unneeded(
            "model-load-retry-count",
            "rocserve retries failed loads without a count; with --exit-on-error=true the first failure ends the start",
        ),
        _unneeded(
            "http-thread-count", "rocserve has no HTTP threads; --front-ends=N sets the processes that serve clients"
        ),
        _refused("model-load-gpu-limit", "use --max-model-gpu-memory=SIZE, the limit of all models"),
        *_front_end("SageMaker", "sagemaker", "port", "safe-port-range", "thread-count"),
        *_front_end("Vertex AI", "vertex-ai", "port", "thread-count", "default-model"),
        # Flags of releases before 2.2.
        _refused("allow-model-control", "write --model-control-mode=explicit instead", True, "allow-model-control"),
        _refused("allow-poll-model-repository", "write --model-control-mode=poll, or none, instead", True),
        _refused("allow-profiling", "remove the flag; --trace-config traces requests", True, "allow-profiling"),
        _refused("api-version", "remove the flag: the only protocol is KServe v2"),
        _refused("grpc-stream-infer-thread-count", f"remove the flag: {_FRONT_END_PROCESSES}"),
        _refused("http-health-port", "remove the flag: --http-port serves health, at /v2/health/ready"),
        _refused("tf-add-vgpu", _NO_TENSORFLOW),
        _refused("tf-allow-soft-placement", _NO_TENSORFLOW),
        _refused("tf-gpu-memory-fraction", _NO_TENSORFLOW),
    )
}
"""By the flag's name."""


def add_triton_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that no setting declares, without help."""
    for one in TRITON_FLAGS.values():
        if one.handling is not Handling.SERVED:
            alone: dict[str, Any] = {"nargs": "?", "const": "true"} if one.is_boolean else {}
            dest = f"{_PREFIX}{one.name}"
            parser.add_argument(f"--{one.name}", dest=dest, action="append", help=argparse.SUPPRESS, **alone)


def refusal(arguments: argparse.Namespace) -> str:
    """Return the first refused flag of the command line with the alternative; "" = none."""
    given = _given(arguments)
    for one in map(TRITON_FLAGS.__getitem__, given):
        if one.handling is Handling.REFUSED and not _is_false(given.get(one.switch, ())):
            return f"--{one.name}={given[one.name][-1]} is not supported here: {one.text}"
    return ""


def without_effect(arguments: argparse.Namespace) -> list[str]:
    """Return a line for the log for each given flag that is accepted and has no effect."""
    given = _given(arguments)
    lines = []
    for one in map(TRITON_FLAGS.__getitem__, given):
        if one.handling is Handling.UNNEEDED:
            lines.append(f"--{one.name} has no effect: {one.text}")
        elif one.switch != one.name:
            lines.append(f"--{one.name} has no effect: --{one.switch} is false")
    return lines


def is_of_triton_caches(folder: Path) -> bool:
    """Return whether the folder is tritonserver's --cache-directory, which has a different meaning here."""
    # tritonserver's default of --cache-directory.
    return folder == Path("/opt/tritonserver/caches") or any(folder.glob("*/libtritoncache*.so"))


def _given(arguments: argparse.Namespace) -> dict[str, Sequence[str]]:
    found = {name: values for name, values in vars(arguments).items() if name.startswith(_PREFIX) and values}
    return {name.removeprefix(_PREFIX): values for name, values in found.items()}


def _is_false(values: Sequence[str]) -> bool:
    return bool(values) and values[-1].lower() in {"false", "0", "off"}
