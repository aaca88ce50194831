"""Parameters of a model that are for the engine migraphx: ONNX Runtime says that it leaves them alone."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.backends.migraphx.configuration.accelerator import PARAMETERS
from rocserve.core.model_config import ModelConfig

_OF_COMPILED_SHAPES = frozenset({"batch", "batch_sizes", "pad_batch"})
"""A provider that compiles each shape takes them as well."""
_UNREDUCED = "fp32"


def left_alone(config: ModelConfig, compiles_shapes: bool) -> Sequence[str]:
    """The names in `parameters` that ask for something that is not done.

    `compiles_shapes`: the session is on a provider that does.
    """
    foreign = PARAMETERS | {"target"}
    if compiles_shapes:
        foreign -= _OF_COMPILED_SHAPES
    values = {name: text.strip().lower() for name, text in config.parameters.items() if name in foreign}
    return sorted(name for name, text in values.items() if text and not (name == "precision" and text == _UNREDUCED))


def warning(model_name: str, names: Sequence[str]) -> str:
    """For the log. At least one name."""
    quoted = ", ".join(f"'{name}'" for name in names)
    what = f"parameter {quoted} is" if len(names) == 1 else f"parameters {quoted} are"
    return f"model '{model_name}': {what} MIGraphX's; ONNX Runtime runs the model as it is"
