"""Checks in a child process, on ONNX Runtime's CPU provider, whether the dimensions that another engine pads may be
padded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rocserve.backends.onnx.checked_session import checked_inputs, checked_run, fixed_rows
from rocserve.backends.onnx.reference_job import open_file, open_session
from rocserve.cache.digests import file_digest
from rocserve.core.padding import Padding, joined
from rocserve.jobs.messages import Report
from rocserve.load_check.budget import Budget, OutOfTime
from rocserve.load_check.input_search import NoInputs
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.longest_lengths import longest_lengths, refuses_longer
from rocserve.load_check.made_inputs import seed_of
from rocserve.load_check.onnx_facts import onnx_facts
from rocserve.load_check.padding import check_padding
from rocserve.load_check.padding_verdict import PaddingVerdict, undecided


@dataclass(frozen=True, slots=True)
class OnnxPaddingJob:
    """`perform` needs ONNX Runtime alone."""

    model_name: str
    model_file: str
    shapes: Mapping[str, tuple[int, ...]]
    """Input -> sizes, -1 where it is padded, without the rows."""
    padding: Padding
    written_values: tuple[str, ...]
    """Inputs whose pad value the user has chosen."""
    has_rows: bool
    has_company: bool
    """Whether requests share batches."""
    seconds: float

    @property
    def title(self) -> str:
        return f"padding short inputs of model '{self.model_name}' on ONNX Runtime"

    def perform(self, report: Report) -> PaddingVerdict:
        report("opening the model")
        try:
            model = self.opened()
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            return undecided(self.padding, f"ONNX Runtime cannot open it: {error}")
        report("padding short inputs")
        return check_padding(model, self.padding, frozenset(self.written_values))

    def opened(self) -> LengthTrials:
        """Raises ONNX Runtime's exceptions."""
        file, session = open_file(self.model_file)
        facts, inputs = onnx_facts(file.path), checked_inputs(session, self.shapes, self.has_rows)
        run, outputs = checked_run(session, self.has_rows)
        if facts.exposed:
            run, outputs = checked_run(open_session(file.exposing(facts.exposed)), self.has_rows)
        return LengthTrials(
            run,
            inputs,
            outputs,
            facts,
            Budget(self.seconds),
            seed_of(file_digest(file.path)),
            has_company=self.has_company,
            fixed_rows=fixed_rows(session, self.has_rows),
        )


@dataclass(frozen=True, slots=True)
class EqualDimensions:
    """Which dimensions of a padding must be equal."""

    groups: tuple[tuple[int, ...], ...]
    """The dimensions by their indices: the lengths of those of a group must be equal."""
    is_lasting: bool = True
    """Whether another search would find the same; False if the time limit ended it."""

    def joined(self, padding: Padding) -> Padding:
        """Return the padding with each group as one dimension."""
        return replace(
            padding, dimensions=tuple(joined([padding.dimensions[index] for index in group]) for group in self.groups)
        )


def _equal(model: LengthTrials, padding: Padding) -> EqualDimensions:
    alone = tuple((index,) for index in range(len(padding.dimensions)))
    if len(alone) < 2:
        return EqualDimensions(alone)
    try:
        return EqualDimensions(tuple(map(tuple, model.groups(padding) or alone)))
    except NoInputs:
        return EqualDimensions(alone)
    except (OutOfTime, MemoryError):
        return EqualDimensions(alone, is_lasting=False)


@dataclass(frozen=True, slots=True)
class OnnxEqualDimensionsJob:
    """Finds which dimensions of a padding must be equal."""

    check: OnnxPaddingJob

    @property
    def title(self) -> str:
        return f"looking for equal dimensions of model '{self.check.model_name}' on ONNX Runtime"

    def perform(self, report: Report) -> EqualDimensions:
        """Raises ONNX Runtime's exceptions."""
        report("opening the model")
        model = self.check.opened()
        report("trying different lengths")
        return _equal(model, self.check.padding)


@dataclass(frozen=True, slots=True)
class DefaultSizes:
    """The sizes of dimensions that have no written sizes."""

    padding: Padding
    """Sizes that the model takes, and the values that the check has found."""
    verdict: PaddingVerdict


@dataclass(frozen=True, slots=True)
class OnnxDefaultSizesJob:
    """As OnnxPaddingJob, for sizes that end at the longest length that the model takes."""

    check: OnnxPaddingJob
    usual: int
    """The largest size, unless the model's file gives another one."""

    @property
    def title(self) -> str:
        return self.check.title

    def perform(self, report: Report) -> DefaultSizes:
        wanted = self.check.padding
        report("opening the model")
        try:
            model = self.check.opened()
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            return DefaultSizes(wanted, undecided(wanted, f"ONNX Runtime cannot open it: {error}"))
        report("trying different lengths")
        wanted = _equal(model, wanted).joined(wanted)
        report("looking for the longest input")
        longest = longest_lengths(model, wanted, self.usual)
        # On a GPU an index beyond a table raises nothing: what the CPU provider refuses must not run there.
        takes_others = any(one.takes_others for one in wanted.dimensions)
        refuses = refuses_longer(model, wanted, longest) if takes_others else [True for _ in longest]
        cut = tuple(
            replace(one, sizes=(*(size for size in one.sizes if size < most), most), takes_others=not is_end)
            for one, most, is_end in zip(wanted.dimensions, longest, refuses, strict=True)
        )
        padding = replace(wanted, dimensions=cut)
        report("padding short inputs")
        verdict = check_padding(model, padding, frozenset(self.check.written_values))
        return DefaultSizes(replace(padding, values=verdict.values), verdict)
