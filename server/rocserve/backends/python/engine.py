"""The python backend's engine, as a worker loads it."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from rocserve.backends.base import ModelSource
from rocserve.backends.python.auto_complete import completed_config, signature_of
from rocserve.backends.python.faults import fault_text
from rocserve.backends.python.model import ModelPlace, PythonModel
from rocserve.backends.python.model_module import import_model
from rocserve.backends.python.pb_utils import make_module
from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.backends.python.pb_utils.metrics import MetricBook
from rocserve.backends.python.server_log import keep_server_log
from rocserve.backends.request_model import RequestModel, RequestModelSource
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InstanceKind

if TYPE_CHECKING:
    from rocserve.backends.device_tensors import DeviceTensors

_LOG = logging.getLogger(__name__)
_CLASS_NAME = "TritonPythonModel"


def load(model: RequestModelSource) -> RequestModel:
    """Import the model's file and ask it for its configuration; it is not initialised yet.

    Raises:
        ServeError: INVALID_ARGUMENT; the file cannot be imported, has no TritonPythonModel with an `execute`, or its
            auto_complete_config fails. The text has the line.
    """
    source = model.source
    caller = Caller(model.calls)
    utilities = make_module(source.version_folder, caller, MetricBook(model.send_metrics))
    try:
        try:
            module = import_model(source.model_file, source.model_folder, utilities)
        finally:
            keep_server_log()
        model_class: type[Any] | None = getattr(module, _CLASS_NAME, None)
        if model_class is None:
            raise invalid_argument(f"{source.model_file.name} of model '{source.name}' defines no class {_CLASS_NAME}")
        if not callable(getattr(model_class, "execute", None)):
            raise invalid_argument(f"Python model {source.model_file} does not implement `execute` method.")
        signature = signature_of(completed_config(model_class, model.config_json, source.name))
    except ServeError:
        raise
    except BaseException as error:
        # sys.exit() in a model's file is a fault of the model, too.
        raise invalid_argument(fault_text(error, source.model_folder)) from error
    place = ModelPlace(
        name=source.name,
        version=source.version,
        folder=source.model_folder,
        instance_name=model.instance_name,
        instance_kind=_kind_name(source.instance_kind, source.device),
    )
    return PythonModel(
        model_class, utilities.InferenceRequest, signature, place, caller, _device_tensors(source, place)
    )


def _device_tensors(source: ModelSource, place: ModelPlace) -> DeviceTensors | None:
    """Those of the model's GPU, where it wants its inputs there and has PyTorch for it."""
    wanted = source.config.parameters.get("FORCE_CPU_ONLY_INPUT_TENSORS", "yes").strip().lower() == "no"
    if not wanted or place.instance_kind != "GPU":
        return None
    try:
        torch = importlib.import_module("torch")
        if not torch.cuda.is_available():
            raise ImportError(f"PyTorch {torch.__version__} finds no GPU here that it can use")
        shared = importlib.import_module("rocserve.backends.device_tensors")
    except ImportError as error:
        _LOG.warning("model '%s' is given its inputs in the CPU's memory: %s", source.name, error)
        return None
    number = 0 if torch.cuda.device_count() == 1 else source.device
    tensors: DeviceTensors = shared.DeviceTensors(torch.device("cuda", number))
    return tensors


def _kind_name(kind: InstanceKind, device: int | None) -> str:
    if kind is InstanceKind.AUTO:
        kind = InstanceKind.CPU if device is None else InstanceKind.GPU
    return kind.value.removeprefix("KIND_")
