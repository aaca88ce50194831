"""Runs `rocserve doctor`: tries each engine, and prints what it finds."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rich.table import Column
from rich.text import Text

import rocserve
from rocserve.backends.host import Host
from rocserve.backends.installed import is_installed
from rocserve.backends.migraphx.compiling.child_process import migraphx_jobs
from rocserve.backends.migraphx.compiling.probe_jobs import LibraryJob, LibraryResult
from rocserve.backends.migraphx.compiling.program_cache import open_cache
from rocserve.backends.migraphx.engine_choice import MIGRAPHX
from rocserve.backends.migraphx.installation import INSTALL_LINES, find_installation
from rocserve.backends.migraphx.options import Target
from rocserve.backends.onnx.engine_choice import ONNXRUNTIME
from rocserve.backends.rocal import ROCAL_MODULE
from rocserve.cache.folders import cache_directory
from rocserve.core.errors import ServeError
from rocserve.core.printable import readable_size as size
from rocserve.jobs.runner import JobEngine, JobRunner
from rocserve.repository.machine import ThisMachine
from rocserve.settings import EngineSettings, engine_settings
from rocserve.settings.flag import SWITCH, flag, number, part
from rocserve.verbs.doctor.machine import GPU_DRIVER, NO_GPUS, Finding, State, examine_machine, examine_software
from rocserve.verbs.doctor.trial import NETWORK, PIPELINE, TinyModel, try_engine
from rocserve.verbs.printing import ToolProgress, console_on, say, say_json, show, table
from rocserve.verbs.verb import Verb, tool_log

_ENGINE = partial(Finding, "engines")


@dataclass(frozen=True, slots=True)
class EngineExamination:
    settings: EngineSettings
    timeout_seconds: float
    """Limit of each trial; 0 = none."""
    report: Callable[[str], None]

    def findings(self) -> Iterator[Finding]:
        if is_installed("onnxruntime"):
            yield self._tried("ONNX Runtime", NETWORK, {"engine": "cpu"})
            yield from self._plugins()
            if (gpus := Host().gpus) and ONNXRUNTIME.has_gpu_parts(ThisMachine(self.settings)):
                yield self._tried("ONNX Runtime on a GPU", NETWORK, {"engine": ONNXRUNTIME.name}, gpus[0])
        else:
            yield _ENGINE("ONNX Runtime", State.ABSENT, "not installed")
        yield from self._migraphx()
        for name, module, engine, absent in (
            ("rocAL's CPU engine", "cv2", "cpu", "cv2 is not installed"),
            ("rocAL", ROCAL_MODULE, "rocal", f"the Python module {ROCAL_MODULE} is not installed"),
        ):
            if is_installed(module):
                yield self._tried(name, PIPELINE, {"engine": engine})
            else:
                yield _ENGINE(name, State.ABSENT, absent)

    def _plugins(self) -> Iterator[Finding]:
        # Imported here because it imports ONNX Runtime.
        from rocserve.backends.onnx.plugins import PluginReports, PluginsJob, installed_plugins, migraphx_library

        if not installed_plugins():
            return
        name = "ONNX Runtime's plugins"
        runner, job = JobRunner(JobEngine(name), self.report, tool_log()), PluginsJob(migraphx_library(self.settings))
        limit = self.timeout_seconds
        try:
            found = runner.run(job, PluginReports, timeout_seconds=limit, limit_name="--timeout-secs")
        except ServeError as error:
            yield _ENGINE(name, State.BROKEN, error.text, "a plugin of ONNX Runtime cannot be loaded")
            return
        for one in found.plugins:
            if one.fault:
                advice = f"{one.package}: install what its library needs, or uninstall it"
                yield _ENGINE(one.provider, State.BROKEN, f"{one.package}: {one.fault}", advice)
            elif not one.devices:
                text = f"{one.package} finds no device that it can use (ONNX Runtime sees: {found.seen})"
                yield _ENGINE(one.provider, State.ABSENT, text)
            else:
                yield _ENGINE(one.provider, State.FACT, f"{one.package}, for {', '.join(one.devices)}")

    def _migraphx(self) -> Iterator[Finding]:
        try:
            found = find_installation(self.settings)
        except ServeError as error:
            # A library that the settings name should exist.
            state = State.BROKEN if self.settings.migraphx_root else State.ABSENT
            yield _ENGINE(
                "MIGraphX", state, error.text, f"MIGraphX (for AMD GPUs): {INSTALL_LINES}",
                is_for_gpus=state is State.ABSENT,
            )  # fmt: skip
            return
        places = [found.library or "no C library"]
        if found.module_folder:
            places.append(f"Python module in {found.module_folder}")
        if found.loader:
            places.append("started with its own C library")
        yield _ENGINE("MIGraphX is in", State.FACT, f"{', '.join(places)} (found by {found.origin})")
        runner = JobRunner(migraphx_jobs(found), self.report, tool_log())
        try:
            library = runner.run(
                LibraryJob(), LibraryResult, timeout_seconds=self.timeout_seconds, limit_name="--timeout-secs"
            )
        except ServeError as error:
            yield _ENGINE("MIGraphX", State.BROKEN, error.text, "MIGraphX is installed, but cannot be loaded")
            return
        version = library.version or "of unknown version"
        yield _ENGINE("MIGraphX", State.FACT, f"{version}, reached by {library.binding}")
        for target in Target:
            gpus = Host().gpus if target is Target.GPU else ()
            if fault := library.targets[target.value]:
                yield target_fault(target, fault)
            elif target is Target.GPU and not gpus:
                text = "installed, but there is no GPU that this process may use"
                yield _ENGINE(_target_name(target), State.ABSENT, text)
            else:
                parameters = {"engine": MIGRAPHX.name, "target": target.value}
                yield self._tried(_target_name(target), NETWORK, parameters, next(iter(gpus), None))

    def _tried(self, name: str, model: TinyModel, parameters: Mapping[str, str], device: int | None = None) -> Finding:
        self.report(f"{name}: trying a tiny model")
        try:
            seconds = try_engine(model, parameters, self.settings, self.timeout_seconds, device)
        except ServeError as error:
            return _ENGINE(name, State.BROKEN, error.text, f"{name} does not work; see its line above")
        return _ENGINE(name, State.WORKS, f"a tiny model, right answer, {seconds:.2f} s with its process")


def target_fault(target: Target, fault: str) -> Finding:
    """Return the finding on a target that does not load. MIGraphX's message tells if it is absent or broken."""
    own_library = f"libmigraphx_{target.value}.so"
    name = _target_name(target)
    if fault.partition(own_library)[2].startswith(": cannot open shared object file"):
        return _ENGINE(name, State.ABSENT, f"{own_library} is not installed")
    advice = f"{name}: a library that {own_library} needs is missing or of another version (ldd on it shows which)"
    return _ENGINE(name, State.BROKEN, fault, advice)


