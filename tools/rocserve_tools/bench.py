"""Runs `rocserve bench MODEL`: times a model in one or more engines, without a server."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console

from rocserve.settings.flag import SWITCH, Kind, flag, one_of, part, repeated
from rocserve.verbs.engines import ENGINES, main_engine
from rocserve.verbs.model_choice import ModelOptions, ToolModel, find_model
from rocserve.verbs.printing import ToolProgress, complain, console_on, say, say_json, show, table
from rocserve.verbs.verb import Verb
from rocserve.verbs.workers import ToolWorkers
from rocserve_tools.measuring.candidates import prepare
from rocserve_tools.measuring.comparing import Compared, Comparison
from rocserve_tools.measuring.curves import check_plot
from rocserve_tools.measuring.figures import Difference, LatencySummary, Timing, worst
from rocserve_tools.measuring.lengths import DrawnLengths, WrittenLengths, lengths_flag
from rocserve_tools.measuring.workload import Workload


@dataclass(frozen=True, slots=True)
class EngineTimes:
    engine: str
    batch_size: int
    """0 = the model does not batch."""
    rows: float
    """Mean rows of a batch: fewer than the batch size if requests of unlike lengths do not share batches."""
    padded: float | None
    """Padded elements for each real one; None = nothing is padded."""
    latency: LatencySummary | None
    """None = the engine could not run the model."""
    throughput: float
    """Rows per second; runs per second if the model does not batch."""
    speed: float
    """This engine's throughput divided by the first engine's; 0 = unknown."""
    difference: Difference | None
    """Difference of the outputs from the first engine's, the worst of each figure; None = nothing was compared."""
    failure: str = ""


def _times(compared: Mapping[str, Compared], batch_size: int, made: Workload) -> Iterator[EngineTimes]:
    rates = {name: made.rows * 1e3 / one.latency.mean for name, one in compared.items() if one.latency is not None}
    first = next(iter(compared))
    for name, one in compared.items():
        rate = rates.get(name, 0.0)
        yield EngineTimes(
            engine=name,
            batch_size=batch_size,
            rows=made.rows,
            padded=made.padded,
            latency=one.latency,
            throughput=rate,
            speed=rate / rates[first] if first in rates else 0.0,
            difference=worst(one.differences) if one.differences and name != first else None,
            failure=one.failure,
        )


WORKLOAD_COLUMNS = ("rows", "padded")
LATENCY_COLUMNS = ("runs", "min ms", "mean", "p50", "p95", "p99", "std", "rows/s")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    model: ModelOptions = part(ModelOptions, "model")
    engine: str = flag(
        "auto", one_of(("auto", *ENGINES)), "the engine to time (default auto: as a server would choose)"
    )
    against: tuple[str, ...] = repeated(
        Kind("ENGINE", str, (*ENGINES, "torch")),
        f"an engine to compare with: {', '.join(ENGINES)} or torch (the file in a bare PyTorch loop)",
    )
    lengths: tuple[WrittenLengths, ...] = lengths_flag()
    timing: Timing = part(Timing, "timing")
    plot: Path | None = flag(None, Kind("FILE.png", Path), "draw latency over load, of all engines, into this file")
    json: bool = flag(False, SWITCH, "print JSON")


