"""Reads how MIGraphX compiles and serves a model: the configuration's `parameters`, and its execution accelerator
"migraphx".

Both take the same names (the accelerator without `engine` and `target`); `parameters` win. docs/reference/migraphx.md
lists them. `input_shapes` holds sizes for inputs with open dimensions:

    image: 3x224x224; mask: 224x224        or as JSON        {"image": [3, 224, 224], "mask": [224, 224]}

An unknown name in the accelerator is refused, such as one of ONNX Runtime's MIGraphX provider, which only the engine
"onnxruntime" takes.
"""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from rocserve.backends.batch_sizes import default_batch_sizes, wanted_batch_sizes
from rocserve.backends.parameters import read_choice, read_compile_timeout, read_integer, read_switch, unfit
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig

PARAMETERS = frozenset(
    {
        "batch",
        "batch_sizes",
        "binding",
        "calibration_data",
        "calibration_pipeline",
        "calibration_samples",
        "compile_timeout_secs",
        "exhaustive_tune",
        "fast_math",
        "input_shapes",
        "miopen_tuning",
        "pad_batch",
        "precision",
    }
)
"""Names that mean the same in `parameters` and in the accelerator, which is for GPUs and so has no `target`."""

REQUEST_PARAMETERS = PARAMETERS | {"engine", "target"}
"""The parameters that a load request may set, in `parameters` and in the accelerator's. Parameters that name files are
confined to the model's folder."""


def accelerator_parameters(config: ModelConfig) -> Mapping[str, str]:
    """Return the parameters of accelerators named "migraphx". Raises ServeError (INVALID_ARGUMENT) for an unknown name,
    or if two accelerators contradict each other."""
    values: dict[str, str] = {}
    for accelerator in config.gpu_accelerators:
        if accelerator.name.lower() != "migraphx":
            continue
        for name, text in accelerator.parameters.items():
            value, why_not = text.strip(), ""
            if name not in PARAMETERS:
                why_not = (
                    f'which is unknown to the engine "migraphx"; known are {", ".join(sorted(PARAMETERS))}. Names of'
                    " ONNX Runtime's MIGraphX provider need parameter 'engine' \"onnxruntime\""
                )
            elif (earlier := values.get(name, value)).lower() != value.lower():
                why_not = f'which is "{value}", and "{earlier}" in another accelerator of this name; keep one of them'
            if why_not:
                raise invalid_argument(
                    f"model '{config.name}': the execution accelerator 'migraphx' has parameter '{name}', {why_not}"
                )
            values[name] = value
    return values


class Precision(enum.Enum):
    FP32 = "fp32"
    """The model's own precision."""
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def needs_calibration(self) -> bool:
        return self in (Precision.FP8, Precision.INT8)


class Target(enum.Enum):
    GPU = "gpu"
    CPU = "cpu"
    REF = "ref"


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """The options that change the compiled program. All of them are part of the cache's key."""

    target: Target
    precision: Precision = Precision.FP32
    calibration_data: str = ""
    """A file or folder, relative to the model's folder; "" = the precision needs none."""
    calibration_pipeline: str = ""
    """The rocAL pipeline for images, relative to the model's folder; "" = that folder's pipeline.json, if any."""
    calibration_samples: int = 0
    """How many samples are used, counted from the first; 0 = the precision needs none."""
    fast_math: bool = True
    exhaustive_tune: bool = False
    miopen_tuning: bool = False
    """Makes MIOpen search for the fastest kernels (MIOPEN_FIND_ENFORCE=3), with its database in the cache."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The options that decide which programs a model has, and how they are made and run."""

    batch_sizes: tuple[int, ...]
    """Ascending; empty if max_batch_size is 0. A larger batch runs in pieces."""
    pad_with_first_row: bool = True
    """AMD Inference Server's `pad_batch`."""
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Input's name -> shape without the batch dimension."""
    compile_timeout_seconds: float = 3600.0
    """For each program; 0 = no limit."""
    binding: str = "auto"
    has_named_sizes: bool = False
    """Whether the configuration names the batch sizes."""


def compile_options(config: ModelConfig, kind: InstanceKind, targets: Collection[Target]) -> CompileOptions:
    """Return the compile options for an instance of this kind. `targets`: the available targets. Raises ServeError
    (INVALID_ARGUMENT) if the configuration is wrong, ServeError (UNAVAILABLE) if it needs another target."""
    config = _with_accelerator(config)
    precision = Precision(read_choice(config, "precision", "fp32", tuple(one.value for one in Precision)))
    data, pipeline = _path(config, "calibration_data"), _path(config, "calibration_pipeline")
    if precision.needs_calibration and not data:
        raise wrong(
            config,
            f"precision \"{precision.value}\" needs 'calibration_data', a file or folder with samples of the inputs;"
            " without them the answers would be wrong",
        )
    for name in ("calibration_data", "calibration_pipeline", "calibration_samples"):
        if config.parameters.get(name) and not precision.needs_calibration:
            raise wrong(config, f"'{name}' has no effect with precision \"{precision.value}\"; remove one of them")
    samples = read_integer(config, "calibration_samples", 128, 1, 10_000)
    return CompileOptions(
        target=_target(config, kind, targets),
        precision=precision,
        calibration_data=data,
        calibration_pipeline=pipeline,
        calibration_samples=samples if precision.needs_calibration else 0,
        fast_math=read_switch(config, "fast_math", True),
        exhaustive_tune=read_switch(config, "exhaustive_tune", False),
        miopen_tuning=read_switch(config, "miopen_tuning", False),
    )


