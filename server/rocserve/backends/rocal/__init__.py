"""Defines the rocal backend: a rocAL pipeline in JSON turns images into tensors, on rocAL or on an equal CPU engine."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec, EngineSpec

ROCAL_MODULE = "amd.rocal"
BACKEND = BackendSpec(
    name="rocal",
    platforms=("rocal_json", "rocal"),
    engines=(
        EngineSpec(
            name="rocal",
            module="rocserve.backends.rocal.backend",
            thread_safe=True,
            forks_from_zygote=True,
            preload=("cv2",),
            gpu_module=ROCAL_MODULE,
        ),
    ),
    models_are_data=True,
    request_parameters=frozenset({"color_format", "engine", "max_pixels", "threads"}),
    model_filenames=("pipeline.json", "model.json", "*.json"),
)
