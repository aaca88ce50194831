"""ONNX Runtime's MIGraphX execution provider: the parameters that need more than to be handed on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rocserve.backends.batch_sizes import LARGEST_WITHOUT_CONFIGURATION, default_batch_sizes, parse_batch_sizes
from rocserve.backends.contained_paths import path_within
from rocserve.backends.onnx.provider_options import (
    ARENA_GROWTH,
    ProviderKind,
    count,
    one_of,
    switch,
    words,
    wrong_parameter,
)
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import ModelConfig

_PRECISIONS = {"FP32": "", "FP16": "fp16", "BF16": "bf16", "FP8": "fp8", "INT8": "int8"}
_NEEDS_TABLE = ("fp8", "int8")
_TABLE = "migraphx_int8_calibration_table_name"

_CACHED = "compiled programs are kept in the server's own cache (--cache-directory)"
_ENGINE = 'it is for the engine "migraphx" only'

MIGRAPHX_PROVIDER = ProviderKind(
    accelerator="migraphx",
    provider="MIGraphXExecutionProvider",
    on_gpu=True,
    package="onnxruntime-migraphx",
    library="libonnxruntime_providers_migraphx",
    options={
        "precision": one_of(_PRECISIONS),
        "precision_mode": one_of(_PRECISIONS),
        "migraphx_fp16_enable": switch(),
        "migraphx_bf16_enable": switch(),
        "migraphx_fp8_enable": switch(),
        "migraphx_int8_enable": switch(),
        _TABLE: words,
        "migraphx_use_native_calibration_table": switch(),
        "migraphx_int8_use_native_calibration_table": switch(),
        "migraphx_exhaustive_tune": switch(),
        "exhaustive_tune": switch(),
        "migraphx_mem_limit": count,
        "migraphx_arena_extend_strategy": ARENA_GROWTH,
        "migraphx_max_dynamic_batch": count,
        "migraphx_compile_batches": words,
        "batch_sizes": words,
        "batch": count,
        "pad_batch": switch(),
    },
    passed_over={
        "migraphx_model_cache_dir": _CACHED,
        "migraphx_save_compiled_model": _CACHED,
        "migraphx_save_compiled_path": _CACHED,
        "migraphx_save_model_path": _CACHED,
        "migraphx_load_compiled_model": _CACHED,
        "migraphx_load_compiled_path": _CACHED,
        "migraphx_load_model_path": _CACHED,
        "binding": _ENGINE,
        "compile_timeout_secs": _ENGINE,
        "fast_math": _ENGINE,
        "miopen_tuning": _ENGINE,
        "dynamic_batch": _ENGINE,
        "input_shapes": _ENGINE,
        "calibration_data": _ENGINE,
        "calibration_pipeline": _ENGINE,
        "calibration_samples": _ENGINE,
    },
    refused={"device_id": "name the GPUs in the instance group's 'gpus'"},
)

_RENAMED = {"exhaustive_tune": "migraphx_exhaustive_tune"}
_BATCHES = ("batch_sizes", "batch", "migraphx_compile_batches")
_NOT_THE_PROVIDERS = ("precision", "precision_mode", "migraphx_max_dynamic_batch", "pad_batch", *_BATCHES)


def provider_options(options: Mapping[str, str], model: str, model_folder: Path) -> Mapping[str, str]:
    """What the provider itself is given, from what the accelerator's parameters say.

    Raises:
        ServeError: INVALID_ARGUMENT; a reduced precision is asked for without what it needs, or twice in two ways.
    """
    given = {_RENAMED.get(name, name): value for name, value in options.items() if name not in _NOT_THE_PROVIDERS}
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
    for precision in _NEEDS_TABLE:
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
            raise invalid_argument(f"model '{model}': the calibration table {table} is not there or no file")
        given[_TABLE] = str(table)
    return given


def compiled_batch_sizes(config: ModelConfig, options: Mapping[str, str], largest: int) -> tuple[int, ...]:
    """The batch sizes that are compiled ahead: as `parameters` say, else the accelerator's, else 1, 2, 4 ... `largest`.

    Args:
        largest: the model's max_batch_size; 0 = it has no batch dimension, and no sizes.

    Raises:
        ServeError: INVALID_ARGUMENT; what is written is no list of sizes up to `largest`.
    """
    for where, values in (("parameter", config.parameters), ("the execution accelerator's", options)):
        for name in _BATCHES:
            text = values.get(name, "").strip()
            if text and (largest or where == "parameter"):
                return parse_batch_sizes(text, largest, f"{where} '{name}' of model '{config.name}'")
    ahead = int(options.get("migraphx_max_dynamic_batch", "0"))
    if not ahead and config.has_open_batch:
        ahead = LARGEST_WITHOUT_CONFIGURATION
    return default_batch_sizes(min(ahead, largest) if ahead else largest)


def pads_with_first_row(config: ModelConfig, options: Mapping[str, str]) -> bool:
    text = config.parameters.get("pad_batch", "").strip().lower() or options.get("pad_batch", "1")
    return text not in ("0", "false")
