"""MIGraphX as an engine, as a worker loads it.

What may take long, or not survive, happens in children of the worker (`jobs/`): compiling, and the first load and run
of every program. The worker itself loads only what a child has tried.
"""

from __future__ import annotations

import logging

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.migraphx.serving.compile_context import open_compile_context
from rocserve.backends.migraphx.serving.compiled_model import load_compiled
from rocserve.backends.migraphx.serving.program_file_model import load_program_file

_LOG = logging.getLogger(__name__)

_PROGRAM_FILES = "migraphx"
"""The backend whose models are compiled programs; those of the others are compiled here."""


def load(model: ModelSource) -> LoadedModel:
    """Parameters: see `configuration/`. Ready with its first program; more may follow while it serves.

    Raises:
        ServeError: MIGraphX cannot be used here or cannot compile the model, in its own words with what can be done;
            the file or the configuration is wrong; or memory does not suffice.
    """
    context = open_compile_context(model, _LOG)
    if model.config.backend == _PROGRAM_FILES:
        return load_program_file(context)
    return load_compiled(context)
