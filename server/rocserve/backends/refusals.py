"""Tells of a model that takes no input: its user should know before the first request fails."""

from __future__ import annotations

from rocserve.backends.base import Batch, LoadedModel
from rocserve.core.errors import ServeError
from rocserve.core.load_check import NOT_CHECKED, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.ragged import RaggedBatching
from rocserve.core.tensors import tensor_from_numpy
from rocserve.load_check.budget import Budget
from rocserve.load_check.input_search import refusal_of
from rocserve.load_check.rows import refusal_report
from rocserve.load_check.tensors import CheckedInput, Feed


def report_on_refused_zeros(
    model: LoadedModel, config: ModelConfig, refusal: ServeError, seconds: float
) -> LoadCheckReport:
    """Return a warning if a model that has refused zeros refuses other made-up inputs, too.
    `config`: complete. Integers stay 0, because a larger index may end the process."""
    signature, declared = model.signature, {entry.name: entry for entry in config.inputs}
    # Requests of a ragged batch share tensors of one dimension, which nothing here makes.
    if RaggedBatching(config) or signature.padding.dimensions:
        return NOT_CHECKED
    rows = (1,) if config.max_batch_size > 0 else ()
    specs = [spec for spec in signature.inputs if spec.name not in signature.optional_inputs]
    inputs = [
        CheckedInput(spec.name, spec.datatype, tuple("" if size == -1 else size for size in shape), end=1)
        for spec in specs
        for entry in [declared.get(spec.name)]
        for shape in [spec.shape if entry is None or entry.any_rank else (*rows, *entry.model_dims)]
    ]

    def run(feed: Feed) -> Feed:
        tensors = {spec.name: tensor_from_numpy(spec.name, feed[spec.name], spec.datatype) for spec in specs}
        result = model.execute(Batch(tensors, tuple(spec.name for spec in signature.outputs), (1,)))
        for failure in result.failures.values():
            raise failure
        return {}

    budget = Budget(seconds)
    is_refused = bool(refusal_of(run, inputs, budget))
    return refusal_report(refusal.text.partition("\n")[0], seconds - budget.left) if is_refused else NOT_CHECKED
