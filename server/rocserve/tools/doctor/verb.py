"""Runs `rocserve doctor`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

import rocserve
from rocserve.backends.host import Host
from rocserve.backends.migraphx.program_cache import open_cache
from rocserve.cache.private_folder import cache_directory
from rocserve.core.errors import ServeError
from rocserve.settings import EngineSettings, engine_settings
from rocserve.settings.flag import SWITCH, flag, number, part
from rocserve.tools.doctor.engines import EngineExamination
from rocserve.tools.doctor.machine import Finding, State, examine_machine
from rocserve.tools.doctor.software import examine_software
from rocserve.tools.printing import console_on, say, show_folded, size
from rocserve.tools.progress import ToolProgress
from rocserve.tools.running import tool_log
from rocserve.tools.verb import Verb

_STYLES = {State.FACT: "", State.WORKS: "green", State.ABSENT: "yellow", State.BROKEN: "red"}
_WORDS = {State.FACT: "", State.WORKS: "works", State.ABSENT: "absent", State.BROKEN: "BROKEN"}


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    engines: EngineSettings = part(engine_settings)
    timeout_secs: float = flag(120.0, number("S", 0, float), "of each trial; 0 = none")
    json: bool = flag(False, SWITCH, "print JSON")


def run_doctor(options: DoctorOptions) -> int:
    """Print what is found; the exit status, 1 when something that is installed does not work."""
    out, settings = console_on(), options.engines
    with ToolProgress() as progress:
        engines = EngineExamination(settings, options.timeout_secs, progress.report, tool_log())
        # Before the software is looked at: cv2, once imported, changes $LD_LIBRARY_PATH.
        tried = [*engines.findings()]
        findings = [*examine_machine(Host()), *examine_software(), *_cache(settings), *tried]
    broken = sum(finding.state is State.BROKEN for finding in findings)
    if options.json:
        say(out, json.dumps({"rocserve": rocserve.__version__, "broken": broken, "findings": _plain(findings)}))
    else:
        _print(findings, broken, out)
    return 1 if broken else 0


def _cache(settings: EngineSettings) -> Iterator[Finding]:
    directory = cache_directory(settings)
    if not directory.exists():
        parent = next(path for path in directory.parents if path.exists())
        state = State.FACT if os.access(parent, os.W_OK) else State.BROKEN
        advice = "" if state is State.FACT else "name another folder with --cache-directory"
        yield Finding("cache", "directory", state, f"{directory}, which is made when it is needed", advice)
        yield _disk(parent)
        return
    try:
        entries = open_cache(settings).entries()
    except ServeError as error:
        yield Finding("cache", "directory", State.BROKEN, error.text, "name another folder with --cache-directory")
        return
    total = sum(entry.size_bytes for entry in entries)
    limit = size(settings.cache_bytes)
    yield Finding(
        "cache", "directory", State.FACT, f"{directory}: {len(entries)} programs, {size(total)} of at most {limit}"
    )
    yield _disk(directory)


def _disk(path: Path) -> Finding:
    usage = shutil.disk_usage(path)
    return Finding("cache", "disk", State.FACT, f"{size(usage.free)} of {size(usage.total)} free")


def _plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [
        {
            "section": finding.section,
            "name": finding.name,
            "state": finding.state.value,
            "text": finding.text,
            "advice": finding.advice,
        }
        for finding in findings
    ]


def _print(findings: Sequence[Finding], broken: int, out: Console) -> None:
    say(out, f"rocserve {rocserve.__version__}")
    for section, group in groupby(findings, key=lambda finding: finding.section):
        shown = Table(title=section, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=False)
        shown.add_column(no_wrap=True)
        shown.add_column(no_wrap=True)
        shown.add_column(overflow="fold")
        for finding in group:
            state = Text(_WORDS[finding.state], style=_STYLES[finding.state])
            shown.add_row(Text(finding.name), state, Text(" ".join(finding.text.split())))
        show_folded(out, shown)
    for advice in dict.fromkeys(finding.advice for finding in findings if finding.advice):
        say(out, f"advice: {advice}")
    say(out, f"{broken} broken" if broken else "nothing that is installed is broken")


VERB = Verb(
    "Look at this machine and run a tiny model through each engine. The exit status is 1 when something that is"
    " installed does not work.",
    DoctorOptions(),
    run_doctor,
)
