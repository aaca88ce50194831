"""The verbs about models on this machine: compile, inspect, bench, tune, doctor. Each imports what it needs when it
runs."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocserve.flags.arguments import at_least
from rocserve.settings import EngineSettings, engine_settings
from rocserve.tools.command_line import CommandLine

if TYPE_CHECKING:
    from rocserve.tools.measuring.rounds import Timing

_PRECISIONS = ("fp32", "fp16", "bf16", "fp8", "int8")
_ENGINES = ("migraphx", "onnxruntime", "eager", "inductor", "migraphx-onnx")
_TARGETS = ("gpu", "cpu", "ref")
_WARM_UP, _REPEATS = 3, 10
_COMPARE_SECONDS, _BENCH_SECONDS, _TUNE_SECONDS = 1.0, 2.0, 2.0
_TIMING = ("warm_up", "repeats", "seconds")
_MODEL = "a model's folder, or a .onnx, .pb, .graphdef, .mxr, .pt2 or .pt file"

Verb = Callable[[argparse.Namespace], int]
_Verbs = Any
"""argparse's collection of subparsers, which has no public type."""


def add_model_verbs(verbs: _Verbs) -> Mapping[str, Verb]:
    """Add the parsers; returns what runs each verb."""
    _add_compile(verbs)
    _add_inspect(verbs)
    _add_bench(verbs)
    _add_tune(verbs)
    _add_doctor(verbs)
    return {"compile": _compile, "inspect": _inspect, "bench": _bench, "tune": _tune, "doctor": _doctor}


def _add_compile(verbs: _Verbs) -> None:
    parser = verbs.add_parser(
        "compile",
        help="compile a model ahead with MIGraphX",
        description="Compile a model with MIGraphX, into the cache that a server uses or into a .mxr file. What the"
        " command line says goes before the model's own parameters.",
        allow_abbrev=False,
    )
    _add_model(parser)
    outcome = parser.add_mutually_exclusive_group()
    outcome.add_argument(
        "--output",
        metavar="FILE.mxr",
        help="write the program there; {batch} in the name stands for the batch size, where there are several",
    )
    outcome.add_argument(
        "--compare",
        action="store_true",
        help="compile in each precision that is named (else fp32, fp16, bf16, with calibration data int8 and fp8) and"
        " report the errors against fp32, and the speed",
    )
    _add_timing(parser, _COMPARE_SECONDS)


