"""The onnx backend: ONNX models on ONNX Runtime."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec, EngineSpec

ONNXRUNTIME = EngineSpec(
    name="onnxruntime",
    module="rocserve.backends.onnx.backend",
    thread_safe=True,
    forks_from_zygote=True,
    preload=("onnxruntime",),
)
BACKEND = BackendSpec(
    name="onnx",
    platforms=("onnx_onnxv1", "onnxruntime_onnx", "onnxruntime"),
    engines=(ONNXRUNTIME,),
    model_filenames=("model.onnx",),
)
