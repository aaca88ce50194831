"""How a model is to be compiled and served, as its configuration says."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class Precision(enum.Enum):
    FP32 = "fp32"
    """As the model is."""
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
    """What changes the program that comes out; all of it is part of the cache's key."""

    target: Target
    precision: Precision = Precision.FP32
    calibration_data: str = ""
    """A file or folder, relative to the model's folder; only where the precision needs it."""
    calibration_pipeline: str = ""
    """A rocAL pipeline for calibration data that is images, relative to the model's folder; "" = pipeline.json there,
    where there is one."""
    calibration_samples: int = 0
    """The first so many of the calibration data are used; 0 where the precision needs none."""
    fast_math: bool = True
    exhaustive_tune: bool = False
    miopen_tuning: bool = False
    """Have MIOpen search for the fastest kernels (MIOPEN_FIND_ENFORCE=3), its database in the cache."""


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What says which programs there are, and how they come about."""

    batch_sizes: tuple[int, ...]
    """Ascending; empty for a model without a batch dimension. The largest is not above max_batch_size; a batch above
    it runs in pieces."""
    dynamic_batch: bool = False
    """One program for batches of 1 to max_batch_size; `batch_sizes` is then empty."""
    pad_with_first_row: bool = True
    """AMD Inference Server's `pad_batch`."""
    input_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By input, batch dimension not included."""
    compile_timeout_seconds: float = 3600.0
    """Of one program; 0 = none."""
    binding: str = "auto"
    """auto, c_api or module."""
