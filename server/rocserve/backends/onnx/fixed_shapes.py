"""A model on a provider that compiles each shape: a session for each batch size, all opened before the first request.

Such a provider keeps one program a session and compiles anew when another shape comes, so a session is only ever given
the one shape. Where the model names the dimensions that vary, they are fixed when the session is opened, and it is
compiled then; else when it is warmed up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.backends.onnx import BACKEND
from rocserve.backends.onnx.migraphx_provider import compiled_batch_sizes
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature


@dataclass(frozen=True, slots=True)
class OpenInput:
    """An input as the model file has it: a dimension is a number, a name, or None where it varies without a name."""

    name: str
    dims: tuple[int | str | None, ...]


def open_inputs(session: Any) -> tuple[OpenInput, ...]:
    return tuple(OpenInput(node.name, tuple(node.shape)) for node in session.get_inputs())


def fixed_dimensions(
    inputs: Sequence[OpenInput], config: ModelConfig, provider: str, batch_size: int
) -> Mapping[str, int]:
    """Sizes for the dimensions that have names, as the configuration and the batch size say.

    Args:
        batch_size: 0 = the model has no batch dimension.

    Raises:
        ServeError: INVALID_ARGUMENT; the configuration leaves a dimension open.
    """
    declared = {entry.name: entry.dims if entry.reshape is None else entry.reshape for entry in config.inputs}
    batch = (batch_size,) if batch_size else ()
    sizes: dict[str, int] = {}
    differing: set[str] = set()
    for each in inputs:
        known = (*batch, *declared.get(each.name, ()))
        for place, dim in enumerate(each.dims):
            if isinstance(dim, int) and dim >= 0:
                continue
            size = known[place] if place < len(known) else -1
            if size < 0:
                raise _open(config, each, place, provider)
            if isinstance(dim, str) and dim and sizes.setdefault(dim, size) != size:
                differing.add(dim)
    return {name: size for name, size in sizes.items() if name not in differing}


def _open(config: ModelConfig, each: OpenInput, place: int, provider: str) -> ServeError:
    name = each.dims[place] or "?"
    return invalid_argument(
        f"model '{config.name}': dimension {place} of input '{each.name}' may have any size ({name}), but {provider}"
        " compiles each shape, and nothing may be compiled when a request comes; give all dims of the input in"
        " config.pbtxt, each as a number"
    )


def batch_sizes_ahead(config: ModelConfig, signature: Signature, accelerator: Mapping[str, str]) -> tuple[int, ...]:
    """The batch sizes to open sessions for; none for a model without a batch dimension.

    Args:
        accelerator: the parameters of the execution accelerator.

    Raises:
        ServeError: INVALID_ARGUMENT; `batch_sizes` or another of its names is no list of sizes that can be.
    """
    largest = config.max_batch_size
    if config.has_open_batch:
        largest = BACKEND.default_max_batch_size
    return compiled_batch_sizes(config, accelerator, largest if signature.supports_batching else 0)
