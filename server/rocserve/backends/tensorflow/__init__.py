"""Describes the tensorflow backend: frozen TensorFlow graphs (GraphDef), compiled by MIGraphX."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec
from rocserve.backends.migraphx.engine_choice import MIGRAPHX, choose_migraphx
from rocserve.backends.migraphx.options import REQUEST_PARAMETERS

BACKEND = BackendSpec(
    name="tensorflow",
    platforms=("tensorflow_graphdef", "tensorflow"),
    engines=(MIGRAPHX,),
    model_filenames=("model.graphdef", "model.pb"),
    file_endings=(".graphdef", ".pb"),
    models_are_data=True,
    request_parameters=REQUEST_PARAMETERS,
    choose_engine=choose_migraphx,
)
