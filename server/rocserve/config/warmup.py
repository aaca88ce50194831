"""Checks of `model_warmup`: each sample must be a request that the model could get. The words are Triton's."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.config.datatypes import datatype_of_number, format_shape
from rocserve.config.model_folder import ModelFolder
from rocserve.config.sequence_validation import sequence_tensor_names
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.hints import names_hint
from rocserve.core.request_prefix import request_prefix
from rocserve.protocol import model_config_pb2
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInput, ModelWarmup

WARMUP_FOLDER = "warmup"
"""The folder in the model's folder that holds the files of samples (Triton's name)."""

_REQUEST = request_prefix([""])
_BATCH_NOTE = (
    " NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try setting"
    " max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


def check_warmup(message: ModelConfig, folder: ModelFolder) -> None:
    """What a sample says of itself, and that its files are there. Raises: ServeError: INVALID_ARGUMENT with the first
    fault; INTERNAL where a file cannot be found."""
    inputs = {tensor.name: tensor for tensor in message.input}
    for sample in message.model_warmup:
        if sample.batch_size == 0:
            continue
        for name, tensor in sample.inputs.items():
            _check_sample_input(name, tensor, inputs.get(name), sample, message.name)
            if tensor.WhichOneof("input_data_type") == "input_data_file":
                what = f"warmup file of input '{name}' of model '{message.name}'"
                file = folder.resolve(tensor.input_data_file, what, WARMUP_FOLDER)
                if not file.is_file():
                    raise _fault(
                        sample,
                        f"failed to open text file for read {file}: No such file or directory",
                        StatusCode.INTERNAL,
                    )


def check_warmup_fits(message: ModelConfig) -> None:
    """Samples against the completed inputs and batch size. Raises: ServeError INVALID_ARGUMENT."""
    inputs = {tensor.name: tensor for tensor in message.input}
    further, _ = sequence_tensor_names(message)
    most = max(message.max_batch_size, 1)
    for sample in message.model_warmup:
        if sample.batch_size == 0:
            continue
        if sample.batch_size > most:
            raise invalid_argument(
                f"failed to run warmup sample '{sample.name}': batch size {sample.batch_size} for '{message.name}', max"
                f" allowed is {most}"
            )
        for name, tensor in sample.inputs.items():
            if name in inputs:
                _check_fits(name, tensor, inputs[name], sample, message)
            elif name not in further:
                raise _fault(
                    sample,
                    f"unexpected inference input '{name}' for model '{message.name}'"
                    f"{names_hint('its inputs are', name, inputs)}",
                )
        _check_complete(sample, message)


def _check_complete(sample: ModelWarmup, message: ModelConfig) -> None:
    missing = [tensor.name for tensor in message.input if not tensor.optional and tensor.name not in sample.inputs]
    if missing:
        raise _fault(
            sample,
            f"{_REQUEST}expected {len(message.input)} inputs but got {len(sample.inputs)} inputs for model"
            f" '{message.name}'. Got input(s) [{_quoted(sorted(sample.inputs))}], but missing required input(s)"
            f" [{_quoted(missing)}]. Please provide all required input(s).",
        )


def _check_fits(
    name: str, tensor: ModelWarmup.Input, expected: ModelInput, sample: ModelWarmup, message: ModelConfig
) -> None:
    if tensor.data_type != expected.data_type:
        raise _fault(sample, _other_type(name, _type_name(tensor.data_type), expected, message.name))
    dims = list(tensor.dims)
    if len(dims) == len(expected.dims) and all(
        theirs in (-1, ours) for theirs, ours in zip(expected.dims, dims, strict=True)
    ):
        return
    batch = message.max_batch_size > 0
    wanted, given = ([-1, *expected.dims], [1, *dims]) if batch else (list(expected.dims), dims)
    raise _fault(
        sample,
        f"{_REQUEST}unexpected shape for input '{name}' for model '{message.name}'. Expected {format_shape(wanted)},"
        f" got {format_shape(given)}.{_BATCH_NOTE if batch else ''}",
    )


def _check_sample_input(
    name: str, tensor: ModelWarmup.Input, expected: ModelInput | None, sample: ModelWarmup, model: str
) -> None:
    if tensor.data_type == model_config_pb2.TYPE_INVALID:
        if expected is not None:
            raise _fault(sample, _other_type(name, "<invalid>", expected, model))
        raise _fault(sample, f"{_REQUEST}inference input '{name}' of model '{model}' has no data-type")
    if any(dim < 0 for dim in tensor.dims):
        raise _fault(sample, f"warmup setting expects all variable-size dimensions are specified for input '{name}'")
    if tensor.WhichOneof("input_data_type") is None:
        raise _fault(sample, f"{_REQUEST}warmup setting expects input '{name}' to have input_data_type set")


def _other_type(name: str, given: str, expected: ModelInput, model: str) -> str:
    return (
        f"{_REQUEST}inference input '{name}' data-type is '{given}', but model '{model}' expects"
        f" '{_type_name(expected.data_type)}'"
    )


def _type_name(number: int) -> str:
    return str(datatype_of_number(number).value)


def _quoted(names: Sequence[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def _fault(sample: ModelWarmup, text: str, code: StatusCode = StatusCode.INVALID_ARGUMENT) -> ServeError:
    return ServeError(code, f"{text} (warm-up sample '{sample.name}')")
