"""The python backend: models written against Triton's Python model interface, each instance in a process of its own."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec

BACKEND = BackendSpec(
    name="python",
    platforms=("python",),
    engine="rocserve.backends.python.engine",
    model_filenames=("model.py",),
    thread_safe=False,
    forks_from_zygote=True,
    default_max_batch_size=0,
    # What takes a model to a GPU is the model's own, such as PyTorch in its own environment; numpy is in all of them.
    gpu_module="numpy",
    answers_requests=True,
)
