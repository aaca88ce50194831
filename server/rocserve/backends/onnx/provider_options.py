"""Declares the supported execution providers of ONNX Runtime, and the parameters of each.

The names are those of ONNX Runtime's provider options and of Triton's ONNX Runtime backend, including AMD's port.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rocserve.backends.batch_sizes import LARGEST_WITHOUT_CONFIGURATION, default_batch_sizes, wanted_batch_sizes
from rocserve.backends.contained_paths import path_within
from rocserve.backends.migraphx.options import PARAMETERS
from rocserve.backends.parameters import read_switch
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_config import ExecutionAccelerator, ModelConfig

Reader = Callable[[str], str]
"""Converts a configuration's text to the provider's text. Raises ValueError with the expected form."""


@dataclass(frozen=True, slots=True)
class ProviderKind:
    """An execution provider of ONNX Runtime, with the parameters that it takes."""

    accelerator: str
    """The name in `optimization { execution_accelerators }`."""
    provider: str
    """ONNX Runtime's name."""
    on_gpu: bool
    package: str
    """The Python package whose ONNX Runtime has the provider."""
    options: Mapping[str, Reader]
    ignored: Mapping[str, str] = field(default_factory=dict)
    """Parameters that are accepted without effect, and the reason."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Parameters that cannot be honoured, and a remedy."""


def read_options(kind: ProviderKind, accelerator: ExecutionAccelerator, model: str) -> Mapping[str, str]:
    """Convert the accelerator's parameters to the provider's options, without those that have no effect. Raises
    ServeError (INVALID_ARGUMENT) for an unknown parameter or a wrong value."""
    options: dict[str, str] = {}
    for name, text in accelerator.parameters.items():
        if name in kind.ignored:
            continue
        if name in kind.refused:
            raise wrong_parameter(kind.accelerator, name, model, f"which cannot be followed: {kind.refused[name]}")
        read = kind.options.get(name)
        if read is None:
            known = ", ".join(sorted({*kind.options, *kind.ignored}, key=str.lower))
            raise wrong_parameter(kind.accelerator, name, model, f"which is unknown; known are {known}")
        try:
            options[name] = read(text.strip())
        except ValueError as error:
            raise wrong_parameter(kind.accelerator, name, model, f'which must be {error}, not "{text}"') from None
    return options


def wrong_parameter(accelerator: str, name: str, model: str, why: str) -> ServeError:
    return invalid_argument(f"model '{model}': the execution accelerator '{accelerator}' has parameter '{name}', {why}")


def one_of(choices: Mapping[str, str]) -> Reader:
    """Accept one of the keys, in upper or lower case."""
    by_name = {name.lower(): value for name, value in choices.items()}

    def read(text: str) -> str:
        if text.lower() not in by_name:
            raise ValueError("one of " + ", ".join(choices))
        return by_name[text.lower()]

    return read


def numbered(*names: str) -> Reader:
    """Accept one of the names, or its number, counted from 0."""
    return one_of({**{str(number): name for number, name in enumerate(names)}, **{name: name for name in names}})


def switches(*names: str, on: str = "1", off: str = "0") -> Mapping[str, Reader]:
    return dict.fromkeys(names, one_of({"1": on, "0": off, "true": on, "false": off}))


def count(text: str) -> str:
    if not (text.isascii() and text.isdecimal() and len(text) <= 20):
        raise ValueError("a whole number")
    return text


def words(text: str) -> str:
    if not text:
        raise ValueError("given")
    return text


_DEVICE = {"device_id": "name the GPUs in the instance group's 'gpus'"}

_ARENA: Mapping[str, Reader] = {
    "gpu_mem_limit": count,
    "arena_extend_strategy": numbered("kNextPowerOfTwo", "kSameAsRequested"),
    **switches("do_copy_in_default_stream"),
}

_TUNABLE_OPERATORS: Mapping[str, Reader] = {
    **switches("tunable_op_enable", "tunable_op_tuning_enable"),
    "tunable_op_max_tuning_duration_ms": count,
}

