"""Runs `rocserve tune MODEL`."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from rocserve.backends.pytorch.engine_choice import MIGRAPHX_ONNX
from rocserve.core.errors import invalid_argument, unavailable
from rocserve.core.plain import to_json
from rocserve.repository.machine import ThisMachine
from rocserve.settings.flag import SWITCH, Kind, flag, number, one_of, part
from rocserve.tools.bench.candidates import ENGINES, MIGRAPHX, main_engine, prepare_one
from rocserve.tools.bench.verb import LATENCY_COLUMNS, latency_cells
from rocserve.tools.measuring.comparing import Candidate
from rocserve.tools.measuring.rounds import Timing
from rocserve.tools.model_choice import COUNTS, ModelOptions, ToolModel
from rocserve.tools.printing import complain, say, show, table
from rocserve.tools.progress import ToolProgress
from rocserve.tools.running import run_on_model
from rocserve.tools.tune.config_text import ServingChoice, config_path, write_choice
from rocserve.tools.tune.sweep import Measurement, Recommendation, Sweep, recommend, setting, sweep
from rocserve.tools.verb import Verb

_MARK = "<- recommended"


@dataclass(frozen=True, slots=True)
class TuneOptions:
    model: ModelOptions = part(ModelOptions)
    engine: str = flag("auto", one_of(("auto", *ENGINES)), "(default auto: what a server would use)")
    instances: tuple[int, ...] = flag((1, 2), COUNTS, "numbers of instances (default 1,2)")
    latency_budget_ms: float | None = flag(
        None,
        number("MS", 0.001, float),
        "recommend the highest throughput whose p95 latency is within it (default: the knee of the curve)",
    )
    plot: Path | None = flag(None, Kind("FILE.png", Path), "draw the curve of throughput over latency")
    write: bool = flag(False, SWITCH, "put the recommendation into the model's config.pbtxt")
    timing: Timing = part(Timing)
    json: bool = flag(False, SWITCH, "print JSON")


@dataclass(frozen=True, slots=True)
class TuneResult:
    model: str
    engine: str
    description: str
    measurements: tuple[Measurement, ...]
    recommended: Measurement
    reason: str


def tune(model: ToolModel, options: TuneOptions, out: Console, log: logging.Logger) -> int:
    """The exit status: 1 when a setting could not be measured.

    Raises:
        ServeError: the model cannot be measured at all, nothing is within the budget, or the result cannot be written.
    """
    # Before minutes of measuring, not after.
    path = config_path(model, options.model.config_name) if options.write else None
    if options.plot is not None:
        _check_plot(options.plot)
    engine = main_engine(model, options.engine)
    with ToolProgress() as progress:
        swept = _sweep(model, engine, options, progress, log)
    try:
        best = recommend(swept.measurements, options.latency_budget_ms)
    except ValueError as error:
        _print_table(model, swept, None, out)
        raise invalid_argument(str(error)) from None
    if options.json:
        result = TuneResult(
            model.source.name, engine, swept.description, swept.measurements, best.measurement, best.reason
        )
        say(out, to_json(result).decode())
    else:
        _print_table(model, swept, best, out)
        say(out, f"recommended: {setting(best.measurement)}, {best.reason}")
    for failure in swept.failures:
        complain(f"rocserve tune: {failure}")
    if options.plot is not None:
        _draw(model, swept, best, options, options.plot)
        if not options.json:
            say(out, f"curve: {options.plot}")
    if path is not None:
        _write(path, model, engine, swept, best.measurement, out)
    return 1 if swept.failures else 0


def _sweep(model: ToolModel, engine: str, options: TuneOptions, progress: ToolProgress, log: logging.Logger) -> Sweep:
    ready: dict[int, Candidate] = {}

    def candidate_of(instances: int) -> Candidate:
        # MIGraphX's programs are the same for any number of processes.
        key = 1 if engine == MIGRAPHX else instances
        if key not in ready:
            ready[key] = prepare_one(model, engine, progress, log, instances)
        return ready[key]

    return sweep(candidate_of, options.instances, options.timing, progress)


def _print_table(model: ToolModel, swept: Sweep, best: Recommendation | None, out: Console) -> None:
    recommended = best.measurement if best else None
    rows: list[Sequence[str]] = [
        (
            str(one.instances),
            str(one.batch_size or "-"),
            *latency_cells(one.latency, one.throughput),
            _MARK if one is recommended else "",
        )
        for one in swept.measurements
    ]
    show(
        out,
        table(
            f"{model.source.name} on {swept.description}", ("instances", "batch", *LATENCY_COLUMNS, ""), rows, left=0
        ),
    )


def _check_plot(path: Path) -> None:
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise unavailable(f"--plot needs matplotlib ({error}); run: pip install 'rocserve[tools]'") from None
    if path.suffix.lower() != ".png":
        raise invalid_argument(f"--plot: expected a name that ends in .png, got '{path}'")
    if not path.absolute().parent.is_dir():
        raise invalid_argument(f"--plot: the folder {path.absolute().parent} does not exist")


def _draw(model: ToolModel, swept: Sweep, best: Recommendation, options: TuneOptions, path: Path) -> None:
    from rocserve.tools.tune.plot import draw

    draw(
        swept.measurements,
        best.measurement,
        title=f"{model.source.name} on {swept.description}",
        latency_budget_ms=options.latency_budget_ms,
        path=path,
    )


def _write(path: Path, model: ToolModel, engine: str, swept: Sweep, best: Measurement, out: Console) -> None:
    parameters = model.source.config.parameters
    sizes = sorted({one.batch_size for one in swept.measurements if 0 < one.batch_size <= best.batch_size})
    is_one_program = parameters.get("dynamic_batch", "").lower() in ("true", "1")
    compiled_ahead = engine in (MIGRAPHX, MIGRAPHX_ONNX.name) and not is_one_program
    choice = ServingChoice(best.instances, best.batch_size, tuple(sizes) if compiled_ahead else ())
    write_choice(path, model, choice)
    assert model.definition is not None
    config = model.definition.config
    served_by = model.backend.engine_for(config, ThisMachine(model.source.settings)).engine.name
    if served_by != engine:
        say(
            out,
            f"as it is configured, a server here runs it on {served_by}: what was measured takes the parameter"
            f" 'engine' \"{engine}\"",
        )
    before = config.max_batch_size
    if 0 < best.batch_size < before:
        say(
            out,
            f"max_batch_size was {before}: requests of more than {best.batch_size} rows will be refused from now on",
        )
    say(out, f"written: {path}")


VERB = Verb(
    "Time a model's engine over batch sizes and numbers of instances, without a server, and recommend a setting.",
    TuneOptions(),
    lambda options: run_on_model(options.model, lambda model, out, log: tune(model, options, out, log)),
    lambda options: options.model.model,
)
