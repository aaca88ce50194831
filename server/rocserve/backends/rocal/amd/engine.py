"""Makes the engine on amd.rocal: builds what a model needs, and tries it before a request comes."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from rocserve.backends.rocal.amd.binding import import_binding
from rocserve.backends.rocal.amd.feeding import Canvas
from rocserve.backends.rocal.amd.graph import GraphSettings, build_graph
from rocserve.backends.rocal.amd.plan import Flags, make_plan
from rocserve.backends.rocal.amd.rocal_engine import RocalEngine
from rocserve.backends.rocal.amd.runner import BrokenPipelineError, PipelineRunner
from rocserve.backends.rocal.amd.self_check import RAW_PIXELS, differences, picture
from rocserve.backends.rocal.amd.watchdog import limited_to
from rocserve.backends.rocal.batch_engine import BatchEngine, EngineSetup
from rocserve.backends.rocal.decoding.decoder import Decoder
from rocserve.backends.rocal.decoding.options import DecoderOptions, InputKind
from rocserve.core.errors import unavailable

_LOG = logging.getLogger(__name__)

_UNLIMITED_SIDE = 2000
"""The largest side of an image, in pixels, where the decoder has no limit; amd.rocal's own default. rocAL reserves
memory for the largest image, so there must be one."""

_CHECKED_HEIGHT, _CHECKED_WIDTH = 240, 320
"""Pixels of the picture by which rocAL is compared with the CPU engine."""

_FIRST_SIDES = (64, 512, 65535)
"""Of the image that is run before the first request, in pixels; the first that the pipeline can be done with."""

_LONGEST_BUILD_SECONDS = 600.0

_BROKEN_STATUS = 70
"""The worker's exit status; also that of an instance that cannot go on."""


def make_engine(setup: EngineSetup) -> BatchEngine:
    """Builds the rocAL pipelines of all batch sizes, so that none is built when a request waits.

    Raises:
        ServeError: amd.rocal is not here or refuses the pipeline, the pipeline needs what rocAL does not have, or
            libturbojpeg is missing.
    """
    binding = import_binding()
    plan = make_plan(setup, binding)
    try:
        decoder = Decoder(setup.color_format, setup.decoder)
    except RuntimeError as error:
        raise unavailable(str(error)) from None
    settings = GraphSettings(
        binding=binding,
        plan=plan,
        color_format=setup.color_format,
        max_height=_longest_side(setup.decoder, setup.decoder.limits.max_height),
        max_width=_longest_side(setup.decoder, setup.decoder.limits.max_width),
        on_gpu=setup.device is not None,
    )
    sizes = batch_sizes(setup.batch_size)
    canvas = Canvas(settings, sizes[-1])
    runners: dict[Flags, list[PipelineRunner]] = {}
    for flags in plan.variants() if plan.image_outputs else ():
        with limited_to(_LONGEST_BUILD_SECONDS):
            runners[flags] = [PipelineRunner(settings, build_graph(settings, size, flags), canvas) for size in sizes]
        for runner in runners[flags]:
            _run_once(settings, runner, canvas)
    _LOG.info(
        "model '%s' runs on amd.rocal %s, %s, with batches of %s",
        setup.model_name,
        binding.version,
        "on the GPU" if settings.on_gpu else "in its CPU mode",
        ", ".join(str(size) for size in sizes),
    )
    _check(setup, settings, runners, canvas)
    return RocalEngine(settings, decoder, setup.formats, runners, canvas, setup.threads, end_worker)


def _longest_side(decoder: DecoderOptions, limit: int) -> int:
    return _UNLIMITED_SIDE if decoder.input is InputKind.RAW or not limit else limit


def _check(
    setup: EngineSetup, settings: GraphSettings, runners: Mapping[Flags, Sequence[PipelineRunner]], canvas: Canvas
) -> None:
    height, width = min(settings.max_height, _CHECKED_HEIGHT), min(settings.max_width, _CHECKED_WIDTH)
    if not runners or settings.plan.misfit(height, width) is not None:
        return
    decoder = Decoder(setup.color_format, RAW_PIXELS)
    engine = RocalEngine(settings, decoder, setup.formats, runners, canvas, 1, _refuse_to_load)
    pixels = picture(height, width, setup.color_format.channels)
    for text in differences(engine, setup, pixels):
        _LOG.warning("model '%s': rocAL does not give what the CPU engine does: %s", setup.model_name, text)


def _run_once(settings: GraphSettings, runner: PipelineRunner, canvas: Canvas) -> None:
    """So that the first request is as fast as the next, and that a pipeline which cannot run is found at once."""
    sizes = [(min(settings.max_height, side), min(settings.max_width, side)) for side in _FIRST_SIDES]
    fitting = next((size for size in sizes if settings.plan.misfit(*size) is None), None)
    if fitting is None:
        return
    canvas.place([np.zeros((*fitting, settings.color_format.channels), dtype=np.uint8)])
    try:
        runner.run(1)
    except BrokenPipelineError as error:
        _refuse_to_load(str(error))


def batch_sizes(largest: int) -> list[int]:
    """The powers of two up to the largest, and the largest."""
    return sorted({*(2**power for power in range(largest.bit_length()) if 2**power <= largest), largest})


def _refuse_to_load(reason: str) -> NoReturn:
    raise unavailable(f"rocAL cannot run the pipeline: {reason}")


def end_worker(reason: str) -> NoReturn:
    """rocAL cannot be put right within a process: it cannot even be released. The server starts a fresh worker."""
    _LOG.critical("rocAL failed, the worker ends: %s", reason)
    os._exit(_BROKEN_STATUS)
