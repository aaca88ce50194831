"""What both engines do of a pipeline: the steps that outputs depend on, and what is known of sizes before an image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.backends.rocal.image import UNKNOWN, Extent, ResultExtent
from rocserve.backends.rocal.operations.base import Call, Measurement
from rocserve.backends.rocal.pipeline import DECODED, Layout, Pipeline, Step
from rocserve.backends.rocal.schema import Binding, PipelineError
from rocserve.core.datatypes import DataType


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How an output of the pipeline is handed out."""

    datatype: DataType
    """UINT8, FP32 or FP16; of a measurement its own."""
    layout: Layout
    """Of no meaning for a measurement."""

    def shape(self, extent: Extent, channels: int) -> tuple[int, int, int]:
        """The shape of one image, -1 for a side that is not known."""
        height = -1 if extent.height is None else extent.height
        width = -1 if extent.width is None else extent.width
        return (height, width, channels) if self.layout is Layout.NHWC else (channels, height, width)


def output_extents(pipeline: Pipeline, decoded: Extent) -> list[Extent | None]:
    """The size of each output, as far as it is the same for every image; None for a measurement.

    `decoded` is what is known of the size of the decoder's images.

    Raises:
        PipelineError: two images that are read together can never fit each other, or a result would be too large.
    """
    results = _results(pipeline.steps, ResultExtent.whole(decoded))
    return [
        results[index].size if index in results else None for index, step in enumerate(pipeline.steps) if step.is_output
    ]


def _results(steps: Sequence[Step], decoded: ResultExtent) -> Mapping[int, ResultExtent]:
    """What is known of the decoder's image and of each step's."""
    results = {DECODED: decoded}
    for index, step in enumerate(steps):
        if isinstance(step.call, Measurement):
            continue
        try:
            results[index] = step.call.extent(*(results[source] for source in step.sources))
            results[index].check()
        except ValueError as error:
            raise PipelineError(f"pipeline[{index}] ({step.name}): {error}") from None
    return results


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step that makes an image, with what it is for."""

    index: int
    call: Call
    """With the defaults of the flags that inputs give."""
    sources: tuple[int, ...]
    """The steps whose images it reads; DECODED = the decoder's."""
    bindings: tuple[Binding, ...]
    source: ResultExtent
    """What is known of its (first) source."""
    result: ResultExtent
    """What is known of its result."""
    is_read: bool
    """Whether a later step reads its image."""
    output: int | None
    """Its place among the outputs."""
    format: OutputFormat | None
    """The output's."""

    @property
    def name(self) -> str:
        return self.call.operation.name

    def call_with(self, flags: Mapping[str, bool]) -> Call:
        """With the values of the pipeline's inputs."""
        if not self.bindings:
            return self.call
        return self.call.changed({binding.key: flags[binding.input] for binding in self.bindings})


@dataclass(frozen=True, slots=True)
class Plan:
    steps: tuple[PlannedStep, ...]
    """Those that outputs depend on, in the order of the pipeline."""
    measurements: Mapping[int, Measurement]
    """By their places among the outputs."""

    @property
    def image_outputs(self) -> list[PlannedStep]:
        return [step for step in self.steps if step.output is not None]


def make_plan(pipeline: Pipeline, formats: Sequence[OutputFormat]) -> Plan:
    """`formats` are those of the pipeline's outputs, in their order."""
    results = _results(pipeline.steps, UNKNOWN)
    outputs = [index for index, step in enumerate(pipeline.steps) if step.is_output]
    read: set[int] = set()
    planned: list[PlannedStep] = []
    measurements: dict[int, Measurement] = {}
    for index in reversed(range(len(pipeline.steps))):
        step = pipeline.steps[index]
        output = outputs.index(index) if step.is_output else None
        if isinstance(step.call, Measurement):
            assert output is not None
            measurements[output] = step.call
        elif output is not None or index in read:
            planned.append(
                PlannedStep(
                    index=index,
                    call=step.call,
                    sources=step.sources,
                    bindings=step.bindings,
                    source=results[step.sources[0]],
                    result=results[index],
                    is_read=index in read,
                    output=output,
                    format=None if output is None else formats[output],
                )
            )
            read.update(step.sources)
    return Plan(tuple(reversed(planned)), measurements)