def serving_options(config: ModelConfig) -> ServingOptions:
    """Return the serving options. Raises ServeError (INVALID_ARGUMENT) if the configuration is wrong."""
    # A parameter of earlier versions, for one program that takes any batch size.
    if "dynamic_batch" in config.parameters:
        raise wrong(
            config,
            "'dynamic_batch' is not supported; remove it: MIGraphX compiles a program for each of 'batch_sizes'",
        )
    config = _with_accelerator(config)
    largest = config.max_batch_size
    named = wanted_batch_sizes(config.parameters, None if config.has_open_batch else largest, config.name)
    return ServingOptions(
        batch_sizes=named or default_batch_sizes(largest),
        pad_with_first_row=read_switch(config, "pad_batch", True),
        input_shapes=_input_shapes(config),
        compile_timeout_seconds=read_compile_timeout(config),
        binding=read_choice(config, "binding", "auto", ("auto", "c_api", "module")),
        has_named_sizes=bool(named),
    )


def check_parameters(config: ModelConfig) -> None:
    """Raises ServeError (INVALID_ARGUMENT) for parameters that are wrong on every machine and for every model file."""
    serving_options(config)
    for kind in {group.kind for group in config.instance_groups if not group.passive} or {InstanceKind.AUTO}:
        compile_options(config, kind, tuple(Target))


def _with_accelerator(config: ModelConfig) -> ModelConfig:
    """Return the configuration with only MIGraphX's parameters, merged from `parameters` and the accelerator."""
    own = {name: text for name, text in config.parameters.items() if name in (*PARAMETERS, "target")}
    accelerator = dict(accelerator_parameters(config))
    if not {"batch", "batch_sizes"}.isdisjoint(own):
        # A list of batch sizes in `parameters` replaces the accelerator's, under both names.
        for name in ("batch", "batch_sizes"):
            accelerator.pop(name, None)
    # These values are names; all others are case-insensitive.
    values = {
        name: text.strip()
        if name in {"calibration_data", "calibration_pipeline", "input_shapes"}
        else text.strip().lower()
        for name, text in {**accelerator, **own}.items()
    }
    return replace(config, parameters=values)


def _target(config: ModelConfig, kind: InstanceKind, targets: Collection[Target]) -> Target:
    allowed = {InstanceKind.GPU: (Target.GPU,), InstanceKind.CPU: (Target.CPU, Target.REF)}.get(kind, tuple(Target))
    wanted = read_choice(config, "target", "", ("", *(target.value for target in Target)))
    if not wanted:
        for target in allowed:
            if target in targets:
                return target
        raise _missing(config, allowed[0], targets, f"the instance is {kind.value}")
    target = Target(wanted)
    # A configuration with KIND_CPU wants the CPU. Without KIND_CPU, an instance is on the CPU only because no GPU is
    # available.
    is_meant_for_cpu = any(group.kind is InstanceKind.CPU for group in config.instance_groups)
    if target not in allowed and (target is not Target.GPU or is_meant_for_cpu):
        other = "KIND_GPU" if target is Target.GPU else "KIND_CPU"
        raise wrong(config, f"'target' is \"{wanted}\", but the instance is {kind.value}; use {other}")
    if target not in allowed or target not in targets:
        raise _missing(config, target, targets, f"'target' is \"{wanted}\"")
    return target


def _missing(config: ModelConfig, target: Target, targets: Collection[Target], why: str) -> ServeError:
    here = ", ".join(sorted(one.value for one in targets)) or "none"
    return unavailable(
        f"model '{config.name}' needs MIGraphX's target {target.value}, because {why}, but it is not"
        f" available here (targets here: {here}); set 'target' or the kind of the instance group accordingly"
    )


def _path(config: ModelConfig, name: str) -> str:
    """Return a path within the model's folder. Only its text is checked, not the file."""
    text = config.parameters.get(name, "")
    pure = PurePosixPath(text)
    if pure.is_absolute() or ".." in pure.parts or "\0" in text:
        raise unfit(config, name, "a path within the model's folder, without '..' and not absolute")
    return str(pure) if text else ""


def wrong(config: ModelConfig, text: str) -> ServeError:
    return invalid_argument(f"model '{config.name}': {text}")


def _input_shapes(config: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """Return input's name -> shape, without the batch dimension if the model has max_batch_size."""
    text = config.parameters.get("input_shapes", "")
    entries: dict[str, tuple[int, ...]] = {}
    try:
        if text.startswith("{"):
            try:
                table = json.loads(text)
            except (ValueError, RecursionError):
                raise ValueError("the JSON cannot be read") from None
            for name, dims in table.items():
                if not isinstance(dims, list) or not all(type(dim) is int for dim in dims):
                    raise ValueError(f"'{name}' must have a list of whole numbers")
                entries[name] = tuple(dims)
        else:
            for entry in filter(None, (part.strip() for part in text.split(";"))):
                # A name may contain a colon ("input:0"), dimensions cannot.
                name, colon, dims = (part.strip() for part in entry.rpartition(":"))
                if not colon or not name:
                    raise ValueError(f"'{entry}' has no name")
                if name in entries:
                    raise ValueError(f"'{name}' occurs twice")
                words = [word.strip() for word in dims.lower().split("x")]
                if not all(word.isascii() and word.isdecimal() and len(word) <= 12 for word in words):
                    raise ValueError(f"'{dims}' are not dimensions")
                entries[name] = tuple(int(word) for word in words)
        for name, shape in entries.items():
            if any(dim < 1 for dim in shape) or math.prod(shape) > 1 << 34:
                raise ValueError(f"the dimensions of '{name}' must be 1 or more, and a tensor that memory can hold")
    except ValueError as error:
        shown = text if len(text) <= 200 else text[:200] + "..."
        raise invalid_argument(
            f"parameter 'input_shapes' of model '{config.name}' must be like \"image: 3x224x224; mask: 224x224\""
            f' (without the batch dimension), not "{shown}": {error}'
        ) from None
    return entries
