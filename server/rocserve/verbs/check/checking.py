"""Checks a model: loads it in its engine as a server would, and compares its answers with the reference's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rocserve.backends.warmup import warm_up_samples
from rocserve.cache.digests import file_digest
from rocserve.config.definition import complete_definition
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.load_check import NOT_CHECKED, LoadCheckFailed, LoadCheckMode, LoadCheckReport
from rocserve.core.requests import Signature
from rocserve.load_check.budget import Budget
from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.onnx_facts import onnx_facts
from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve.load_check.reference import Case, reference_cases
from rocserve.load_check.tensors import ROWS, CheckedInput
from rocserve.verbs.check.errors import OutputError, output_errors
from rocserve.verbs.check.graph_cuts import dimension_names, read_model
from rocserve.verbs.check.nodes import first_operator
from rocserve.verbs.check.operator_search import OperatorFinding
from rocserve.verbs.check.sides import Side, compare_with_recorded, onnx_file, open_side, reference_of
from rocserve.verbs.engines import main_engine, prepare
from rocserve.verbs.model_choice import ToolModel
from rocserve.verbs.workers import ToolWorkers

NOTHING_RAN = (
    "not checked: the model takes no made-up inputs; add samples of real ones (model_warmup in"
    " config.pbtxt), or check.npz"
)


@dataclass(frozen=True, slots=True)
class OutputRow:
    """An output of the model, as the reference gives it."""

    output: str
    datatype: str
    shape: tuple[int, ...]
    error: OutputError | None
    """None = there is no reference."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check."""

    model: str
    engine: str
    """With its version and place; its name alone if it could not load the model."""
    against: str
    """The reference; "" = there is none."""
    outputs: Sequence[OutputRow]
    """Empty if no input was found that the reference takes."""
    cases: int
    """Kinds of inputs on which the outputs were compared."""
    load_check: LoadCheckReport
    """The load check's report, as a server's load would give it."""
    failure: str = ""
    """Why the engine cannot load the model; "" = it can."""
    refusal: str = ""
    """Why a server refuses the configuration, although the engine can load the model; "" = it does not."""
    operator: OperatorFinding | None = None
    """The first operator that differs; None = it was not searched, or none differs."""
    recorded: str = ""
    """The file with recorded answers that was written; "" = none."""

    @property
    def is_compared(self) -> bool:
        """Whether the outputs have figures."""
        return any(row.error is not None for row in self.outputs)

    @property
    def faults(self) -> Sequence[str]:
        """Why the model is not right; empty = it is."""
        errors = [row.error.verdict for row in self.outputs if row.error is not None]
        wrong = [verdict.reason for verdict in errors if not verdict.right]
        found = self.load_check.warning or ", ".join(self.load_check.failures)
        nothing = NOTHING_RAN if self.against and not self.cases else ""
        return [one for one in (self.failure, self.refusal, *wrong, found, nothing) if one]


