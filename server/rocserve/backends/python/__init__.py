"""The python backend: models written for Triton's Python model interface, each instance in a separate process."""

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
            # The model brings the library that uses a GPU, such as PyTorch. numpy is in every environment.
            gpu_module="numpy",
            # A model of KIND_MODEL chooses its devices itself, among all GPUs.
            takes_kind_model=True,
        ),
    ),
    model_filenames=("model.py",),
    default_max_batch_size=0,
    answers_requests=True,
    takes_ragged_batches=True,
    models_are_data=False,
    # All other parameters may mean anything to the model.
    request_parameters=frozenset({"FORCE_CPU_ONLY_INPUT_TENSORS"}),
)
