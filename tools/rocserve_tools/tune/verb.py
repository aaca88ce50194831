"""Runs `rocserve tune MODEL`: times batch sizes and numbers of instances, and recommends one setting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rocserve.backends.pytorch.engine_choice import MIGRAPHX_ONNX
from rocserve.backends.written_sizes import SIZES
from rocserve.core.errors import invalid_argument
from rocserve.repository.machine import ThisMachine
from rocserve.settings.flag import SWITCH, Kind, flag, number, one_of, part
from rocserve.verbs.engines import ENGINES, MIGRAPHX, main_engine
from rocserve.verbs.model_choice import COUNTS, ModelOptions, ToolModel, find_model
from rocserve.verbs.printing import ToolProgress, complain, console_on, counted, say, say_json, show, table
from rocserve.verbs.verb import Verb
from rocserve_tools.bench import LATENCY_COLUMNS, WORKLOAD_COLUMNS, latency_cells, say_lengths, workload_cells
from rocserve_tools.measuring.curves import check_plot
from rocserve_tools.measuring.figures import Timing
from rocserve_tools.measuring.lengths import WrittenLengths, lengths_flag
from rocserve_tools.tune.config_text import ServingChoice, config_path, write_choice
from rocserve_tools.tune.sweep import Measurement, Sweep, setting


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
    lengths: tuple[WrittenLengths, ...] = lengths_flag()
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
        check_plot(options.plot)
    # A server's default limit for one model, on the CPUs or on one GPU, because each instance is a thread or a process.
    machine, instances = ThisMachine(model.source.settings), counted(max(options.instances), "instance")
    most = max(machine.most_instances(0), machine.most_instances(1) if machine.gpus else 0)
    if max(options.instances) > most:
        raise invalid_argument(f"--instances: {instances} asked for, at most {most} can be measured here")
    engine = main_engine(model, options.engine)
    with ToolProgress() as progress:
        swept = Sweep(model, engine, options.lengths, options.timing, progress)
        swept.run(options.instances)
    title = f"{model.source.name} on {swept.description}"
    # With --json, standard output gets nothing but JSON.
    texts = console_on(sys.stderr) if options.json else out
    try:
        best, reason = recommend(swept.measurements, options.latency_budget_ms)
    except ValueError as error:
        _print_table(title, swept, None, texts)
        raise invalid_argument(str(error)) from None
    if options.json:
        result = {
            "model": model.source.name,
            "engine": engine,
            "description": swept.description,
            "measurements": swept.measurements,
            "recommended": best,
            "reason": reason,
            "lengths": swept.drawn,
            "sizes_not_tried": swept.sizes_not_tried,
        }
        say_json(out, result)
    else:
        _print_table(title, swept, best, out)
        say(out, f"recommended: {setting(best)}, {reason}")
    for failure in swept.failures:
        complain(f"rocserve tune: {failure}")
    if options.plot is not None:
        from rocserve_tools.tune.plot import draw

        draw(swept.measurements, best, title, options.latency_budget_ms, options.plot)
        say(texts, f"curve: {options.plot}")
    if path is not None:
        _write(path, model, engine, swept.measurements, best, texts)
    return 1 if swept.failures else 0


def _print_table(title: str, swept: Sweep, best: Measurement | None, out: Console) -> None:
    rows: list[Sequence[str]] = [
        (
            str(one.instances),
            str(one.batch_size or "-"),
            *(workload_cells(one.rows, one.padded) if swept.drawn else ()),
            *latency_cells(one.latency, one.throughput),
            "<- recommended" if one is best else "",
        )
        for one in swept.measurements
    ]
    columns = ("instances", "batch", *(WORKLOAD_COLUMNS if swept.drawn else ()), *LATENCY_COLUMNS, "")
    show(out, table(title, columns, rows, left=0))
    say_lengths(swept.drawn, out)
    if swept.sizes:
        say(out, f'without and with the parameter {SIZES} "{swept.sizes}"')
    if swept.sizes_not_tried:
        say(out, f"the parameter {SIZES} was not tried, because a server would say: {swept.sizes_not_tried}")


def _write(
    path: Path, model: ToolModel, engine: str, measurements: Sequence[Measurement], best: Measurement, out: Console
) -> None:
    sizes = sorted({one.batch_size for one in measurements if 0 < one.batch_size <= best.batch_size})
    compiled_ahead = engine in (MIGRAPHX, MIGRAPHX_ONNX.name)
    choice = ServingChoice(best.instances, best.batch_size, tuple(sizes) if compiled_ahead else (), best.sizes)
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