def _add_inspect(verbs: _Verbs) -> None:
    parser = verbs.add_parser(
        "inspect",
        help="what MIGraphX makes of a model",
        description="Show a model's inputs, outputs and memory, and its operators before and after MIGraphX has"
        " compiled it: which of them it fused, and what is copied to and from a GPU.",
        allow_abbrev=False,
    )
    _add_model(parser)
    parser.add_argument("--text", action="store_true", help="print MIGraphX's own print of the programs as well")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_bench(verbs: _Verbs) -> None:
    parser = verbs.add_parser(
        "bench",
        help="time a model's bare engine",
        description="Time a model in its engine without a server, for each batch size; against other engines in turns"
        " with it, in the same run.",
        allow_abbrev=False,
    )
    _add_model(parser)
    parser.add_argument(
        "--engine", choices=("auto", *_ENGINES), default="auto", help="default: what a server would use"
    )
    parser.add_argument(
        "--against",
        action="append",
        choices=(*_ENGINES, "torch"),
        default=[],
        metavar="ENGINE",
        help=f"{', '.join(_ENGINES)} or torch, which is the file in a bare loop; may be given more than once",
    )
    _add_timing(parser, _BENCH_SECONDS)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_tune(verbs: _Verbs) -> None:
    parser = verbs.add_parser(
        "tune",
        help="find the batch size and the number of instances",
        description="Time a model's engine over batch sizes and numbers of instances, without a server, and recommend"
        " a setting.",
        allow_abbrev=False,
    )
    _add_model(parser)
    parser.add_argument(
        "--engine", choices=("auto", *_ENGINES), default="auto", help="default: what a server would use"
    )
    parser.add_argument(
        "--instances", type=_counts, default=(1, 2), metavar="N,N,...", help="numbers of instances (default 1,2)"
    )
    parser.add_argument(
        "--latency-budget-ms",
        type=at_least(0.001, float),
        metavar="MS",
        help="recommend the highest throughput whose p95 latency is within it (default: the knee of the curve)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the curve of throughput over latency")
    parser.add_argument("--write", action="store_true", help="put the recommendation into the model's config.pbtxt")
    _add_timing(parser, _TUNE_SECONDS)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_doctor(verbs: _Verbs) -> None:
    parser = verbs.add_parser(
        "doctor",
        help="what is installed here, what works, and why not",
        description="Look at this machine and run a tiny model through each engine. The exit status is 1 when"
        " something that is installed does not work.",
        allow_abbrev=False,
    )
    _add_places(parser)
    parser.add_argument(
        "--timeout-secs",
        type=at_least(0, float),
        default=120.0,
        metavar="S",
        help="of each trial (default 120; 0 = none)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", type=Path, metavar="MODEL", help=_MODEL)
    parser.add_argument(
        "--model-config-name", default="", metavar="NAME", help="read configs/NAME.pbtxt instead, where it exists"
    )
    parser.add_argument("--target", choices=_TARGETS, help="gpu, cpu or ref (default: gpu where there is one)")
    parser.add_argument("--batch-sizes", type=_counts, default=(), metavar="N,N,...", help="instead of the model's own")
    parser.add_argument(
        "--precision",
        type=_precisions,
        default=(),
        metavar="NAME",
        help=f"one of {', '.join(_PRECISIONS)}; several with compile --compare",
    )
    parser.add_argument(
        "--calibration-data", type=Path, metavar="PATH", help="an .npz file, or a folder of .npy or .jpg files"
    )
    parser.add_argument("--input-shapes", metavar="TEXT", help='without the batch: "image: 3x224x224; mask: 224x224"')
    for flag, text in (
        ("fast-math", "approximations of some functions (default true)"),
        ("exhaustive-tune", "have MIGraphX try all kernels that it has"),
        ("miopen-tuning", "have MIOpen search for the fastest kernels"),
    ):
        # Not one option with an optional value: that would take the model's name for it.
        name = flag.replace("-", "_")
        parser.add_argument(f"--{flag}", f"--{flag}=true", dest=name, action="store_const", const="true", help=text)
        parser.add_argument(f"--{flag}=false", dest=name, action="store_const", const="false", help="not so")
    parser.add_argument(
        "--compile-timeout-secs", type=at_least(0, float), metavar="S", help="of one program (default 3600; 0 = none)"
    )
    parser.add_argument("--binding", choices=("auto", "c_api", "module"), help="how MIGraphX is reached")
    _add_places(parser)
    # For what one argument alone does not show; ends the command.
    parser.set_defaults(refuse=parser.error)


