"""rocserve's rocAL CPU engine compared with a bare loop over libturbojpeg and OpenCV, both on one core of one process.

The bare loop does what a programmer would write: decode with the scaling that rocAL chooses, resize, round, look up the
normalised bytes. It has none of rocAL's rounding at the edges, and no checks. There are two versions: OpenCV resizes
32-bit floats, which on average comes within 0.02 grey levels of rocAL, or bytes, which is faster and differs by 0.1.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
import turbojpeg

from benchmarks.cases import SEED, Case, Quantity, Target
from benchmarks.comparison import Comparison, compare
from benchmarks.probe import Outputs
from benchmarks.ratios import Measurement
from rocserve.backends.rocal.decoding.options import ColorFormat
from rocserve.backends.rocal.engine import CpuEngine, EngineSetup
from rocserve.backends.rocal.pipeline import Layout, OutputFormat, parse_pipeline
from rocserve.core.datatypes import DataType

ROCAL_GROUP = "rocal"
BARE = "turbojpeg + cv2 (floats)"
BARE_BYTES = "turbojpeg + cv2 (bytes)"
ROCAL_FACTS = (
    "rocal: engine calls in one process, one thread, no server; turbojpeg + cv2: the same decoding, cv2.resize of"
    " floats (0.02 grey levels off rocAL) or of bytes (0.1 off), and a table; latencies are not taken",
)

_SIDE = 224
_MEAN, _DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PIPELINE: dict[str, Any] = {
    "mean_std_range": "pixel",
    "pipeline": [
        {"operation": "Resize", "dest_width": _SIDE, "dest_height": _SIDE, "is_output": False},
        {
            "operation": "CropMirrorNormalize",
            "crop_width": _SIDE,
            "crop_height": _SIDE,
            "start_x": 0,
            "start_y": 0,
            "mean": _MEAN,
            "std_dev": _DEVIATION,
            "is_output": True,
        },
    ],
}
"""The pipeline of AMD Inference Server's example."""

_ROUNDS_FOR_ONE = 6
"""Rounds here are short, because nothing has to warm up: more rounds reduce the effect of other programs' bursts."""


class EngineContender:
    """rocserve's engine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._engine = _engine()
        self._clock = _Clock()

    def prepare(self, case: Case) -> None:
        case.check({"image": self._engine.run_image(case.message)[0]})

    def measure(self, case: Case, seconds: float) -> Measurement:
        return self._clock.measure(lambda: self._engine.run_image(case.message), seconds)

    def cpu_seconds(self) -> float:
        return self._clock.cpu


class BareContender:
    """The loop without rocserve."""

    def __init__(self, name: str, floats: bool) -> None:
        self.name = name
        self._floats = floats
        self._library = turbojpeg.TurboJPEG()
        levels = np.arange(256)[:, np.newaxis]
        normalised = (levels - np.asarray(_MEAN)) / np.asarray(_DEVIATION)
        self._table = np.clip(np.rint(normalised), 0, 255).astype(np.uint8)[np.newaxis]
        self._clock = _Clock()

    def prepare(self, case: Case) -> None:
        case.check({"image": self._run(case.message)})

    def measure(self, case: Case, seconds: float) -> Measurement:
        return self._clock.measure(lambda: self._run(case.message), seconds)

    def cpu_seconds(self) -> float:
        return self._clock.cpu

    def _run(self, encoded: bytes) -> Any:
        width, height, _, _ = self._library.decode_header(encoded)
        factor = next(
            (eighths, 8)
            for eighths in range(16, 0, -1)
            if -(-width * eighths // 8) <= 1000 >= -(-height * eighths // 8)
        )
        pixels = self._library.decode(encoded, turbojpeg.TJPF_RGB, _reduced(factor), turbojpeg.TJFLAG_ACCURATEDCT)
        source = pixels.astype(np.float32) if self._floats else pixels
        resized = cv2.resize(source, (_SIDE, _SIDE), interpolation=cv2.INTER_LINEAR)
        return cv2.LUT(cv2.convertScaleAbs(resized) if self._floats else resized, self._table)


def measure_rocal(rounds: int, seconds: float, report: Callable[[str], None]) -> list[Comparison]:
    """The comparison, in rounds that take as long in total as those of a server."""
    cv2.setNumThreads(0)
    contenders = [EngineContender("rocserve"), BareContender(BARE, True), BareContender(BARE_BYTES, False)]
    return [
        compare(case, contenders, rounds * _ROUNDS_FOR_ONE, seconds / _ROUNDS_FOR_ONE, report) for case in rocal_cases()
    ]


def rocal_cases() -> Sequence[Case]:
    """A large photograph, which is scaled down while it is decoded, and a small one, which is scaled up."""
    return [_case(1200, 800, (Target(Quantity.RATE, BARE, 0.95),)), _case(500, 375, ())]


def photograph(width: int, height: int) -> bytes:
    """A JPEG with the detail of a camera's photograph, 4 bits a pixel: noise of all scales, and shapes."""
    generator = np.random.default_rng(SEED)
    image = np.linspace(170, 90, height)[:, np.newaxis, np.newaxis] * np.ones((1, width, 3))
    for cells in (4, 16, 64, 256):
        noise = generator.normal(0, 40 / cells**0.35, (cells, cells, 3))
        image += cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)
    for _ in range(40):
        centre = tuple(int(part) for part in generator.uniform((0, 0), (width, height)))
        color = tuple(float(part) for part in generator.uniform(0, 255, 3))
        cv2.circle(image, centre, int(generator.uniform(4, height / 8)), color, -1, cv2.LINE_AA)
    image += generator.normal(0, 6, image.shape)
    pixels = np.clip(image, 0, 255).astype(np.uint8)
    return bytes(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, 96])[1])


def _engine() -> CpuEngine:
    pipeline = parse_pipeline(json.dumps(_PIPELINE), channels=3)
    formats = (OutputFormat(DataType.UINT8, Layout.NHWC),)
    return CpuEngine(EngineSetup("model", pipeline, ColorFormat.RGB24, formats, batch_size=1, threads=1, device=None))


class _Clock:
    """Repeats a call for some time, and counts the CPU time of all repetitions."""

    def __init__(self) -> None:
        self.cpu = 0.0

    def measure(self, call: Callable[[], object], seconds: float) -> Measurement:
        call()
        cpu = time.process_time()
        count = 0
        begin = now = time.perf_counter()
        while now - begin < seconds:
            call()
            count += 1
            now = time.perf_counter()
        self.cpu += time.process_time() - cpu
        return Measurement(count / (now - begin))


def _reduced(eighths: tuple[int, int]) -> tuple[int, int]:
    divisor = int(np.gcd(*eighths))
    return eighths[0] // divisor, eighths[1] // divisor


def _case(width: int, height: int, targets: tuple[Target, ...]) -> Case:
    message = photograph(width, height)
    (expected,) = _engine().run_image(message)

    def check(outputs: Outputs) -> None:
        # Dividing by 0.22 multiplies a level's difference by about five; single pixels round to another level.
        assert np.mean(np.abs(outputs["image"].astype(np.float64) - expected)) < 5

    return Case(
        group=ROCAL_GROUP,
        title=f"rocAL pipeline, JPEG of {width}x{height}",
        model="",
        dynamic_batching=None,
        unit="images/s",
        units_per_request=1.0,
        connections=1,
        streams=1,
        message=message,
        check=check,
        targets=targets,
    )