CUDA = ProviderKind(
    accelerator="cuda",
    provider="CUDAExecutionProvider",
    on_gpu=True,
    package="onnxruntime-gpu",
    options={
        **_ARENA,
        "cudnn_conv_algo_search": numbered("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
        **switches("cudnn_conv_use_max_workspace", "cudnn_conv1d_pad_to_nc1d", "enable_skip_layer_norm_strict_mode"),
        **switches("use_tf32", "prefer_nhwc", "use_ep_level_unified_stream", "fuse_conv_bias"),
        "sdpa_kernel": count,
        **_TUNABLE_OPERATORS,
    },
    refused={
        **_DEVICE,
        "enable_cuda_graph": "graphs are captured without it if PyTorch for the GPU is installed; remove it",
    },
)

ROCM = ProviderKind(
    accelerator="rocm",
    provider="ROCMExecutionProvider",
    on_gpu=True,
    package="onnxruntime-rocm",
    options={
        **_ARENA,
        **switches("miopen_conv_exhaustive_search", "miopen_conv_use_max_workspace"),
        **_TUNABLE_OPERATORS,
    },
    refused={
        **_DEVICE,
        "enable_hip_graph": "graphs are captured without it if PyTorch for the GPU is installed; remove it",
    },
)

OPENVINO = ProviderKind(
    accelerator="openvino",
    provider="OpenVINOExecutionProvider",
    on_gpu=False,
    package="onnxruntime-openvino",
    options={
        "device_type": words,
        "precision": one_of({"FP32": "FP32", "FP16": "FP16", "ACCURACY": "ACCURACY"}),
        "num_of_threads": count,
        "num_streams": count,
        "model_priority": one_of({"LOW": "LOW", "MEDIUM": "MEDIUM", "HIGH": "HIGH", "DEFAULT": "DEFAULT"}),
        "cache_dir": words,
        **switches(
            "enable_opencl_throttling", "enable_qdq_optimizer", "disable_dynamic_shapes", on="true", off="false"
        ),
    },
    refused={
        "device_id": "name the device in 'device_type', as in \"GPU.1\"",
        "load_config": "it names a file outside of the model; use the other parameters",
    },
)


_PRECISIONS = {"FP32": "", "FP16": "fp16", "BF16": "bf16", "FP8": "fp8", "INT8": "int8"}
_TABLE = "migraphx_int8_calibration_table_name"
_CACHE_NAMES = (
    "migraphx_save_compiled_model",
    "migraphx_save_compiled_path",
    "migraphx_save_model_path",
    "migraphx_save_model_name",
    "migraphx_load_compiled_model",
    "migraphx_load_compiled_path",
    "migraphx_load_model_path",
    "migraphx_load_model_name",
    "migraphx_model_cache_dir",
)
"""The options that say where the provider keeps compiled programs, by their names in all its versions."""
_NEWER_SWITCHES = frozenset(
    {
        "migraphx_hip_graph_enable",
        "migraphx_coalesce_io",
        "ORT_MIGRAPHX_HIP_GRAPH_ENABLE",
        "ORT_MIGRAPHX_COALESCE_IO",
    }
)
"""Switches that the provider has since ROCm 7.2 and 7.14. They change how a program runs, not its results."""


_MIGRAPHX_OPTIONS: Mapping[str, Reader] = {
    "precision": one_of(_PRECISIONS),
    "precision_mode": one_of(_PRECISIONS),
    **switches(*(f"migraphx_{precision}_enable" for precision in _PRECISIONS.values() if precision)),
    _TABLE: words,
    **switches("migraphx_use_native_calibration_table", "migraphx_int8_use_native_calibration_table"),
    **switches("migraphx_exhaustive_tune", "exhaustive_tune", "pad_batch", *_NEWER_SWITCHES),
    "migraphx_mem_limit": count,
    "migraphx_arena_extend_strategy": _ARENA["arena_extend_strategy"],
    "migraphx_max_dynamic_batch": count,
    "migraphx_compile_batches": words,
    "batch_sizes": words,
    "batch": count,
}

MIGRAPHX_PROVIDER = ProviderKind(
    accelerator="migraphx",
    provider="MIGraphXExecutionProvider",
    on_gpu=True,
    package="onnxruntime-migraphx",
    options=_MIGRAPHX_OPTIONS,
    ignored={
        **dict.fromkeys(_CACHE_NAMES, "compiled programs are kept in the server's own cache (--cache-directory)"),
        **dict.fromkeys(PARAMETERS - _MIGRAPHX_OPTIONS.keys(), 'it is for the engine "migraphx" only'),
    },
    refused=_DEVICE,
)


def provider_options(options: Mapping[str, str], model: str, model_folder: Path) -> Mapping[str, str]:
    """Return the provider's own options for the accelerator's parameters. Raises ServeError (INVALID_ARGUMENT) if
    precisions contradict each other, or FP8 or INT8 has no calibration table in the model's folder."""
    server_parameters = (
        "precision",
        "precision_mode",
        "migraphx_max_dynamic_batch",
        "migraphx_compile_batches",
        "batch_sizes",
        "batch",
        "pad_batch",
    )
    given = {
        "migraphx_exhaustive_tune" if name == "exhaustive_tune" else name: value
        for name, value in options.items()
        if name not in server_parameters and name not in _NEWER_SWITCHES
    }
    named = {options[name] for name in ("precision", "precision_mode") if name in options}
    if len(named) > 1:
        raise invalid_argument(f"model '{model}': 'precision' and 'precision_mode' differ; keep one of them")
    for precision in filter(None, named):
        given[f"migraphx_{precision}_enable"] = "1"
    enabled = [precision for precision in _PRECISIONS.values() if given.get(f"migraphx_{precision}_enable") == "1"]
    if named == {""} and enabled:
        raise invalid_argument(
            f"model '{model}': precision \"FP32\" contradicts 'migraphx_{enabled[0]}_enable'; keep one of them"
        )
    for precision in ("fp8", "int8"):
        if precision in enabled and _TABLE not in given:
            raise wrong_parameter(
                MIGRAPHX_PROVIDER.accelerator,
                f"migraphx_{precision}_enable",
                model,
                f"which needs '{_TABLE}': without calibration the answers would be wrong",
            )
    if _TABLE in given:
        table = path_within(model_folder, given[_TABLE], (model_folder,), f"model '{model}': the calibration table")
        if not table.is_file():
            raise invalid_argument(f"model '{model}': the calibration table {table} does not exist or is not a file")
        given[_TABLE] = str(table)
    return given


def plugin_options(kind: ProviderKind, options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the options by the names that a plugin has for them. OpenVINO's plugin takes OpenVINO's properties of each
    device as JSON; it ignores other options, and has no need for `disable_dynamic_shapes`: the sessions have none."""
    if kind is MIGRAPHX_PROVIDER:
        # MIGraphX's plugin has no settings of a memory arena.
        named = {
            name.removeprefix("migraphx_"): value
            for name, value in options.items()
            if name not in ("migraphx_mem_limit", "migraphx_arena_extend_strategy")
        }
        return {
            "int8_use_native_calibration_table" if name == "use_native_calibration_table" else name: value
            for name, value in named.items()
        }
    if kind is not OPENVINO:
        return options
    wanted = options.get("device_type", "CPU").upper().rpartition(":")[2]
    all_devices = ("CPU", "GPU", "NPU")
    devices = all_devices if wanted == "AUTO" else [name.strip().partition(".")[0] for name in wanted.split(",")]
    properties: dict[str, dict[str, str]] = {device: {} for device in devices}
    # Options of ONNX Runtime's provider -> OpenVINO's property, and the devices that have it: the others refuse it.
    known_properties = {
        "cache_dir": ("CACHE_DIR", all_devices),
        "precision": ("INFERENCE_PRECISION_HINT", all_devices),
        "num_streams": ("NUM_STREAMS", ("CPU", "GPU")),
        "num_of_threads": ("INFERENCE_NUM_THREADS", ("CPU",)),
        "model_priority": ("MODEL_PRIORITY", ("GPU", "NPU")),
        "enable_opencl_throttling": ("PLUGIN_THROTTLE", ("GPU",)),
        "enable_qdq_optimizer": ("NPU_QDQ_OPTIMIZATION", ("NPU",)),
    }
    known_values = {
        ("precision", "FP32"): "f32",
        ("precision", "FP16"): "f16",
        ("model_priority", "DEFAULT"): "MEDIUM",
        ("enable_opencl_throttling", "true"): "1",
        ("enable_opencl_throttling", "false"): "0",
        ("enable_qdq_optimizer", "true"): "YES",
        ("enable_qdq_optimizer", "false"): "NO",
    }
    for name, value in options.items():
        known, those = known_properties.get(name, ("", ()))
        if (name, value) == ("precision", "ACCURACY"):
            known = "EXECUTION_MODE_HINT"
        for device in properties.keys() & those:
            properties[device][known] = known_values.get((name, value), value)
    return {"load_config": json.dumps(properties)}


def provider_variables(options: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment variables for the switches among the accelerator's parameters that only newer providers
    know: they ignore a variable that they do not know, and refuse such an option."""
    names = {name: f"ORT_{name.removeprefix('ORT_').upper()}" for name in options if name in _NEWER_SWITCHES}
    return {variable: options[name] for name, variable in names.items()}


def compiled_batch_sizes(config: ModelConfig, options: Mapping[str, str], largest: int) -> tuple[int, ...]:
    """Return the batch sizes to compile before the first request: those of `parameters`, else the accelerator's, else
    1, 2, 4 ... `largest` (bounded by `migraphx_max_dynamic_batch`, or by 4 without max_batch_size); none if `largest`
    is 0. Raises ServeError (INVALID_ARGUMENT) like `wanted_batch_sizes`."""
    wanted = wanted_batch_sizes(config.parameters, largest, config.name)
    if not wanted and largest:
        wanted = wanted_batch_sizes(options, largest, config.name, "the execution accelerator's")
    if wanted:
        return wanted
    ahead = int(options.get("migraphx_max_dynamic_batch", "0"))
    if not ahead and config.has_open_batch:
        ahead = LARGEST_WITHOUT_CONFIGURATION
    return default_batch_sizes(min(ahead, largest) if ahead else largest)


def pads_with_first_row(config: ModelConfig, options: Mapping[str, str]) -> bool:
    """Return `pad_batch`. Raises ServeError (INVALID_ARGUMENT) if the configuration's value is not a switch."""
    return read_switch(config, "pad_batch", options.get("pad_batch", "1") == "1")
