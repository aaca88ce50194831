"""Loads a pipeline in a worker: chooses rocAL itself, or the CPU engine that gives its numbers."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.installed import is_installed
from rocserve.backends.parameters import MOST_THREADS, read_choice, read_integer, usable_cpus
from rocserve.backends.rocal import ROCAL_MODULE
from rocserve.backends.rocal.decoding.options import DEFAULT_MAX_PIXELS, ColorFormat
from rocserve.backends.rocal.engine import BatchEngine, EngineSetup, ThreadedEngine
from rocserve.backends.rocal.interface import join
from rocserve.backends.rocal.model import RocalModel
from rocserve.backends.rocal.pipeline import parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import InstanceKind

_CPU, _ROCAL = "cpu", "rocal"


@dataclass(frozen=True, slots=True)
class EngineChoice:
    engine: str
    reason: str
    """For the log: goes on after "engine cpu: "."""
    accepts_cpu: bool = False
    """Whether the CPU engine may take its place when rocAL turns out to be unable to run the pipeline."""


def choose_engine(model: ModelSource) -> EngineChoice:
    """By parameter `engine` (auto, cpu, rocal) and the kind of the instance.

    rocAL runs where it is asked for by name, on the GPU or in its own CPU mode, and on KIND_GPU. KIND_GPU is never
    served by the CPU engine unless `engine` is written as "auto".

    Raises:
        ServeError: INVALID_ARGUMENT when the parameter contradicts the kind, UNAVAILABLE when rocAL is not installed.
    """
    wanted = read_choice(model.config, "engine", "", ("", "auto", _CPU, _ROCAL))
    on_gpu = model.instance_kind is InstanceKind.GPU
    kind = model.instance_kind.value
    # It may have been given the CPU because there is no other.
    groups = model.config.instance_groups
    meant_for_gpu = on_gpu or (bool(groups) and all(group.kind is InstanceKind.GPU for group in groups))
    if wanted == _CPU:
        if on_gpu:
            raise invalid_argument(
                f"model '{model.name}' asks for KIND_GPU, but its parameter 'engine' is \"cpu\"; use KIND_CPU, or leave"
                " the parameter out"
            )
        return EngineChoice(_CPU, "parameter 'engine' says so")
    if wanted != _ROCAL and not meant_for_gpu:
        return EngineChoice(_CPU, f"the instance is {kind}")
    if is_installed(ROCAL_MODULE) and (on_gpu or wanted == _ROCAL):
        reason = f"parameter 'engine' says so, {kind}" if wanted == _ROCAL else "the instance is KIND_GPU"
        return EngineChoice(_ROCAL, reason, accepts_cpu=wanted == "auto")
    if wanted == "auto":
        return EngineChoice(
            _CPU,
            f"KIND_GPU is asked for, but {ROCAL_MODULE} is not installed or there is no GPU; parameter 'engine' is"
            ' "auto", which accepts the CPU',
        )
    why, remedy = "its parameter 'engine' is \"rocal\"", 'set the parameter to "cpu"'
    if not wanted:
        why = "it asks for KIND_GPU"
        remedy = "use KIND_CPU, or set parameter 'engine' to \"auto\" to accept the CPU"
    raise unavailable(
        f"model '{model.name}' needs rocAL, because {why}, but the Python module {ROCAL_MODULE} is not installed;"
        f" install amd-rocal, or {remedy}"
    )


_LOG = logging.getLogger(__name__)
_DEFAULT_MAX_THREADS = 4
_MOST_PIXELS = 1 << 32
"""Of an image: a JPEG cannot have more."""


def load(model: ModelSource) -> LoadedModel:
    """Parameters: `color_format` (RGB24, BGR24, U8), `threads`, `max_pixels`, `engine` (auto, cpu, rocal).

    Raises:
        ServeError: the pipeline or the configuration is wrong, or a library of the engine is not installed.
    """
    config = model.config
    choice = choose_engine(model)
    formats = tuple(color_format.value for color_format in ColorFormat)
    color_format = ColorFormat(read_choice(config, "color_format", ColorFormat.RGB24.value, formats))
    threads = read_integer(config, "threads", min(_DEFAULT_MAX_THREADS, usable_cpus()), 1, MOST_THREADS)
    max_pixels = read_integer(config, "max_pixels", DEFAULT_MAX_PIXELS, 1, _MOST_PIXELS)
    try:
        pipeline = parse_pipeline(model.model_file.read_bytes(), color_format.channels)
    except OSError as error:
        raise invalid_argument(f"cannot read {model.model_file}: {error.strerror}") from None
    except PipelineError as error:
        raise invalid_argument(f"{model.model_file.name}: {error}") from None
    for note in pipeline.notes:
        _LOG.warning("%s: %s", model.model_file.name, note)
    interface = join(pipeline, config, color_format.channels)
    setup = EngineSetup(
        model_name=model.name,
        pipeline=pipeline,
        decoder=pipeline.decoder.at_most(max_pixels),
        color_format=color_format,
        formats=tuple(output.format for output in interface.outputs),
        batch_size=max(1, config.max_batch_size),
        threads=threads,
        device=model.device,
    )
    try:
        engine = _make_engine(choice.engine, setup)
    except ServeError as error:
        if not choice.accepts_cpu:
            raise
        reason = f"rocAL cannot run it ({error.text}); parameter 'engine' is \"auto\", which accepts the CPU"
        choice = EngineChoice(_CPU, reason)
        engine = _make_engine(choice.engine, setup)
    _LOG.info("%s runs on engine %s: %s", model.model_file.name, choice.engine, choice.reason)
    # The server knows the backend's engine only, not which of the two it is.
    return RocalModel(engine, setup, interface, {"engine": choice.engine, "engine_reason": choice.reason})


def _make_engine(name: str, setup: EngineSetup) -> BatchEngine:
    if name == _ROCAL:
        # Only here: importing it loads rocAL, which must never happen in a process that does not need it.
        from rocserve.backends.rocal.amd.engine import RocalEngine

        return RocalEngine(setup)
    try:
        return ThreadedEngine(setup)
    except RuntimeError as error:
        raise unavailable(str(error)) from None
