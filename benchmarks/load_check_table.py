"""What the load check decides about real models, with several seeds, on ONNX Runtime's CPU provider.

The numbers of a check depend on the model's bytes, so a copy with another comment in the file has another seed."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import onnx

from benchmarks.real_models import RealModel
from benchmarks.table import markdown_table
from rocserve.backends.onnx.backend import load
from rocserve.core.load_check import LoadCheckMode, LoadCheckReport
from rocserve.core.requests import Signature
from rocserve.settings import EngineSettings
from rocserve.verbs.model_choice import ModelOptions, find_model

_UNDECIDED = "not checked"
_LONGEST_REASON = 100
"""Characters of a reason in the table."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One load of a model."""

    verdict: str
    reason: str
    check_seconds: float
    load_seconds: float
    """Without the check."""


def decide(files: Mapping[RealModel, Path], seeds: int) -> str:
    """Load each model with each seed, and return a table and its summary."""
    rows, wrong, undecided, shares, longest = [], 0, 0, [], 0.0
    for model, file in files.items():
        trials = [_tried(file, seed) for seed in range(seeds)]
        right = sum(trial.verdict == model.rows for trial in trials)
        unsure = sum(trial.verdict == _UNDECIDED for trial in trials)
        wrong, undecided = wrong + seeds - right - unsure, undecided + unsure
        check, alone = median(one.check_seconds for one in trials), median(one.load_seconds for one in trials)
        if check:
            shares.append(check / alone)
        longest = max(longest, *(one.check_seconds for one in trials))
        verdicts = " or ".join(dict.fromkeys(trial.verdict for trial in trials))
        rows.append(
            [
                model.name,
                model.rows,
                verdicts,
                f"{right} of {seeds}",
                f"{1e3 * check:.0f} / {1e3 * alone:.0f}",
                trials[0].reason[:_LONGEST_REASON],
            ]
        )
        print(" | ".join(rows[-1]), file=sys.stderr, flush=True)
    total = seeds * len(files)
    summary = (
        f"{len(files)} models, {seeds} seeds: {total - wrong - undecided} of {total} right, {undecided} not checked,"
        f" {wrong} wrong. Where rows are tried, the check takes {median(shares):.2f} times the engine's own load at the"
        f" median; the longest check took {longest:.1f} s."
    )
    columns = ["model", "rows are", "found", "right", "check / load, ms", "with the first seed"]
    return f"{summary}\n\n{markdown_table(columns, rows)}"


def _tried(file: Path, seed: int) -> Trial:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "model.onnx")
        model = onnx.load(file)
        entry = model.metadata_props.add()
        entry.key, entry.value = "seed", str(seed)
        onnx.save(model, copy)
        del model
        signature, report, _ = _loaded(copy, EngineSettings(cache_directory=folder))
        *_, alone = _loaded(copy, EngineSettings(cache_directory=folder, load_check=LoadCheckMode.OFF.value))
    if not signature.supports_batching:
        verdict = "fixed"
    elif not signature.dependent_rows:
        verdict = "independent"
    else:
        verdict = _UNDECIDED if signature.dependent_rows.startswith(_UNDECIDED) else "dependent"
    return Trial(verdict, report.text or signature.dependent_rows, report.seconds, alone)


def _loaded(file: Path, settings: EngineSettings) -> tuple[Signature, LoadCheckReport, float]:
    """Load the model as a worker does; return its signature, what the check found, and the seconds that it took."""
    source = replace(find_model(ModelOptions(file)).source, settings=settings)
    began = time.monotonic()
    model = load(source)
    seconds = time.monotonic() - began
    report: LoadCheckReport = getattr(model, "load_check", LoadCheckReport())
    signature = model.signature
    model.close()
    return signature, report, seconds
