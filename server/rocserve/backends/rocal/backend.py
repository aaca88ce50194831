"""The rocal backend's engine, as a worker loads it."""

from __future__ import annotations

import logging

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.parameters import MOST_THREADS, read_choice, read_integer, usable_cpus
from rocserve.backends.rocal.batch_engine import BatchEngine, EngineSetup
from rocserve.backends.rocal.decoding.options import DEFAULT_MAX_PIXELS, ColorFormat
from rocserve.backends.rocal.engine_choice import EngineChoice, EngineName, choose_engine
from rocserve.backends.rocal.interface import join
from rocserve.backends.rocal.model import RocalModel
from rocserve.backends.rocal.pipeline import Pipeline, parse_pipeline
from rocserve.backends.rocal.schema import PipelineError
from rocserve.backends.rocal.threaded_engine import ThreadedEngine
from rocserve.core.errors import ServeError, invalid_argument, unavailable

_LOG = logging.getLogger(__name__)

_DEFAULT_MAX_THREADS = 4
_MOST_PIXELS = 1 << 32
"""Of an image: a JPEG cannot have more."""


def load(model: ModelSource) -> LoadedModel:
    """Parameters: `color_format` (RGB24, BGR24, U8), `threads`, `max_pixels`, `engine` (auto, cpu, rocal).

    Raises:
        ServeError: the pipeline or the configuration is wrong, or what the engine needs is not installed.
    """
    config = model.config
    choice = choose_engine(model)
    formats = tuple(color_format.value for color_format in ColorFormat)
    color_format = ColorFormat(read_choice(config, "color_format", ColorFormat.RGB24.value, formats))
    threads = read_integer(config, "threads", min(_DEFAULT_MAX_THREADS, usable_cpus()), 1, MOST_THREADS)
    max_pixels = read_integer(config, "max_pixels", DEFAULT_MAX_PIXELS, 1, _MOST_PIXELS)
    pipeline = _read_pipeline(model, color_format.channels)
    interface = join(pipeline, config, color_format.channels)
    setup = EngineSetup(
        model_name=model.name,
        pipeline=pipeline,
        decoder=pipeline.decoder.at_most(max_pixels),
        color_format=color_format,
        formats=tuple(output.format for output in interface.outputs),
        shapes=tuple(output.shape for output in interface.outputs),
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
        choice = EngineChoice(EngineName.CPU, reason)
        engine = _make_engine(choice.engine, setup)
    _LOG.info("%s runs on engine %s: %s", model.model_file.name, choice.engine.value, choice.reason)
    # The server knows the backend's engine only, not which of the two it is.
    return RocalModel(engine, setup, interface, {"engine": choice.engine.value, "engine_reason": choice.reason})


def _read_pipeline(model: ModelSource, channels: int) -> Pipeline:
    try:
        pipeline = parse_pipeline(model.model_file.read_bytes(), channels)
    except OSError as error:
        raise invalid_argument(f"cannot read {model.model_file}: {error.strerror}") from None
    except PipelineError as error:
        raise invalid_argument(f"{model.model_file.name}: {error}") from None
    for note in pipeline.notes:
        _LOG.warning("%s: %s", model.model_file.name, note)
    return pipeline


def _make_engine(name: EngineName, setup: EngineSetup) -> BatchEngine:
    if name is EngineName.ROCAL:
        # Only here: importing it loads rocAL, which must never happen in a process that does not need it.
        from rocserve.backends.rocal.amd.engine import make_engine

        return make_engine(setup)
    try:
        return ThreadedEngine(setup)
    except RuntimeError as error:
        raise unavailable(str(error)) from None
