"""Plans ensembles: which steps an answer needs, and which step reads and writes which tensor."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.core.datatypes import DataType
from rocserve.core.memo import MOST_REMEMBERED, Memo
from rocserve.core.model_config import EnsembleStep, ModelConfig
from rocserve.core.parameters import Parameters, ParameterValue
from rocserve.core.requests import InputHead, RequestedOutput, RequestHead
from rocserve.core.serving import ServedModel, ServedVersion
from rocserve.core.tensor_places import TensorPlaces
from rocserve.core.tensors import TensorHead
from rocserve.scheduling.ensemble.step_tensors import member_shape


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    """The part of an ensemble's graph that a set of wanted outputs needs."""

    readers: dict[str, tuple[int, ...]]
    """Ensemble tensor -> the needed steps that read it."""
    reader_counts: dict[str, int]
    """Ensemble tensor -> how many needed steps, and the answer, read it. After the last read its memory is released."""
    steps: dict[int, PlannedStep]
    """The needed steps."""


class PlannedStep:
    """What the requests of a step have in common."""

    def __init__(self, step: EnsembleStep, wanted: tuple[str, ...]) -> None:
        self.member = step.member
        self.version = "" if step.model_version < 0 else str(step.model_version)
        self.inputs = tuple(step.input_map.items())
        """The member's inputs with the ensemble's tensors."""
        self.reads = frozenset(step.input_map.values())
        """The ensemble's tensors that the step waits for."""
        self.wanted = {output: step.output_map[output] for output in wanted}
        """The member's outputs that a step or the answer reads, with the ensemble's tensors."""
        # The requests of an ensemble mostly have the same form.
        self._last_form: _StepForm | None = None
        self._last_head: tuple[RequestHead, TensorPlaces] | None = None

    def head(self, form: _StepForm) -> tuple[RequestHead, TensorPlaces]:
        """Return the head of a request to the member, and its inputs' places. Equal heads are one object."""
        if self._last_head is not None and form == self._last_form:
            return self._last_head
        client, member, inputs, references, reference_outputs = form
        head = step_head(
            self.member,
            self.version,
            tuple([(name, datatype.value, member_shape(shape, member, name)) for name, datatype, shape in inputs]),
            tuple(self.wanted),
            client.parameters,
            references,
            reference_outputs,
            client.is_small,
        )
        if client.is_small:
            self._last_form, self._last_head = form, head
        return head


_StepForm = tuple[RequestHead, ModelConfig, Sequence[TensorHead], frozenset[str], frozenset[str]]
"""What decides on the head of a step's request: the head of the ensemble's request, the member, its inputs as the
ensemble has them, which of them are References, and which outputs may be."""


class EnsembleGraph:
    def __init__(self, config: ModelConfig) -> None:
        self._steps = config.ensemble_steps
        self._producer = {
            tensor: index for index, step in enumerate(self._steps) for tensor in step.output_map.values()
        }
        self._plans = Memo[tuple[str, ...], EnsemblePlan]()

    def plan(self, outputs: Sequence[str]) -> EnsemblePlan:
        """Return the plan for the wanted outputs; plans are remembered."""
        key = tuple(outputs)
        return self._plans.get(key) or self._plans.keep(key, self._make_plan(key))

    def _make_plan(self, outputs: tuple[str, ...]) -> EnsemblePlan:
        needed: set[int] = set()
        pending = list(outputs)
        while pending:
            index = self._producer.get(pending.pop())
            if index is not None and index not in needed:
                needed.add(index)
                pending.extend(self._steps[index].input_map.values())
        steps = sorted(needed)
        readers: dict[str, list[int]] = {}
        for index in steps:
            for tensor in set(self._steps[index].input_map.values()):
                readers.setdefault(tensor, []).append(index)
        counts = Counter({tensor: len(indices) for tensor, indices in readers.items()})
        counts.update(set(outputs))
        return EnsemblePlan(
            readers={tensor: tuple(indices) for tensor, indices in readers.items()},
            reader_counts=dict(counts),
            steps={
                index: PlannedStep(
                    self._steps[index],
                    tuple(output for output, tensor in self._steps[index].output_map.items() if counts[tensor]),
                )
                for index in steps
            },
        )


def step_head(
    model_name: str,
    model_version: str,
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...],
    outputs: tuple[str, ...],
    parameters: Parameters,
    references: frozenset[str] = frozenset(),
    reference_outputs: frozenset[str] = frozenset(),
    is_small: bool = True,
) -> tuple[RequestHead, TensorPlaces]:
    """Return the head of a request to a member, and its inputs' places. Equal heads are one object, so that a member
    checks each only once. `inputs`: (name, datatype, shape). `is_small`: see RequestHead."""
    # With their repr, because True equals 1, and 0.0 equals -0.0.
    typed = tuple([(name, repr(value), value) for name, value in parameters.items()])
    make = _step_head if is_small else _step_head.__wrapped__
    return make(model_name, model_version, inputs, outputs, typed, references, reference_outputs)


@functools.lru_cache(MOST_REMEMBERED)
def _step_head(
    model_name: str,
    model_version: str,
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...],
    outputs: tuple[str, ...],
    parameters: tuple[tuple[str, str, ParameterValue], ...],
    references: frozenset[str],
    reference_outputs: frozenset[str],
) -> tuple[RequestHead, TensorPlaces]:
    head = RequestHead(
        model_name,
        model_version,
        tuple(InputHead(*entry) for entry in inputs),
        tuple(RequestedOutput(name) for name in outputs),
        {name: value for name, _, value in parameters},
        references=references,
        reference_outputs=reference_outputs,
    )
    return head, TensorPlaces([TensorHead(name, DataType(datatype), shape) for name, datatype, shape in inputs])


def find_member(step: EnsembleStep, served: Mapping[str, ServedModel]) -> ServedVersion | None:
    """Return the version that a step would run."""
    model = served.get(step.member)
    if model is None:
        return None
    return model.latest if step.model_version < 0 else model.versions.get(step.model_version)
