"""The python backend's engine, as a worker loads it."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from rocserve.backends.base import ModelSource
from rocserve.backends.python.model import ModelPlace, PythonModel, fault_text, keep_server_log
from rocserve.backends.python.pb_utils import MODULE_NAMES, make_module
from rocserve.backends.python.pb_utils.calls import Caller
from rocserve.backends.python.pb_utils.metrics import MetricBook
from rocserve.backends.python.pb_utils.model_configuration import ModelConfig
from rocserve.backends.python.pb_utils.tensor import BY_CONFIG_NAME
from rocserve.backends.request_model import RequestModel, RequestModelSource
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import InstanceKind
from rocserve.core.requests import Signature, TensorSpec

if TYPE_CHECKING:
    from rocserve.backends.device_tensors import DeviceTensors

_LOG = logging.getLogger(__name__)
_CLASS_NAME = "TritonPythonModel"


def load(model: RequestModelSource) -> RequestModel:
    """Import the model's file and ask it for its configuration; it is not initialised yet. Raises: ServeError:
    INVALID_ARGUMENT; the file cannot be imported, has no TritonPythonModel with an `execute`, or its
    auto_complete_config fails. The text has the line."""
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


_FOR_CHILDREN = Path(__file__).with_name("spawned")


class SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles anew on each import: nothing is written into the repository, and no old bytecode is taken for new.

    Python knows bytecode's age by whole seconds, which a swap of models may well be within.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def import_model(model_file: Path, model_folder: Path, utilities: ModuleType) -> ModuleType:
    """The module `<version>.<file's name>`, as Triton calls it; `utilities` is its `triton_python_backend_utils`.

    The version's folder and the model's are appended to sys.path, and the version's folder is a package, so that a
    file beside model.py can be imported by its name or relatively. Children that multiprocessing spawns inherit the
    path and find their own `triton_python_backend_utils` there. For a process that has one model.

    Raises:
        Whatever the file raises.
    """
    version_folder = model_file.parent
    sys.modules.update(dict.fromkeys(MODULE_NAMES, utilities))
    # Triton has a model see no arguments; a model that parses a command line is not to find the worker's there.
    sys.argv = [""]
    _import_afresh_from(model_folder)
    for folder in (version_folder, model_folder, _FOR_CHILDREN):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    package = ModuleType(version_folder.name)
    package.__path__ = [str(version_folder)]
    sys.modules[package.__name__] = package
    name = f"{package.__name__}.{model_file.stem}"
    loader = SourceLoader(name, str(model_file))
    spec = importlib.util.spec_from_file_location(name, model_file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _import_afresh_from(model_folder: Path) -> None:
    """Use SourceLoader for all sources of the model, but not for an environment that it may have brought along."""
    environment = Path(sys.prefix)
    details = (
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
        (SourceLoader, importlib.machinery.SOURCE_SUFFIXES),
        (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
    )

    def find_in(path: str | os.PathLike[str]) -> importlib.machinery.FileFinder:
        folder = Path(path)
        if not folder.is_relative_to(model_folder) or folder.is_relative_to(environment):
            raise ImportError("not a folder of the model", path=str(path))
        return importlib.machinery.FileFinder(str(path), *details)

    sys.path_hooks.insert(0, find_in)


def completed_config(model_class: type[Any], config_json: str, model_name: str) -> dict[str, Any]:
    """The configuration after the class's auto_complete_config, where it has one. Raises: ServeError: INVALID_ARGUMENT;
    it returns something else. Whatever it raises."""
    config = ModelConfig(config_json)
    if hasattr(model_class, "auto_complete_config"):
        config = model_class.auto_complete_config(config)
    if not isinstance(config, ModelConfig):
        raise invalid_argument(
            f"auto_complete_config function in model '{model_name}' must return a valid pb.ModelConfig object."
        )
    # Through JSON, as everything goes that is no plain number (a numpy integer in dims) fails here, with its name.
    completed: dict[str, Any] = json.loads(json.dumps(config.as_dict()))
    return completed


def signature_of(config: Mapping[str, Any]) -> Signature:
    """The configuration as what the model reports of itself: all of it is the model's word. Raises: ServeError:
    INVALID_ARGUMENT; a tensor's datatype or dims are not what a configuration may have."""
    max_batch_size = int(config["max_batch_size"])
    batching, name = max_batch_size > 0, str(config.get("name", ""))
    return Signature(
        inputs=tuple(_spec(tensor, "input", batching, name) for tensor in config["input"]),
        outputs=tuple(_spec(tensor, "output", batching, name) for tensor in config["output"]),
        supports_batching=batching,
        optional_inputs=frozenset(tensor["name"] for tensor in config["input"] if tensor.get("optional", False)),
        max_batch_size=max_batch_size,
        dynamic_batching="dynamic_batching" in config,
        decoupled=bool(config.get("model_transaction_policy", {}).get("decoupled", False)),
    )


def _spec(tensor: Mapping[str, Any], what: str, batching: bool, model_name: str) -> TensorSpec:
    name, data_type = tensor["name"], tensor["data_type"]
    datatype = BY_CONFIG_NAME.get(data_type)
    if datatype is None:
        raise invalid_argument(
            f"{what} '{name}' of model '{model_name}' has data_type '{data_type}'; expected one of Triton's, such as"
            " TYPE_FP32, TYPE_INT64 or TYPE_STRING"
        )
    dims = _dims(tensor, what, model_name)
    return TensorSpec(name, datatype, (-1, *dims) if batching else dims)


def _dims(tensor: Mapping[str, Any], what: str, model_name: str) -> tuple[int, ...]:
    reshape = tensor.get("reshape")
    dims = tensor["dims"] if reshape is None else reshape.get("shape", ())
    if not isinstance(dims, Sequence) or isinstance(dims, str):
        dims = ("?",)
    try:
        sizes = tuple(int(dim) for dim in dims)
    except (TypeError, ValueError):
        sizes = (0,)
    if any(size < 1 and size != -1 for size in sizes):
        raise invalid_argument(
            f"{what} '{tensor['name']}' of model '{model_name}' has dims {tensor['dims']}; expected a list of whole"
            " numbers, each 1 or more, or -1 for any size"
        )
    return sizes
