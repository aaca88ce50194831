"""rocal_pybind.types: pybind11's enums, which are not integers."""

from __future__ import annotations

import enum


class RocalStatus(enum.Enum):
    OK = 0
    CONTEXT_INVALID = 1
    RUNTIME_ERROR = 2
    UPDATE_PARAMETER_FAILED = 3
    INVALID_PARAMETER_TYPE = 4


class RocalProcessMode(enum.Enum):
    GPU = 0
    CPU = 1


class RocalTensorOutputType(enum.Enum):
    FLOAT = 0
    FLOAT16 = 1
    UINT8 = 2
    INT16 = 6


class RocalResizeScalingMode(enum.Enum):
    SCALING_MODE_DEFAULT = 0
    SCALING_MODE_STRETCH = 1
    SCALING_MODE_NOT_SMALLER = 2
    SCALING_MODE_NOT_LARGER = 3
    SCALING_MODE_MIN_MAX = 4


class RocalResizeInterpolationType(enum.Enum):
    NEAREST_NEIGHBOR_INTERPOLATION = 0
    LINEAR_INTERPOLATION = 1
    CUBIC_INTERPOLATION = 2
    LANCZOS_INTERPOLATION = 3
    GAUSSIAN_INTERPOLATION = 4
    TRIANGULAR_INTERPOLATION = 5


class RocalImageSizeEvaluationPolicy(enum.Enum):
    MAX_SIZE = 0
    USER_GIVEN_SIZE = 1
    MOST_FREQUENT_SIZE = 2
    MAX_SIZE_ORIG = 3
    USER_GIVEN_SIZE_ORIG = 4


class RocalImageColor(enum.Enum):
    RGB = 0
    BGR = 1
    GRAY = 2
    RGB_PLANAR = 3


class RocalTensorLayout(enum.Enum):
    NHWC = 0
    NCHW = 1
    NONE = 11


class RocalDecoderType(enum.Enum):
    DECODER_TJPEG = 0
    DECODER_OPENCV = 1
    DECODER_ROCJPEG = 6


class RocalExternalSourceMode(enum.Enum):
    EXTSOURCE_FNAME = 0
    EXTSOURCE_RAW_COMPRESSED = 1
    EXTSOURCE_RAW_UNCOMPRESSED = 2


class RocalOutOfBoundsPolicy(enum.Enum):
    PAD = 0
    TRIMTOSHAPE = 1
    ERROR = 2


class RocalLastBatchPolicy(enum.Enum):
    LAST_BATCH_FILL = 0
    LAST_BATCH_DROP = 1
    LAST_BATCH_PARTIAL = 2


# pybind11's export_values().
for _kind in [entry for entry in list(globals().values()) if isinstance(entry, type) and issubclass(entry, enum.Enum)]:
    globals().update(_kind.__members__)
