"""Checks of `model_warmup`: each sample must be a request that the model could get."""

from __future__ import annotations

from pathlib import Path

from rocserve.config.paths import resolve_within
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.protocol import model_config_pb2
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelWarmup

WARMUP_FOLDER = "warmup"
"""The folder in the model's folder that holds the files of samples (Triton's name)."""


def check_warmup(message: ModelConfig, folder: Path, roots: tuple[Path, ...]) -> None:
    """What a sample says of itself, and that its files are there.

    Raises:
        ServeError: INVALID_ARGUMENT with the first fault.
    """
    for sample in message.model_warmup:
        if sample.batch_size == 0:
            continue
        for name, tensor in sample.inputs.items():
            _check_sample_input(name, tensor, sample, message.name)
            if tensor.WhichOneof("input_data_type") == "input_data_file":
                what = f"warmup file of input '{name}' of model '{message.name}'"
                file = resolve_within(folder / WARMUP_FOLDER, tensor.input_data_file, roots, what)
                if not file.is_file():
                    raise invalid_argument(f"{what}: there is no file {WARMUP_FOLDER}/{tensor.input_data_file}")


def check_warmup_fits(message: ModelConfig) -> None:
    """Samples against the completed inputs and batch size. Raises: ServeError INVALID_ARGUMENT."""
    inputs = {tensor.name: tensor for tensor in message.input}
    for sample in message.model_warmup:
        if sample.batch_size == 0:
            continue
        if sample.batch_size > max(message.max_batch_size, 1):
            raise _fault(
                sample,
                message.name,
                f"has batch_size {sample.batch_size}, but the model's is at most {max(message.max_batch_size, 1)}",
            )
        for name, tensor in sample.inputs.items():
            if name not in inputs:
                raise _fault(
                    sample, message.name, f"has input '{name}'; the model's inputs are: {', '.join(sorted(inputs))}"
                )
            expected = inputs[name].data_type
            if tensor.data_type != expected:
                given, wanted = (model_config_pb2.DataType.Name(kind) for kind in (tensor.data_type, expected))
                raise _fault(sample, message.name, f"gives {given} for input '{name}', but the model expects {wanted}")
        missing = sorted(name for name, tensor in inputs.items() if not tensor.optional and name not in sample.inputs)
        if missing:
            raise _fault(sample, message.name, f"lacks the input(s): {', '.join(missing)}")


def _check_sample_input(name: str, tensor: ModelWarmup.Input, sample: ModelWarmup, model: str) -> None:
    if tensor.data_type == model_config_pb2.TYPE_INVALID:
        raise _fault(sample, model, f"must specify 'data_type' for input '{name}'")
    if any(dim < 0 for dim in tensor.dims):
        raise _fault(sample, model, f"expects all variable-size dimensions are specified for input '{name}'")
    if tensor.WhichOneof("input_data_type") is None:
        raise _fault(
            sample, model, f"expects one of 'zero_data', 'random_data' or 'input_data_file' for input '{name}'"
        )


def _fault(sample: ModelWarmup, model: str, text: str) -> ServeError:
    return invalid_argument(f"warmup setting '{sample.name}' of model '{model}' {text}")
