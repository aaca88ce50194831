"""Runs `rocserve tune MODEL`: times batch sizes and numbers of instances, and recommends one setting."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rocserve.backends.pytorch.engine_choice import MIGRAPHX_ONNX
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.extras import install_command
from rocserve.repository.machine import ThisMachine
from rocserve.settings.flag import SWITCH, Kind, flag, number, one_of, part
from rocserve.tools.bench import LATENCY_COLUMNS, latency_cells
from rocserve.tools.measuring.candidates import ENGINES, MIGRAPHX, main_engine, prepare, random_inputs
from rocserve.tools.measuring.figures import LatencySummary, Timing, summarise
from rocserve.tools.measuring.workers import ToolWorkers
from rocserve.tools.model_choice import COUNTS, ModelOptions, ToolModel, find_model
from rocserve.tools.printing import ToolProgress, complain, console_on, counted, say, say_json, show, table
from rocserve.tools.tune.config_text import ServingChoice, config_path, write_choice
from rocserve.tools.verb import Verb


@dataclass(frozen=True, slots=True)
class Measurement:
    batch_size: int
    """0 = the model does not batch, and a run is one request."""
    instances: int
    latency: LatencySummary
    """Latency of a batch while all instances run."""
    throughput: float
    """Rows per second of all instances together."""


def recommend(measurements: Sequence[Measurement], latency_budget_ms: float | None) -> tuple[Measurement, str]:
    """Return the best measurement and the reason: the knee, or with a budget the highest throughput with a p95 latency
    within it. Raises ValueError if nothing is within the budget."""
    if latency_budget_ms is None:
        best = knee(measurements)
        if best.throughput == max(one.throughput for one in measurements):
            return best, "the highest throughput; no lower latency is worth what it costs of it"
        return best, "the knee of the curve: more throughput costs more in latency than it brings"
    within = [one for one in measurements if one.latency.p95 <= latency_budget_ms]
    if not within:
        fastest = min(measurements, key=lambda one: one.latency.p95)
        raise ValueError(
            f"no setting has a p95 latency within {latency_budget_ms:g} ms; the least is {fastest.latency.p95:.3f} ms,"
            f" of {setting(fastest)}"
        )
    best = max(within, key=lambda one: (one.throughput, -one.latency.p95))
    return best, f"the highest throughput with a p95 latency within {latency_budget_ms:g} ms"


def knee(measurements: Sequence[Measurement]) -> Measurement:
    """Return the measurement whose share of the highest throughput exceeds its share of that setting's latency the
    most: in a plot, the point highest above the line from the origin to the setting with the highest throughput."""
    end = max(measurements, key=lambda one: (one.throughput, -one.latency.p95))
    return max(measurements, key=lambda one: one.throughput / end.throughput - one.latency.p95 / end.latency.p95)


def setting(one: Measurement) -> str:
    instances = counted(one.instances, "instance")
    return f"batch size {one.batch_size}, {instances}" if one.batch_size else instances


def _sweep(
    model: ToolModel, engine: str, options: TuneOptions, progress: ToolProgress
) -> tuple[str, list[Measurement], list[str]]:
    """Measure each setting. Return the engine's description ("MIGraphX 2.14.0 (c_api)"), the measurements, and the
    reasons of failed ones. Raises ServeError if the engine cannot be opened for the first number of instances."""
    found: list[Measurement] = []
    failures: list[str] = []
    description, candidate = "", prepare(model, engine)

    async def measure(count: int) -> None:
        nonlocal description
        async with ToolWorkers(model.source.settings, progress.report) as workers:
            opened = await candidate.open(workers, {}, count)
            description, timing = opened.description, options.timing
            progress.steps(len(opened.inputs))
            for batch_size, inputs in opened.inputs.items():
                progress.report(f"timing batch size {batch_size}, {counted(count, 'instance')}")
                batch = random_inputs(inputs)
                if timing.warm_up:
                    await opened.workers.run(batch, timing.warm_up)
                latency = summarise((await opened.workers.run(batch, timing.repeats, timing.seconds)).latencies)
                rate = count * max(1, batch_size) * 1e3 / latency.mean
                found.append(Measurement(batch_size, count, latency, rate))
                progress.done()

    for count in sorted(options.instances):
        progress.report(f"opening {counted(count, 'instance')}")
        try:
            asyncio.run(measure(count))
        except ServeError as error:
            if not found:
                raise
            failures.append(f"{counted(count, 'instance')}: {error.text}")
    return description, found, failures


@dataclass(frozen=True, slots=True)
class TuneOptions:
    model: ModelOptions = part(ModelOptions, "model")
    engine: str = flag(
        "auto", one_of(("auto", *ENGINES)), "the engine to time (default auto: as a server would choose)"
    )
    instances: tuple[int, ...] = flag((1, 2), COUNTS, "numbers of instances to try (default 1,2)")
    latency_budget_ms: float | None = flag(
        None,
        number("MS", 0.001, float),
        "recommend the highest throughput with a p95 latency of at most MS (default: the knee of the curve)",
    )
    plot: Path | None = flag(None, Kind("FILE.png", Path), "draw throughput over latency into this file")
    write: bool = flag(False, SWITCH, "write the recommendation into the model's config.pbtxt")
    timing: Timing = part(Timing, "timing")
    json: bool = flag(False, SWITCH, "print JSON")


def tune(options: TuneOptions) -> int:
    """Measure the model, print a recommendation and return the exit status: 1 if a setting could not be measured.
    Raises ServeError if the model cannot be measured, if nothing is within the budget, or if the result cannot be
    written."""
    model, out = find_model(options.model), console_on()
    # These checks come before minutes of measuring.
    path = config_path(model, options.model.config_name) if options.write else None
    if options.plot is not None:
        try:
            importlib.import_module("matplotlib")
        except ImportError as error:
            raise unavailable(f"--plot needs matplotlib ({error}); run: {install_command('tools')}") from None
        if options.plot.suffix.lower() != ".png":
            raise invalid_argument(f"--plot: expected a name that ends in .png, got '{options.plot}'")
        if not options.plot.absolute().parent.is_dir():
            raise invalid_argument(f"--plot: the folder {options.plot.absolute().parent} does not exist")
    # A server's default limit for one model, on the CPUs or on one GPU, because each instance is a thread or a process.
    machine, instances = ThisMachine(model.source.settings), counted(max(options.instances), "instance")
    most = max(machine.most_instances(0), machine.most_instances(1) if machine.gpus else 0)
    if max(options.instances) > most:
        raise invalid_argument(f"--instances: {instances} asked for, at most {most} can be measured here")
    engine = main_engine(model, options.engine)
    with ToolProgress() as progress:
        description, measurements, failures = _sweep(model, engine, options, progress)
    title = f"{model.source.name} on {description}"
    # With --json, standard output gets nothing but JSON.
    texts = console_on(sys.stderr) if options.json else out
    try:
        best, reason = recommend(measurements, options.latency_budget_ms)
    except ValueError as error:
        _print_table(title, measurements, None, texts)
        raise invalid_argument(str(error)) from None
    if options.json:
        result = {
            "model": model.source.name,
            "engine": engine,
            "description": description,
            "measurements": measurements,
            "recommended": best,
            "reason": reason,
        }
        say_json(out, result)
    else:
        _print_table(title, measurements, best, out)
        say(out, f"recommended: {setting(best)}, {reason}")
    for failure in failures:
        complain(f"rocserve tune: {failure}")
    if options.plot is not None:
        from rocserve.tools.tune.plot import draw

        draw(measurements, best, title, options.latency_budget_ms, options.plot)
        say(texts, f"curve: {options.plot}")
    if path is not None:
        _write(path, model, engine, measurements, best, texts)
    return 1 if failures else 0


def _print_table(title: str, measurements: Sequence[Measurement], best: Measurement | None, out: Console) -> None:
    rows: list[Sequence[str]] = [
        (
            str(one.instances),
            str(one.batch_size or "-"),
            *latency_cells(one.latency, one.throughput),
            "<- recommended" if one is best else "",
        )
        for one in measurements
    ]
    show(out, table(title, ("instances", "batch", *LATENCY_COLUMNS, ""), rows, left=0))


def _write(
    path: Path, model: ToolModel, engine: str, measurements: Sequence[Measurement], best: Measurement, out: Console
) -> None:
    parameters = model.source.config.parameters
    sizes = sorted({one.batch_size for one in measurements if 0 < one.batch_size <= best.batch_size})
    is_one_program = parameters.get("dynamic_batch", "").lower() in ("true", "1")
    compiled_ahead = engine in (MIGRAPHX, MIGRAPHX_ONNX.name) and not is_one_program
    choice = ServingChoice(best.instances, best.batch_size, tuple(sizes) if compiled_ahead else ())
    write_choice(path, model, choice)
    config = model.definition.config
    served_by = model.backend.engine_for(config, ThisMachine(model.source.settings)).engine.name
    if served_by != engine:
        named = f"the parameter 'engine' \"{engine}\""
        say(out, f"as it is configured, a server here runs it on {served_by}: what was measured takes {named}")
    if 0 < (most := best.batch_size) < config.max_batch_size:
        before = f"max_batch_size was {config.max_batch_size}"
        say(out, f"{before}: requests of more than {most} rows will be refused from now on")
    say(out, f"written: {path}")


VERB = Verb(
    "Time a model's engine over batch sizes and numbers of instances, without a server, and recommend a setting.",
    TuneOptions(),
    tune,
    lambda options: options.model.model,
)
