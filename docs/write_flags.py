"""Writes docs/reference/flags.md: the flags of `rocserve serve`, as the settings declare them."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path

from rocserve.flags.arguments import FieldFlag, flags_of
from rocserve.settings import ServerSettings

PAGE = Path(__file__).parent / "reference/flags.md"
PAGES = {
    "model repository": "[repository.md](repository.md), [many-models.md](../guides/many-models.md)",
    "server": "[operations.md](../guides/operations.md), [security.md](security.md#limits)",
    "engines": "[compile-cache.md](compile-cache.md), [migraphx.md](migraphx.md)",
    "workers": "[security.md](security.md#workers)",
    "HTTP": "[http.md](http.md)",
    "TLS": "[security.md](security.md)",
    "gRPC": "[operations.md](../guides/operations.md#grpc)",
    "connections": "[operations.md](../guides/operations.md#start-and-end)",
    "metrics": "[metrics.md](metrics.md)",
    "traces": "[tracing.md](tracing.md)",
    "log": "[logging.md](logging.md)",
}
"""By the group of flags, the page that says more."""
_NAMES = """
admin-address allow-amd-endpoints allow-mixed-tls allow-remote-files allow-remote-models allow-ui allow-worker-load
cache-directory cache-size-bytes drain-seconds drain-timeout-secs front-ends grpc-max-connection-idle
grpc-max-message-bytes grpc-message-timeout-secs hang-timeout-secs http-cors-origins http-keepalive-timeout-secs
http-request-timeout-secs http-use-ssl http-use-ssl-mutual labels listen-when-loaded load-timeout-secs
max-amd-endpoints max-connection-age-secs max-folder-entries max-loaded-models max-model-gpu-memory
max-model-instances max-model-memory max-model-versions max-queue-bytes max-queue-requests
max-request-memory max-request-rate-per-client max-requests-per-client metrics-use-ssl metrics-use-ssl-mutual
migraphx-root model-name model-wait-secs preprocess remote-cache-size-bytes repository-settle-secs
request-timeout-secs shared-workers spin wait-for-model worker-cgroups worker-core-dumps worker-environment
worker-file-bytes worker-memory-bytes worker-tasks worker-user write-timeout-secs
"""
OURS = frozenset(_NAMES.split())
"""The flags that tritonserver lacks."""


def page() -> str:
    flags = sorted(flags_of(ServerSettings(), group="server"), key=lambda one: list(PAGES).index(one.group))
    groups = [(group, list(members)) for group, members in groupby(flags, key=lambda one: one.group)]
    lines = ["# Flags", "", *(f"- [{group}](#{group.lower().replace(' ', '-')})" for group, _ in groups), ""]
    lines += [
        "The flags of `rocserve serve`, as `--help` has them. Names and meanings are tritonserver's; those marked *",
        "are rocserve's own. A switch may be written alone (`--reuse-grpc-port`) or with `=true` or `=false`.",
        "`make flags-page` makes this page of the settings.",
    ]
    for group, members in groups:
        lines += ["", f"## {group}", "", f"More in {PAGES[group]}.", "", "| flag | meaning |", "|---|---|"]
        lines += [f"| {_names(one)} | {_cell(one.help)} |" for one in members]
    return "\n".join(lines) + "\n"


def _names(one: FieldFlag) -> str:
    kind = one.flag.kind
    value = kind.shown or "|".join(kind.choices)
    names = [f"--{name}" for name in one.names]
    names[0] += f"={value}" if value else ""
    mark = "*" if one.names[0] in OURS else ""
    return ", ".join(f"`{_cell(name)}`" for name in names) + mark


def _cell(text: str) -> str:
    linked = re.sub(r"docs/guides/([\w-]+\.md)", r"[\1](../guides/\1)", text)
    return linked.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