def _target_name(target: Target) -> str:
    return f"MIGraphX on {target.value}"


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    engines: EngineSettings = part(engine_settings)
    timeout_secs: float = flag(120.0, number("S", 0, float), "time limit of each trial; 0 = no limit")
    json: bool = flag(False, SWITCH, "print JSON")


def run_doctor(options: DoctorOptions) -> int:
    """Print the findings and return the exit status: 1 if something that is installed does not work."""
    out, settings, host = console_on(), options.engines, Host()
    with ToolProgress() as progress:
        engines = EngineExamination(settings, options.timeout_secs, progress.report)
        # The engines come first, because examining the software imports cv2, which changes $LD_LIBRARY_PATH.
        tried = [*engines.findings()]
        findings = [*examine_machine(host), *examine_software(host), *_cache(settings), *tried]
    broken = sum(finding.state is State.BROKEN for finding in findings)
    if options.json:
        say_json(out, {"rocserve": rocserve.__version__, "broken": broken, "findings": findings})
        return 1 if broken else 0
    states = {
        State.FACT: Text(""),
        State.WORKS: Text("works", "green"),
        State.ABSENT: Text("absent", "yellow"),
        State.BROKEN: Text("BROKEN", "red"),
    }
    say(out, f"rocserve {rocserve.__version__}")
    for section, group in groupby(findings, key=lambda finding: finding.section):
        rows = [(one.name, states[one.state], " ".join(one.text.split())) for one in group]
        found = table(section, ("", "", Column(overflow="fold")), rows, left=2, has_header=False)
        show(out, found, is_folded=True)
    for line in closing_lines(findings):
        say(out, line)
    return 1 if broken else 0


def closing_lines(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield what the user should do, and what works. Without a GPU the parts that only GPUs need are one line."""
    has_gpus = not any(one.name == NO_GPUS and one.state is State.ABSENT for one in findings) or any(
        one.name == GPU_DRIVER for one in findings
    )
    advised = [one for one in findings if one.advice]
    for advice in dict.fromkeys(one.advice for one in advised if has_gpus or not one.is_for_gpus):
        yield f"advice: {advice}"
    broken = sum(one.state is State.BROKEN for one in findings)
    yield f"{broken} broken" if broken else "nothing that is installed is broken"
    works = [one.name for one in findings if one.state is State.WORKS]
    yield f"works here: {', '.join(works)}" if works else "no engine works here, so no model file can be served"
    lacking = [one.name for one in advised if one.is_for_gpus]
    if lacking and not has_gpus:
        yield f"an AMD GPU would also need {', '.join(lacking)}: docs/guides/install-rocm.md has the commands"


def _cache(settings: EngineSettings) -> Iterator[Finding]:
    place = directory = cache_directory(settings)
    found, advice = partial(Finding, "cache"), "name another folder with --cache-directory"
    if not directory.exists():
        place = next(path for path in directory.parents if path.exists())
        text = f"{directory}, created when needed"
        if os.access(place, os.W_OK):
            yield found("directory", State.FACT, text)
        else:
            yield found("directory", State.BROKEN, text, advice)
    else:
        try:
            entries = open_cache(settings).entries()
        except ServeError as error:
            yield found("directory", State.BROKEN, error.text, advice)
            return
        total, limit = size(sum(entry.size_bytes for entry in entries)), size(settings.cache_bytes)
        yield found("directory", State.FACT, f"{directory}: {len(entries)} programs, {total} of at most {limit}")
    usage = shutil.disk_usage(place)
    yield found("disk", State.FACT, f"{size(usage.free)} of {size(usage.total)} free")


VERB = Verb(
    "Check this machine, and run a tiny model through each engine. The exit status is 1 when something that is"
    " installed does not work.",
    DoctorOptions(),
    run_doctor,
)
