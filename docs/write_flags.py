"""Writes docs/reference/flags.md: the flags of `rocserve serve`, as the settings declare them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path

from rocserve.flags.arguments import FieldFlag, flags_of
from rocserve.flags.tritonserver import TRITON_FLAGS, Handling
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
OTHERS = "tritonserver's other flags"
_WIDTH = 120


def page() -> str:
    flags = sorted(flags_of(ServerSettings(), group="server"), key=lambda one: list(PAGES).index(one.group))
    groups = [(group, list(members)) for group, members in groupby(flags, key=lambda one: one.group)]
    headings = [*(group for group, _ in groups), OTHERS]
    lines = ["# Flags", "", *(f"- [{one}](#{_anchor(one)})" for one in headings), ""]
    lines += [
        "The flags of `rocserve serve`, as `--help` has them. Names and meanings are tritonserver's; those marked *",
        "are rocserve's. A switch may be written alone (`--reuse-grpc-port`) or with `=true` or `=false`.",
        "`make flags-page` writes this page.",
        "",
        "```sh",
        "rocserve serve --model-repository=model_repository --http-port=8000 --log-verbose=1",
        "```",
    ]
    for group, members in groups:
        lines += ["", f"## {group}", "", f"More: {PAGES[group]}.", "", "| flag | meaning |", "|---|---|"]
        lines += [f"| {', '.join(names)} | {_cell(text)} |" for text, names in _by_text(members).items()]
    lines += [
        "",
        f"## {OTHERS}",
        "",
        "tritonserver's flags that are not above, of 2.51 (24.10) to 2.73 (26.09) and of releases before 2.2.",
        "",
        "Accepted without effect, with a line in the log that says why:",
    ]
    others = [one for one in TRITON_FLAGS.values() if one.handling is not Handling.SERVED]
    unneeded = [f"`--{one.name}`" for one in others if one.handling is Handling.UNNEEDED]
    lines += [*textwrap.wrap(f"{', '.join(unneeded)}.", _WIDTH, break_long_words=False, break_on_hyphens=False), ""]
    lines += [
        "Refused: the server does not start. A front end's flags are accepted beside `=false` of its switch.",
        "",
        "| flags | what to do |",
        "|---|---|",
    ]
    refused = (one for one in others if one.handling is Handling.REFUSED)
    for text, alike in groupby(refused, key=lambda one: one.text):
        lines.append(f"| {', '.join(f'`--{one.name}`' for one in alike)} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _by_text(flags: Iterable[FieldFlag]) -> dict[str, list[str]]:
    """The names of the flags, by their help."""
    found: dict[str, list[str]] = {}
    for one in flags:
        found.setdefault(one.help, []).append(_names(one))
    return found


def _anchor(heading: str) -> str:
    return heading.lower().replace(" ", "-").replace("'", "")


def _names(one: FieldFlag) -> str:
    kind = one.flag.kind
    value = kind.shown or "|".join(kind.choices)
    names = [f"--{name}" for name in one.names]
    names[0] += f"={value}" if value else ""
    mark = "" if one.names[0] in TRITON_FLAGS else "*"
    return ", ".join(f"`{_cell(name)}`" for name in names) + mark


def _cell(text: str) -> str:
    linked = re.sub(r"docs/guides/([\w-]+\.md)", r"[\1](../guides/\1)", text)
    return linked.replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
