"""What models import as `triton_python_backend_utils`: the names of Triton's interface."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from rocserve.backends.python.pb_utils import (
    bytes_tensors,
    datatypes,
    errors,
    logger,
    memory,
    metrics,
    model_configuration,
    model_control,
    request,
    response,
    response_sender,
    tensor,
)
from rocserve.backends.python.pb_utils.calls import Caller, ResponseIterator
from rocserve.backends.python.pb_utils.lookup import get_input_tensor_by_name, get_output_tensor_by_name
from rocserve.core.custom_metrics import MetricKind

MODULE_NAMES = ("triton_python_backend_utils", "c_python_backend_utils")
"""As models import it; the second is what the first is made of in Triton."""

_SAME_FOR_ALL_MODELS = (
    tensor.Tensor,
    response.InferenceResponse,
    response_sender.InferenceResponseSender,
    ResponseIterator,
    errors.TritonError,
    errors.TritonModelException,
    logger.Logger,
    memory.InferenceTrace,
    memory.MemoryType,
    memory.PreferredMemory,
    metrics.Metric,
    MetricKind,
    model_configuration.ModelConfig,
    model_configuration.get_input_config_by_name,
    model_configuration.get_output_config_by_name,
    model_configuration.using_decoupled_model_transaction_policy,
    model_control.load_model,
    model_control.unload_model,
    model_control.is_model_ready,
    datatypes.triton_to_numpy_type,
    datatypes.numpy_to_triton_type,
    datatypes.triton_string_to_numpy,
    bytes_tensors.serialize_byte_tensor,
    bytes_tensors.deserialize_bytes_tensor,
    get_input_tensor_by_name,
    get_output_tensor_by_name,
)
_CONSTANTS = {
    "TRITON_STRING_TO_NUMPY": datatypes.TRITON_STRING_TO_NUMPY,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START": request.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START,
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END": request.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END,
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL": response_sender.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
    "TRITONSERVER_REQUEST_RELEASE_ALL": request.TRITONSERVER_REQUEST_RELEASE_ALL,
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE": request.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    "TRITONSERVER_MEMORY_CPU": memory.MemoryType.TRITONSERVER_MEMORY_CPU,
    "TRITONSERVER_MEMORY_GPU": memory.MemoryType.TRITONSERVER_MEMORY_GPU,
}


def make_module(version_folder: Path, caller: Caller, book: metrics.MetricBook) -> ModuleType:
    """The module for one model: its requests go out through `caller`, its metrics are kept in `book`, its
    `get_model_dir` is `version_folder`."""
    module = ModuleType(MODULE_NAMES[0], __doc__)
    for entry in _SAME_FOR_ALL_MODELS:
        setattr(module, entry.__name__, entry)
    for name, value in _CONSTANTS.items():
        setattr(module, name, value)

    class InferenceRequest(request.InferenceRequest):
        _caller = caller

    class MetricFamily(metrics.MetricFamily):
        _book = book

    def get_model_dir() -> str:
        """The folder of the model's version, in which model.py lies."""
        return str(version_folder)

    module.__dict__.update(InferenceRequest=InferenceRequest, MetricFamily=MetricFamily, get_model_dir=get_model_dir)
    return module
