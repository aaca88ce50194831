"""An ensemble of the sample repository, JPEG bytes to an answer: served, bare, and as a twin inside Triton.

The only backend of Triton's wheel that can run it is the Python one. The twin is therefore a single Python model that
makes the same engine calls as rocserve's members (rocserve's rocAL CPU engine, ONNX Runtime) on the batches of Triton's
dynamic batcher; the ratio compares the servers, not the engines.
"""

from __future__ import annotations

import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from benchmarks.bare_ensemble import BareStep, image_batch, write_steps
from benchmarks.cases import Case, Quantity, Target, infer_request
from benchmarks.contenders import WARM_UP_SECONDS
from benchmarks.line_process import LineProcess
from benchmarks.probe import Outputs, WrongAnswer
from benchmarks.ratios import BARE, Measurement
from rocserve.backends.base import ModelSource
from rocserve.backends.registry import discover_backends
from rocserve.config.definition import FolderReading, ModelDefinition, find_model_file
from rocserve.core.model_config import InstanceKind
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelInstanceGroup

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = ROOT / "model_repository"
VERSION = 1

TRITON_MODEL = """\
import sys
from pathlib import Path

sys.path[:0] = {paths!r}

import numpy
import triton_python_backend_utils as pb_utils

from benchmarks.bare_ensemble import BareEnsemble, read_steps


class TritonPythonModel:
    def initialize(self, args):
        self.ensemble = BareEnsemble(read_steps(Path(__file__).parent / "steps.pickle"))

    def execute(self, requests):
        images = [pb_utils.get_input_tensor_by_name(request, {input!r}).as_numpy() for request in requests]
        outputs = self.ensemble.run({{{input!r}: numpy.concatenate(images)}}, {outputs!r})
        responses = []
        row = 0
        for image in images:
            rows = slice(row, row + len(image))
            row += len(image)
            tensors = [pb_utils.Tensor(name, numpy.ascontiguousarray(array[rows])) for name, array in outputs.items()]
            responses.append(pb_utils.InferenceResponse(output_tensors=tensors))
        return responses
"""


@dataclass(frozen=True, slots=True)
class SampleEnsemble(ABC):
    """The ensemble and its members, each in its folder."""

    ensemble: ModelDefinition
    members: tuple[ModelDefinition, ...]
    """In the order of the steps."""
    image: Path
    """A JPEG."""

    group: ClassVar[str]
    """The name for `--only`."""
    input: ClassVar[str]
    output: ClassVar[str]
    """The output that is checked."""
    concurrencies: ClassVar[tuple[int, ...]]
    """Numbers of requests in flight, one case each."""

    @abstractmethod
    def accepts(self, answer: str) -> bool:
        """Whether this is the right first value of the output for the image, as the bare loop prints it."""

    @abstractmethod
    def check(self, outputs: Outputs) -> None:
        """Raises AssertionError or KeyError if a server's outputs are wrong for the image."""

    @property
    def max_batch_size(self) -> int:
        return min(member.config.max_batch_size for member in self.members)

    def steps(self) -> list[BareStep]:
        """The members as the server would load them, but for one caller at a time: with the same files and parameters,
        and as many threads as the server's instances have together."""
        return [
            BareStep(engine_of(member), source_of(member), step.input_map, step.output_map)
            for member, step in zip(self.members, self.ensemble.config.ensemble_steps, strict=True)
        ]

    def write_for_rocserve(self, repository: Path) -> None:
        for definition in (self.ensemble, *self.members):
            shutil.copytree(definition.folder, repository / definition.name)

    def write_for_triton(self, repository: Path) -> None:
        """One Python model with the ensemble's name, inputs and outputs."""
        version = repository / self.ensemble.name / str(VERSION)
        version.mkdir(parents=True)
        outputs = [output.name for output in self.ensemble.config.outputs]
        paths = [str(ROOT), str(ROOT / "server")]
        (version / "model.py").write_text(TRITON_MODEL.format(paths=paths, input=self.input, outputs=outputs))
        write_steps(self.steps(), version / "steps.pickle")
        message = ModelConfig(
            name=self.ensemble.name,
            backend="python",
            max_batch_size=self.max_batch_size,
            input=self.ensemble.message.input,
            output=self.ensemble.message.output,
        )
        for output in message.output:
            output.ClearField("label_filename")
        message.instance_group.add(kind=ModelInstanceGroup.KIND_CPU, count=1)
        message.dynamic_batching.SetInParent()
        (version.parent / "config.pbtxt").write_text(str(message))

    def cases(self) -> list[Case]:
        """One image a request, on one connection."""
        message = infer_request(self.ensemble.name, {self.input: image_batch(self.image.read_bytes(), 1)})
        return [
            Case(
                group=self.group,
                title=f"{self.ensemble.name} ensemble, JPEG to {self.output.lower()}, concurrency {streams}",
                model=self.ensemble.name,
                dynamic_batching=None,
                unit="images/s",
                units_per_request=1.0,
                connections=1,
                streams=streams,
                message=message,
                check=self.check,
                targets=(Target(Quantity.RATE, BARE, 0.95),),
            )
            for streams in self.concurrencies
        ]


def read_ensemble(name: str, folders: Mapping[str, Path]) -> tuple[ModelDefinition, tuple[ModelDefinition, ...]]:
    """An ensemble and its members, as the server reads them; `folders`: of models outside of the sample repository."""
    registry = discover_backends()

    def read(model: str) -> ModelDefinition:
        (definition,) = FolderReading(folders.get(model, REPOSITORY / model), registry).definitions()
        return definition

    ensemble = read(name)
    return ensemble, tuple(read(step.model_name) for step in ensemble.config.ensemble_steps)


def engine_of(member: ModelDefinition) -> str:
    assert member.backend is not None, "the ensemble's members are not ensembles"
    return member.backend.engines[0].module


def source_of(member: ModelDefinition) -> ModelSource:
    """The model source that the member's worker would receive."""
    version_folder = member.folder / str(VERSION)
    return ModelSource(
        name=member.name,
        version=VERSION,
        model_folder=member.folder,
        version_folder=version_folder,
        model_file=find_model_file(member, version_folder),
        config=member.config,
        instance_kind=InstanceKind.CPU,
        device=None,
        instance_count=1,
    )


class BareContender(LineProcess):
    """The bare loop as a contender: a process that runs the engine calls of an ensemble, and nothing between them. Its
    batches are as large as the number of requests in flight (at most the model's max_batch_size): the largest that a
    server could form."""

    name = BARE

    def __init__(self, model: SampleEnsemble, folder: Path) -> None:
        """`folder`: for what the process reads."""
        self._model = model
        self._steps_file = folder / f"bare-{model.group}-steps.pickle"
        command = [sys.executable, "-m", "benchmarks.bare_ensemble", str(self._steps_file), str(model.image)]
        super().__init__("the bare loop", [*command, model.input, model.output])

    def __enter__(self) -> Self:
        write_steps(self._model.steps(), self._steps_file)
        return super().__enter__()

    def prepare(self, case: Case) -> None:
        self.measure(case, WARM_UP_SECONDS)

    def measure(self, case: Case, seconds: float) -> Measurement:
        """Raises WrongAnswer if the loop ended or gave another answer."""
        batch_size = min(case.connections * case.streams, self._model.max_batch_size)
        result = self.ask(f"{batch_size} {seconds}")
        if not self._model.accepts(result["answer"]):
            raise WrongAnswer(f"the bare loop says {result['answer']} for {self._model.image.name}")
        return Measurement(result["images"] / result["seconds"])
