"""The onnx backend: ONNX models on ONNX Runtime's CPU provider."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec

BACKEND = BackendSpec(
    name="onnx",
    platforms=("onnx_onnxv1", "onnxruntime_onnx", "onnxruntime"),
    engine="rocserve.backends.onnx.backend",
    model_filenames=("model.onnx",),
    thread_safe=True,
    forks_from_zygote=True,
    preload=("onnxruntime",),
)
