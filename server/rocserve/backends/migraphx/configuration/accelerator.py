"""Reads `optimization { execution_accelerators }` for MIGraphX, in the names of this server's own parameters.

Beside those names, an accelerator "migraphx" takes the ones of ONNX Runtime's MIGraphX provider and of AMD's port of
Triton. What only that provider can do is refused with what to write instead, rather than ignored.
"""

from __future__ import annotations

from collections.abc import Mapping

from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import ModelConfig

ACCELERATOR = "migraphx"

PARAMETERS = frozenset(
    {
        "batch",
        "batch_sizes",
        "binding",
        "calibration_data",
        "calibration_pipeline",
        "calibration_samples",
        "compile_timeout_secs",
        "dynamic_batch",
        "exhaustive_tune",
        "fast_math",
        "input_shapes",
        "miopen_tuning",
        "pad_batch",
        "precision",
    }
)
"""The names that mean the same in `parameters` and in the accelerator's. An accelerator has no `target`: it is one for
GPUs."""

MAX_DYNAMIC_BATCH = "migraphx_max_dynamic_batch"
"""AMD's name for the largest batch size that is compiled ahead."""

_SAME = {
    "precision_mode": "precision",
    "migraphx_exhaustive_tune": "exhaustive_tune",
    MAX_DYNAMIC_BATCH: MAX_DYNAMIC_BATCH,
    "migraphx_compile_batches": "batch_sizes",
}

_PRECISION_SWITCHES = {
    "migraphx_fp16_enable": "fp16",
    "migraphx_bf16_enable": "bf16",
    "migraphx_fp8_enable": "fp8",
    "migraphx_int8_enable": "int8",
}

CACHE_NAMES = (
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
"""Where ONNX Runtime's provider keeps what it compiles, by its own names in all its versions."""
_CACHED = "remove it; compiled programs are kept anyway, in the server's --cache-directory"
_TABLE = (
    "MIGraphX calibrates on data, not on a table: remove it and name samples of the inputs in 'calibration_data', or"
    " let ONNX Runtime run the model with parameter 'engine' \"onnxruntime\""
)
_ARENA = "it belongs to ONNX Runtime's memory arena, which is not used here: remove it"
_REMEDIES = {
    "device_id": "remove it and name the GPUs in the instance group's 'gpus'",
    "migraphx_int8_calibration_table_name": _TABLE,
    "migraphx_use_native_calibration_table": _TABLE,
    "migraphx_int8_use_native_calibration_table": _TABLE,
    **dict.fromkeys(CACHE_NAMES, _CACHED),
    "migraphx_mem_limit": _ARENA,
    "migraphx_arena_extend_strategy": _ARENA,
    "migraphx_external_alloc": _ARENA,
    "migraphx_external_free": _ARENA,
    "migraphx_external_empty_cache": _ARENA,
}

_OFF = ("0", "false", "off", "")


REQUEST_PARAMETERS = frozenset({*PARAMETERS, *_SAME, *_PRECISION_SWITCHES, "engine", "target"})
"""What a load request may set, in `parameters` and in the accelerator's. Those that name files lead into the model's
folder only."""


def known_names() -> frozenset[str]:
    """What an accelerator may say."""
    return PARAMETERS | _SAME.keys() | _PRECISION_SWITCHES.keys()


def accelerator_parameters(config: ModelConfig) -> Mapping[str, str]:
    """What accelerators named "migraphx" say, by this server's names (and `MAX_DYNAMIC_BATCH`).

    Raises:
        ServeError: INVALID_ARGUMENT for a name that is unknown, one that MIGraphX cannot honour, or a contradiction.
    """
    values: dict[str, str] = {}
    for accelerator in config.gpu_accelerators:
        if accelerator.name.lower() != ACCELERATOR:
            continue
        for name, value in accelerator.parameters.items():
            try:
                _take(name, value.strip(), values)
            except ValueError as error:
                raise invalid_argument(
                    f"model '{config.name}': the execution accelerator 'migraphx' has parameter '{name}', {error}"
                ) from None
    return values


def _take(name: str, value: str, values: dict[str, str]) -> None:
    """Raises: ValueError: why the parameter cannot be."""
    ours = _SAME.get(name, name)
    if name in _PRECISION_SWITCHES:
        if value.lower() in _OFF:
            return
        if value.lower() not in ("1", "true", "on"):
            raise ValueError(f'which must be 1, 0, true or false, not "{value}"')
        ours, value = "precision", _PRECISION_SWITCHES[name]
    elif name not in _SAME and name not in PARAMETERS:
        if name not in _REMEDIES:
            raise ValueError(f"which is unknown; known are {', '.join(sorted(known_names()))}")
        if value.lower() not in _OFF or name == "device_id":
            raise ValueError(f"which MIGraphX itself cannot honour: {_REMEDIES[name]}")
        return
    if values.setdefault(ours, value).lower() != value.lower():
        raise ValueError(f'which asks for {ours} "{value}" where another asks for "{values[ours]}"; keep one of them')
    values[ours] = value