class Check:
    """One check, in workers that end with it."""

    def __init__(
        self,
        model: ToolModel,
        engine: str,
        against: str,
        *,
        has_nodes: bool,
        record: Path | None,
        report: Callable[[str], None],
    ) -> None:
        """`engine`: "auto" = the one that a server would choose. `against`: "" = the reference of this kind of model.
        `has_nodes`: search the first operator that differs. `record`: where to write the reference's answers; None =
        nowhere. `report` takes one line of progress at a time. Raises ServeError if the engine cannot be used here, or
        if the model has no graph to cut."""
        self._model = model
        self._engine = main_engine(model, engine)
        self._against = against
        self._has_nodes = has_nodes
        self._record_file = record
        self._report = report
        self._file = onnx_file(model)
        if has_nodes and self._file is None:
            raise invalid_argument("--nodes needs an ONNX file, and the model has none")

    async def run(self) -> Checked:
        """Raises ServeError if the reference cannot load the model; if the engine cannot, only without `has_nodes`."""
        async with ToolWorkers(self._model.source.settings, self._report) as workers:
            side, failure = await self._loaded(workers)
            properties = side.workers.properties if side is not None else {}
            against = self._against or reference_of(self._model, self._engine, properties)
            reference = side
            if against:
                self._report(f"loading it on {against}")
                reference = await open_side(self._model, against, workers, LoadCheckMode.OFF)
            if reference is None:
                raise unavailable(failure)
            load_check, refusal = NOT_CHECKED, ""
            if side is not None:
                refusal = self._refusal(side)
                load_check = side.workers.load_check
                if not refusal:
                    load_check = load_check.then(await asyncio.to_thread(self._recorded, side))
            cases = await asyncio.to_thread(self._cases, side or reference, reference)
            found: Sequence[OutputError] = ()
            if side is not None and against:
                found = await asyncio.to_thread(output_errors, cases, side.run, side.precision)
        return Checked(
            model=self._model.source.name,
            engine=side.description if side is not None else self._engine,
            against=reference.description if against else "",
            outputs=_rows(reference.workers.signature, cases, found),
            cases=len(cases),
            load_check=load_check,
            failure=failure,
            refusal=refusal,
            operator=await self._first_operator(cases, found, against, failure),
            recorded=self._record(cases),
        )

    async def _loaded(self, workers: ToolWorkers) -> tuple[Side | None, str]:
        """Return the model in the engine to check, or why the engine cannot load it."""
        self._report(f"loading and checking it on {self._engine}")
        prepare(self._model, self._engine)  # An engine that is not installed is not an operator's fault.
        try:
            return await open_side(self._model, self._engine, workers, LoadCheckMode.WARN), ""
        except ServeError as error:
            if not self._has_nodes:
                raise
            return None, error.text

    def _refusal(self, side: Side) -> str:
        try:
            complete_definition(self._model.definition, side.workers.signature)
        except ServeError as error:
            return error.text
        return ""

    def _recorded(self, side: Side) -> LoadCheckReport:
        """Compare the model's answer with the recorded one, if it has such a file."""
        definition = self._model.definition
        file = definition.recorded_answers(self._model.source.version_folder)
        if file is None or self._record_file is not None:
            return NOT_CHECKED
        try:
            return LoadCheckReport((compare_with_recorded(side, file, definition),))
        except LoadCheckFailed as error:
            return LoadCheckReport(warning=error.text, failures=(error.kind,))

    def _cases(self, side: Side, reference: Side) -> Sequence[Case]:
        signature, source = side.workers.signature, self._model.source
        facts = NO_FACTS if self._file is None else onnx_facts(self._file)
        # Rows of a batch, if the model batches: more than one, and no power of two, so that engines with fixed batch
        # sizes pad it.
        case_rows = 3
        most = signature.max_batch_size or case_rows
        rows = min(case_rows, most) if _has_rows(signature) else 0
        return reference_cases(
            reference.run,
            self._inputs(signature),
            [spec.name for spec in signature.outputs],
            facts,
            Budget(source.settings.load_check_seconds),
            seed_of(file_digest(source.model_file)),
            rows,
            [
                {name: tensor.numpy() for name, tensor in batch.inputs.items()}
                for _, batch in warm_up_samples(source.config, source.model_folder)
            ],
        )

    def _inputs(self, signature: Signature) -> Sequence[CheckedInput]:
        """Return the inputs with the sizes that the engine takes, and the file's names of open dimensions."""
        names = {} if self._file is None else dimension_names(read_model(self._file))
        inputs = []
        for spec in signature.inputs:
            named = names.get(spec.name, ())
            shape: list[int | str] = [
                size if size != -1 else named[place] if place < len(named) else ""
                for place, size in enumerate(spec.shape)
            ]
            if _has_rows(signature):
                shape[0] = ROWS
            inputs.append(CheckedInput(spec.name, spec.datatype, tuple(shape)))
        return inputs

    def _record(self, cases: Sequence[Case]) -> str:
        if (file := self._record_file) is None:
            return ""
        if not cases:
            raise unavailable(NOTHING_RAN)
        try:
            write_recorded(file, RecordedAnswers(cases[0].feed, cases[0].outputs))
        except ValueError as error:
            raise unavailable(str(error)) from None
        return str(file)

    async def _first_operator(
        self, cases: Sequence[Case], found: Sequence[OutputError], against: str, failure: str
    ) -> OperatorFinding | None:
        wrong = {one.verdict.case for one in found if not one.verdict.right}
        if not self._has_nodes or not (wrong or failure):
            return None
        case = next((one for one in cases if one.name in wrong), next(iter(cases), None))
        if case is None:
            raise unavailable(NOTHING_RAN)
        assert self._file is not None and against, "checked before"
        return await first_operator(self._model, self._file, (against, self._engine), case, self._report)


def _has_rows(signature: Signature) -> bool:
    return signature.supports_batching and not signature.dependent_rows


def _rows(signature: Signature, cases: Sequence[Case], found: Sequence[OutputError]) -> Sequence[OutputRow]:
    if not cases:
        return ()
    datatypes = {spec.name: spec.datatype.value for spec in signature.outputs}
    errors = {one.output: one for one in found}
    outputs = cases[0].outputs
    return [OutputRow(name, datatypes[name], array.shape, errors.get(name)) for name, array in outputs.items()]
