"""The onnx backend: ONNX models on MIGraphX or ONNX Runtime."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec
from rocserve.backends.migraphx.spec import MIGRAPHX
from rocserve.backends.onnx.engine_choice import ONNXRUNTIME, choose_engine
from rocserve.backends.onnx.request_parameters import REQUEST_PARAMETERS

BACKEND = BackendSpec(
    name="onnx",
    platforms=("onnx_onnxv1", "onnxruntime_onnx", "onnxruntime"),
    engines=(ONNXRUNTIME, MIGRAPHX),
    model_filenames=("model.onnx",),
    file_endings=(".onnx",),
    takes_ragged_batches=True,
    takes_operators=True,
    models_are_data=True,
    # A context of an execution provider: its compiled program.
    marks_of_programs=(b"EPContext",),
    request_parameters=REQUEST_PARAMETERS,
    choose_engine=choose_engine,
)