def _add_places(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache-directory", default="", metavar="DIR", help="where compiled programs are kept")
    parser.add_argument(
        "--migraphx-root", default="", metavar="DIR", help="a folder that holds MIGraphX and its C library"
    )


def _add_timing(parser: argparse.ArgumentParser, seconds: float) -> None:
    """`_timing` puts in the defaults: None is what was not given."""
    parser.add_argument(
        "--warm-up", type=at_least(0, int), metavar="N", help=f"runs before those that count (default {_WARM_UP})"
    )
    parser.add_argument(
        "--repeats", type=at_least(1, int), metavar="N", help=f"runs that count, at least (default {_REPEATS})"
    )
    parser.add_argument(
        "--seconds",
        type=at_least(0, float),
        metavar="S",
        help=f"measure each setting for at least so long (default {seconds:g})",
    )


def _timing(options: argparse.Namespace, seconds: float) -> Timing:
    from rocserve.tools.measuring.rounds import Timing

    given = {name: getattr(options, name) for name in _TIMING if getattr(options, name) is not None}
    return Timing(**{"warm_up": _WARM_UP, "repeats": _REPEATS, "seconds": seconds, **given})


def _counts(text: str) -> tuple[int, ...]:
    """1,2,4: ascending, each once."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and len(word) <= 9 and int(word) > 0 for word in words):
        raise argparse.ArgumentTypeError(f"expected whole numbers of 1 or more with commas between, got '{text}'")
    return tuple(sorted({int(word) for word in words}))


def _precisions(text: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip().lower() for word in text.split(",")))
    if not set(words) <= set(_PRECISIONS):
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(_PRECISIONS)}, got '{text}'")
    return words


def _settings(options: argparse.Namespace) -> EngineSettings:
    settings = engine_settings()
    return dataclasses.replace(
        settings,
        cache_directory=options.cache_directory or settings.cache_directory,
        migraphx_root=options.migraphx_root or settings.migraphx_root,
    )


def _command_line(options: argparse.Namespace, *, with_precision: bool = True) -> CommandLine:
    parameters = {
        name: f"{value:g}" if isinstance(value, float) else value
        for name in (
            "target",
            "input_shapes",
            "fast_math",
            "exhaustive_tune",
            "miopen_tuning",
            "compile_timeout_secs",
            "binding",
        )
        if (value := getattr(options, name)) is not None
    }
    if with_precision and options.precision:
        if len(options.precision) > 1:
            options.refuse("argument --precision: several of them need compile --compare, which compares them")
        parameters["precision"] = ",".join(options.precision)
    return CommandLine(parameters, options.batch_sizes, options.calibration_data, options.model_config_name)


def _compile(options: argparse.Namespace) -> int:
    from rocserve.tools.compile.verb import compare, compile_model
    from rocserve.tools.running import run_on_model

    if options.compare:
        timing = _timing(options, _COMPARE_SECONDS)
        return run_on_model(
            "compile",
            options.model,
            _command_line(options, with_precision=False),
            _settings(options),
            lambda model, out, log: compare(model, options.precision, timing, out, log),
        )
    for name in _TIMING:
        if getattr(options, name) is not None:
            options.refuse(f"argument --{name.replace('_', '-')}: needs --compare, without which nothing is timed")
    return run_on_model(
        "compile",
        options.model,
        _command_line(options),
        _settings(options),
        lambda model, out, log: compile_model(model, options.output or "", out, log),
    )


def _inspect(options: argparse.Namespace) -> int:
    from rocserve.tools.inspect.verb import inspect
    from rocserve.tools.running import run_on_model

    return run_on_model(
        "inspect",
        options.model,
        _command_line(options),
        _settings(options),
        lambda model, out, log: inspect(model, options.text, options.json, out, log),
    )


def _bench(options: argparse.Namespace) -> int:
    from rocserve.tools.bench.verb import run_bench
    from rocserve.tools.running import run_on_model

    timing = _timing(options, _BENCH_SECONDS)
    return run_on_model(
        "bench",
        options.model,
        _command_line(options),
        _settings(options),
        lambda model, out, log: run_bench(model, options.engine, options.against, timing, options.json, out, log),
    )


def _tune(options: argparse.Namespace) -> int:
    from rocserve.tools.running import run_on_model
    from rocserve.tools.tune.verb import TuneOptions, tune

    chosen = TuneOptions(
        engine=options.engine,
        instances=options.instances,
        timing=_timing(options, _TUNE_SECONDS),
        latency_budget_ms=options.latency_budget_ms,
        plot=options.plot,
        write=options.write,
        as_json=options.json,
        config_name=options.model_config_name,
    )
    return run_on_model(
        "tune",
        options.model,
        _command_line(options),
        _settings(options),
        lambda model, out, log: tune(model, chosen, out, log),
    )


def _doctor(options: argparse.Namespace) -> int:
    from rocserve.tools.doctor.verb import run_doctor
    from rocserve.tools.printing import console_on
    from rocserve.tools.running import guarded, tool_log

    settings = _settings(options)
    return guarded(
        "doctor", "", lambda: run_doctor(settings, options.timeout_secs, options.json, console_on(), tool_log())
    )
