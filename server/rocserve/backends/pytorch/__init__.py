"""Describes the pytorch backend: exported programs, AOTInductor packages and TorchScript, one process per instance."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec
from rocserve.backends.pytorch.engine_choice import EAGER, INDUCTOR, MIGRAPHX_ONNX, TORCH_MIGRAPHX, choose_engine

BACKEND = BackendSpec(
    name="pytorch",
    platforms=("pytorch_libtorch", "torch_aoti", "pytorch_aoti", "pytorch"),
    engines=(EAGER, INDUCTOR, TORCH_MIGRAPHX, MIGRAPHX_ONNX),
    model_filenames=("model.pt2", "model.pt"),
    file_endings=(".pt2", ".pt"),
    # Programs and packages hold code, including machine code.
    models_are_data=False,
    request_parameters=frozenset(
        {"precision", "batch_sizes", "batches_at_once", "INTRA_OP_THREAD_COUNT", "NUM_THREADS"}
    ),
    choose_engine=choose_engine,
)
