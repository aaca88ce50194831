"""Describes the migraphx backend: compiled MIGraphX programs (.mxr), on AMD GPUs or on targets cpu and ref."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec
from rocserve.backends.migraphx.engine_choice import MIGRAPHX, choose_migraphx
from rocserve.backends.migraphx.options import REQUEST_PARAMETERS

BACKEND = BackendSpec(
    name="migraphx",
    platforms=("migraphx_mxr", "migraphx"),
    engines=(MIGRAPHX,),
    model_filenames=("model.mxr",),
    file_endings=(".mxr",),
    # A compiled program holds the GPU's machine code.
    models_are_data=False,
    request_parameters=REQUEST_PARAMETERS,
    choose_engine=choose_migraphx,
)
