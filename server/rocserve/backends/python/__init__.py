"""The python backend: models written against Triton's Python model interface, each instance in a process of its own."""

from __future__ import annotations

from rocserve.backends.base import BackendSpec, EngineSpec

BACKEND = BackendSpec(
    name="python",
    platforms=("python",),
    engines=(
        EngineSpec(
            name="python",
            module="rocserve.backends.python.engine",
            thread_safe=False,
            forks_from_zygote=True,
            # What takes a model to a GPU is the model's own, such as PyTorch in its own environment; numpy is in all of
            # them.
            gpu_module="numpy",
            # A model of KIND_MODEL chooses its devices itself, among all.
            takes_kind_model=True,
        ),
    ),
    model_filenames=("model.py",),
    default_max_batch_size=0,
    answers_requests=True,
    takes_ragged_batches=True,
    models_are_data=False,
    # All others mean what the model makes of them.
    request_parameters=frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS"}),
)