def run_bench(options: BenchOptions) -> int:
    """Time the engines, print the result and return the exit status: 1 if an engine was unavailable or could not run
    the model. Raises ServeError if that is the model's main engine."""
    model, out = find_model(options.model), console_on()
    if options.plot is not None:
        check_plot(options.plot)
    main = main_engine(model, options.engine)
    names = dict.fromkeys((main, *options.against))
    with ToolProgress() as progress:
        comparison, times = asyncio.run(_measure(model, tuple(names), options, progress))
    descriptions = {name: one.description for name, one in comparison.open.items()}
    missing = comparison.failures
    if options.json:
        # Each engine's description, or the reason why it is unavailable.
        engines = {**descriptions, **missing}
        result = {"model": model.source.name, "engines": engines, "times": times, "missing": tuple(missing)}
        say_json(out, {**result, "lengths": comparison.drawn})
    else:
        _print(model.source.name, descriptions, times, comparison.drawn, out)
        if options.against and len(names) == 1:
            say(out, f"nothing to compare with: the model is on {main} already; --engine names another")
    if options.plot is not None:
        from rocserve_tools.bench_plot import draw

        draw(times, f"{model.source.name}: {', '.join(descriptions)}", options.plot)
        say(console_on(sys.stderr) if options.json else out, f"curve: {options.plot}")
    failures = dict.fromkeys((*missing.values(), *(one.failure for one in times if one.failure)))
    for failure in failures:
        complain(f"rocserve bench: {failure}")
    return 1 if failures else 0


async def _measure(
    model: ToolModel, names: Sequence[str], options: BenchOptions, progress: ToolProgress
) -> tuple[Comparison, list[EngineTimes]]:
    comparison = Comparison(options.lengths)
    times: list[EngineTimes] = []
    async with ToolWorkers(model.source.settings, progress.report) as workers:
        for name in names:
            progress.report(f"opening {name}")
            await comparison.add(name, partial(prepare, model, name), workers)
        progress.steps(len(comparison.inputs))
        for batch_size in comparison.inputs:
            progress.report(f"batch size {batch_size}: timing" if batch_size else "timing")
            made = comparison.workload(batch_size)
            times += _times(await comparison.compare(batch_size, made, options.timing), batch_size, made)
            progress.done()
    return comparison, times


def latency_cells(latency: LatencySummary | None, throughput: float) -> Sequence[str]:
    if latency is None:
        return ["-"] * len(LATENCY_COLUMNS)
    figures = (latency.min, latency.mean, latency.p50, latency.p95, latency.p99, latency.std)
    return [str(latency.runs), *(f"{figure:.3f}" for figure in figures), f"{throughput:,.1f}"]


def workload_cells(rows: float, padded: float | None) -> Sequence[str]:
    return [f"{rows:.3g}", "-" if padded is None else f"{padded:.2f}"]


def say_lengths(drawn: Mapping[str, DrawnLengths], out: Console) -> None:
    """Print what was drawn by dimension, and what the columns of `workload_cells` are."""
    for label, of in drawn.items():
        say(out, f"dimension '{label}': {of.requests} lengths, median {of.median:g}, largest {of.largest}")
    if drawn:
        say(out, "rows: of a batch, on average; padded: padded elements for each real one, - if requests run unpadded")


def _print(
    model: str,
    engines: Mapping[str, str],
    times: Sequence[EngineTimes],
    drawn: Mapping[str, DrawnLengths],
    out: Console,
) -> None:
    for name, description in engines.items():
        say(out, f"{name}: {description}")
    compared = len(engines) > 1
    columns: tuple[str, ...] = ("engine", "batch", *(WORKLOAD_COLUMNS if drawn else ()), *LATENCY_COLUMNS)
    if compared:
        columns = (*columns, "speed", "largest diff", "relative diff")
    rows = []
    for one in times:
        row = [one.engine, str(one.batch_size or "-")]
        row += [*(workload_cells(one.rows, one.padded) if drawn else ()), *latency_cells(one.latency, one.throughput)]
        if compared:
            row.append(f"{one.speed:.3g} x" if one.speed else "-")
            far = one.difference
            row += ["-", "-"] if far is None else [f"{far.largest:.2g}", f"{far.relative:.2g}"]
        rows.append(row)
    show(out, table(model, columns, rows))
    say_lengths(drawn, out)
    if compared:
        first = next(iter(engines))
        say(out, f"speed: rows/s over those of {first}; diff: of the outputs from its own, on the same random input")


VERB = Verb(
    "Time a model in its engine for each batch size, without a server. Engines to compare with are timed in alternation"
    " with it.",
    BenchOptions(),
    run_bench,
    lambda options: options.model.model,
)
