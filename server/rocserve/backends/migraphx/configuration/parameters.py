"""What a model's configuration asks of MIGraphX: its `parameters`, and its execution accelerator "migraphx".

Both take the same names; `parameters` win. docs/reference/migraphx.md lists them. `input_shapes` has
sizes for inputs whose model leaves dimensions open:

    image: 3x224x224; mask: 224x224        or as JSON        {"image": [3, 224, 224], "mask": [224, 224]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath

from rocserve.backends.batch_sizes import default_batch_sizes, parse_batch_sizes
from rocserve.backends.migraphx.configuration.accelerator import MAX_DYNAMIC_BATCH, PARAMETERS, accelerator_parameters
from rocserve.backends.migraphx.configuration.options import CompileOptions, Precision, ServingOptions, Target
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.model_config import InstanceKind, ModelConfig

_MOST_ELEMENTS = 1 << 34


def parse_input_shapes(text: str, model: str) -> Mapping[str, tuple[int, ...]]:
    """By input; the batch dimension, where the model has max_batch_size, is not among them.

    Raises:
        ServeError: INVALID_ARGUMENT; the text is no such list.
    """
    entries = _json_entries(text, model) if text.startswith("{") else _plain_entries(text, model)
    for name, shape in entries.items():
        if any(dim < 1 for dim in shape) or math.prod(shape) > _MOST_ELEMENTS:
            raise _wrong(
                text, model, f"the dimensions of '{name}' must be 1 or more, and a tensor that memory can hold"
            )
    return entries


def _plain_entries(text: str, model: str) -> dict[str, tuple[int, ...]]:
    entries: dict[str, tuple[int, ...]] = {}
    for entry in filter(None, (part.strip() for part in text.split(";"))):
        # Names may hold colons ("input:0"); dimensions cannot.
        name, colon, dims = (part.strip() for part in entry.rpartition(":"))
        if not colon or not name:
            raise _wrong(text, model, f"'{entry}' has no name")
        if name in entries:
            raise _wrong(text, model, f"'{name}' is there twice")
        words = [word.strip() for word in dims.lower().split("x")]
        if not all(word.isascii() and word.isdecimal() and len(word) <= 12 for word in words):
            raise _wrong(text, model, f"'{dims}' are no dimensions")
        entries[name] = tuple(int(word) for word in words)
    return entries


def _json_entries(text: str, model: str) -> dict[str, tuple[int, ...]]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise _wrong(text, model, "the JSON cannot be read") from None
    for name, dims in table.items():
        if not isinstance(dims, list) or not all(type(dim) is int for dim in dims):
            raise _wrong(text, model, f"'{name}' must have a list of whole numbers")
    return {name: tuple(dims) for name, dims in table.items()}


def _wrong(text: str, model: str, why: str) -> ServeError:
    shown = text if len(text) <= 200 else text[:200] + "..."
    return invalid_argument(
        f"parameter 'input_shapes' of model '{model}' must be like \"image: 3x224x224; mask: 224x224\" (without the"
        f' batch dimension), not "{shown}": {why}'
    )


_BINDINGS = ("auto", "c_api", "module")
_CALIBRATION_SAMPLES = 128
_MOST_CALIBRATION_SAMPLES = 10_000
_LONGEST_TIMEOUT = 30 * 24 * 3600.0


def compile_options(config: ModelConfig, kind: InstanceKind, targets: Collection[Target]) -> CompileOptions:
    """How the model's programs are compiled.

    Args:
        kind: of the instance.
        targets: those that can be compiled for and run here; the GPU only where there is one.

    Raises:
        ServeError: INVALID_ARGUMENT where the configuration is wrong or contradicts itself, UNAVAILABLE where it asks
            for a target that this machine lacks.
    """
    settings = _Settings(config)
    precision = Precision(settings.choice("precision", "fp32", tuple(each.value for each in Precision)))
    data = settings.path("calibration_data")
    pipeline = settings.path("calibration_pipeline")
    if precision.needs_calibration and not data:
        raise settings.wrong(
            f"precision \"{precision.value}\" needs 'calibration_data', a file or folder with samples of the inputs;"
            " without them the answers would be wrong"
        )
    for name in ("calibration_data", "calibration_pipeline", "calibration_samples"):
        if settings.text(name) and not precision.needs_calibration:
            raise settings.wrong(f"'{name}' is of no use with precision \"{precision.value}\"; remove one of them")
    samples = settings.integer("calibration_samples", _CALIBRATION_SAMPLES, 1, _MOST_CALIBRATION_SAMPLES)
    return CompileOptions(
        target=_target(settings, kind, targets),
        precision=precision,
        calibration_data=data,
        calibration_pipeline=pipeline,
        calibration_samples=samples if precision.needs_calibration else 0,
        fast_math=settings.boolean("fast_math", True),
        exhaustive_tune=settings.boolean("exhaustive_tune", False),
        miopen_tuning=settings.boolean("miopen_tuning", False),
    )


def serving_options(config: ModelConfig) -> ServingOptions:
    """Which programs the model has, and how they come about.

    Raises:
        ServeError: INVALID_ARGUMENT where the configuration is wrong or contradicts itself.
    """
    settings = _Settings(config)
    dynamic_batch = settings.boolean("dynamic_batch", False)
    if dynamic_batch and config.max_batch_size == 0:
        raise settings.wrong("'dynamic_batch' needs max_batch_size, the largest batch that the program is to take")
    return ServingOptions(
        batch_sizes=_batch_sizes(settings, dynamic_batch),
        dynamic_batch=dynamic_batch,
        pad_with_first_row=settings.boolean("pad_batch", True),
        input_shapes=parse_input_shapes(settings.text("input_shapes"), config.name),
        compile_timeout_seconds=settings.number("compile_timeout_secs", 3600.0, _LONGEST_TIMEOUT),
        binding=settings.choice("binding", "auto", _BINDINGS),
    )


def check_parameters(config: ModelConfig) -> None:
    """Refuse what is wrong whatever the machine has and the model's file says; loads nothing.

    Raises:
        ServeError: INVALID_ARGUMENT.
    """
    serving_options(config)
    for kind in {group.kind for group in config.instance_groups if not group.passive} or {InstanceKind.AUTO}:
        compile_options(config, kind, tuple(Target))


def _batch_sizes(settings: _Settings, dynamic_batch: bool) -> tuple[int, ...]:
    largest = settings.config.max_batch_size
    given = {name: settings.text(name) for name in ("batch_sizes", "batch") if settings.text(name)}
    if dynamic_batch and given:
        raise settings.wrong(
            f"'dynamic_batch' makes one program for all batches, so '{next(iter(given))}' contradicts it; remove one of"
            " them"
        )
    if dynamic_batch:
        return ()
    if len(given) > 1:
        raise settings.wrong("'batch' is the one batch size, 'batch_sizes' a list of them; remove one of them")
    for name, text in given.items():
        if name == "batch":
            settings.integer(name, 1, 1, 2**31 - 1)
        return parse_batch_sizes(text, largest, f"parameter '{name}' of model '{settings.config.name}'")
    ahead = settings.integer(MAX_DYNAMIC_BATCH, 0, 0, 2**31 - 1)
    return default_batch_sizes(min(ahead, largest) if ahead else largest)


_KIND_TARGETS = {InstanceKind.GPU: (Target.GPU,), InstanceKind.CPU: (Target.CPU, Target.REF)}


def _target(settings: _Settings, kind: InstanceKind, targets: Collection[Target]) -> Target:
    allowed = _KIND_TARGETS.get(kind, tuple(Target))
    wanted = settings.choice("target", "", ("", *(target.value for target in Target)))
    if not wanted:
        for target in allowed:
            if target in targets:
                return target
        raise settings.missing(allowed[0], targets, f"the instance is {kind.value}")
    target = Target(wanted)
    if target not in allowed and (target is not Target.GPU or _is_meant_for_cpu(settings.config)):
        other = "KIND_GPU" if target is Target.GPU else "KIND_CPU"
        raise settings.wrong(f"'target' is \"{wanted}\", but the instance is {kind.value}; use {other}")
    if target not in allowed or target not in targets:
        raise settings.missing(target, targets, f"'target' is \"{wanted}\"")
    return target


def _is_meant_for_cpu(config: ModelConfig) -> bool:
    """Whether the configuration wants the CPU, and not only gets it because there is no GPU."""
    return any(group.kind is InstanceKind.CPU for group in config.instance_groups)


class _Settings:
    """The configuration's words for MIGraphX, read as what they must be."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        own = {name: text for name, text in config.parameters.items() if name in (*PARAMETERS, "target")}
        accelerator = dict(accelerator_parameters(config))
        if not {"batch", "batch_sizes"}.isdisjoint(own):
            # One list of batch sizes takes the other's place, whatever names they have.
            for name in ("batch", "batch_sizes", "dynamic_batch", MAX_DYNAMIC_BATCH):
                accelerator.pop(name, None)
        self._values: Mapping[str, str] = {**accelerator, **own}

    def text(self, name: str) -> str:
        """ "" where nothing is said."""
        return self._values.get(name, "").strip()

    def choice(self, name: str, default: str, choices: tuple[str, ...]) -> str:
        text = self.text(name).lower() or default
        if text not in choices:
            raise self._unfit(name, "one of " + ", ".join(filter(None, choices)))
        return text

    def boolean(self, name: str, default: bool) -> bool:
        text = self.text(name).lower()
        if text not in ("", "true", "1", "false", "0"):
            raise self._unfit(name, "true, false, 1 or 0")
        return text in ("true", "1") if text else default

    def integer(self, name: str, default: int, least: int, most: int) -> int:
        text = self.text(name)
        if not text:
            return default
        # More digits than any bound has would be a number too long to read.
        if not (text.isascii() and text.isdecimal() and len(text) <= 12 and least <= int(text) <= most):
            raise self._unfit(name, f"a whole number from {least} to {most}")
        return int(text)

    def number(self, name: str, default: float, most: float) -> float:
        text = self.text(name)
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            raise self._unfit(name, f"seconds from 0 (no limit) to {most:.0f}")
        return value

    def path(self, name: str) -> str:
        """A path within the model's folder, as far as its text tells."""
        text = self.text(name)
        pure = PurePosixPath(text)
        if pure.is_absolute() or ".." in pure.parts or "\0" in text:
            raise self._unfit(name, "a path within the model's folder, without '..' and not absolute")
        return str(pure) if text else ""

    def wrong(self, text: str) -> ServeError:
        return invalid_argument(f"model '{self.config.name}': {text}")

    def missing(self, target: Target, targets: Collection[Target], why: str) -> ServeError:
        here = ", ".join(sorted(each.value for each in targets)) or "none"
        return unavailable(
            f"model '{self.config.name}' needs MIGraphX's target {target.value}, because {why}, but it cannot be had"
            f" here (targets here: {here}); set 'target' or the kind of the instance group accordingly"
        )

    def _unfit(self, name: str, expected: str) -> ServeError:
        return invalid_argument(
            f"parameter '{name}' of model '{self.config.name}' must be {expected}, not \"{self.text(name)}\""
        )
