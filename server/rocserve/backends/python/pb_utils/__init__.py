"""Provides the names of Triton's interface, which models import as `triton_python_backend_utils`."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from rocserve.backends.python.pb_utils import (
    calls,
    errors,
    logger,
    metrics,
    model_configuration,
    request,
    response,
    tensor,
)
from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.core.custom_metrics import MetricKind

MODULE_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
"""The names under which models import the module; in Triton, the second module implements the first."""


def make_module(version_folder: Path, caller: Caller, metrics_of_model: metrics.ModelMetrics) -> ModuleType:
    """Make the module for one model. `caller` sends the model's requests, `metrics_of_model` keeps its metrics."""
    module = ModuleType(MODULE_NAMES[0], __doc__)
    shared = (
        tensor.Tensor,
        response.InferenceResponse,
        response.InferenceResponseSender,
        calls.ResponseIterator,
        errors.TritonError,
        errors.TritonModelException,
        logger.Logger,
        request.InferenceTrace,
        request.MemoryType,
        request.PreferredMemory,
        metrics.Metric,
        MetricKind,
        model_configuration.ModelConfig,
        model_configuration.get_input_config_by_name,
        model_configuration.get_output_config_by_name,
        model_configuration.using_decoupled_model_transaction_policy,
        calls.load_model,
        calls.unload_model,
        calls.is_model_ready,
        tensor.triton_to_numpy_type,
        tensor.numpy_to_triton_type,
        tensor.triton_string_to_numpy,
        tensor.serialize_byte_tensor,
        tensor.deserialize_bytes_tensor,
        request.get_input_tensor_by_name,
        request.get_output_tensor_by_name,
    )
    for entry in shared:
        setattr(module, entry.__name__, entry)
    constants = {
        "TRITON_STRING_TO_NUMPY": tensor.TRITON_STRING_TO_NUMPY,
        **request.MemoryType.__members__,
        **{name: value for name, value in (vars(request) | vars(response)).items() if name.startswith("TRITONSERVER_")},
    }
    for name, value in constants.items():
        setattr(module, name, value)

    class InferenceRequest(request.InferenceRequest):
        _caller = caller

    class MetricFamily(metrics.MetricFamily):
        _metrics_of_model = metrics_of_model

    def get_model_dir() -> str:
        """Return the folder of the model's version, which contains model.py."""
        return str(version_folder)

    module.__dict__.update(InferenceRequest=InferenceRequest, MetricFamily=MetricFamily, get_model_dir=get_model_dir)
    return module
