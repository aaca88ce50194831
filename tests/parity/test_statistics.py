"""Statistics: what known requests add to their model's counters. Both servers have the same durations above zero."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from support.parity.counters import Counters
from support.parity.exchange import Call, Exchange, Step, Stream
from support.parity.inference import Output, infer, raw_input
from support.parity.models import ParityModel, add_sub_tensors, ensemble, python, step, tensor, write_model
from support.parity.pair import Pair
from support.parity.repository import load, unload

FAULTS = tensor("input", "MODE", "STRING", [1]) + tensor("output", "OUT", "FP32", [1])
REPEAT = tensor("input", "IN", "INT32", [1]) + tensor("output", "OUT", "INT32", [1])
CACHED = "response_cache { enable: true }\n"


def add_sub(model: str, rows: int = 1, **more: Any) -> Call:
    values = [[1, 2, 3, 4]] * rows
    return Call("ModelInfer", infer(model, raw_input("INPUT0", values), raw_input("INPUT1", values), **more))


def mode(model: str, what: str) -> Call:
    return Call("ModelInfer", infer(model, raw_input("MODE", [what.encode()], "object")))


def repeat(model: str, *counts: int) -> Stream:
    return Stream([infer(model, raw_input("IN", [count])) for count in counts])


@dataclass(frozen=True, slots=True)
class Case:
    """A case with a separate model, so that its counters begin at zero."""

    name: str
    model: ParityModel
    steps: Sequence[Step]
    members: Sequence[ParityModel] = ()

    @property
    def exchange(self) -> Exchange:
        models = [*self.members, self.model]
        counters = [Counters(model.name) for model in models]
        return Exchange(
            f"statistics: {self.name}",
            [*(load(model.name) for model in models), *counters, *self.steps, *counters],
            ordered=False,
            at_once=True,
            timed=True,
        )

    @property
    def unloading(self) -> Exchange:
        return Exchange(
            f"statistics: unload after {self.name}", [unload(model.name) for model in [self.model, *self.members]]
        )


def counted(name: str, *steps: Call, config: str = "") -> Case:
    return Case(
        name, ParityModel(steps[0].message.model_name, python(add_sub_tensors(), more=config), "add_sub"), steps
    )


BATCHED = "counted_sizes"
MEMBER = ParityModel("counted_member", python(add_sub_tensors()), "add_sub")
FAULTY_MEMBER = ParityModel("counted_faulty_member", python(FAULTS, 0), "faults")
MAPS = ({f"INPUT{i}": f"INPUT{i}" for i in (0, 1)}, {f"OUTPUT{i}": f"OUTPUT{i}" for i in (0, 1)})
CHAIN = ParityModel("counted_chain", ensemble(add_sub_tensors(), step("counted_member", *MAPS)))
CACHED_MEMBER = ParityModel("counted_cached_member", python(add_sub_tensors(), more=CACHED), "add_sub")
CACHED_CHAIN = ParityModel("counted_cached_chain", ensemble(add_sub_tensors(), step("counted_cached_member", *MAPS)))
FAULTY_CHAIN = ParityModel(
    "counted_faulty_chain",
    ensemble(FAULTS, step("counted_faulty_member", {"MODE": "MODE"}, {"OUT": "OUT"}), max_batch_size=0),
)
CASES = [
    counted("one request", add_sub("counted_one")),
    counted("three requests", *(add_sub("counted_three") for _ in range(3))),
    counted("batches of several sizes", *(add_sub(BATCHED, rows) for rows in (1, 2, 2, 8, 5))),
    counted(
        "a dynamic batcher", *(add_sub("counted_dynamic", rows) for rows in (2, 3)), config="dynamic_batching { }\n"
    ),
    counted(
        "classes and fewer outputs",
        add_sub("counted_outputs", outputs=["OUTPUT1"]),
        add_sub("counted_outputs", outputs=[Output("OUTPUT0", {"classification": 1})]),
    ),
    counted(
        "refused requests",
        add_sub("counted_refused", 9),
        add_sub("counted_refused"),
        add_sub("counted_refused", outputs=["X"]),
    ),
    counted("a cache", *(add_sub("counted_cache", rows) for rows in (1, 2, 1, 1, 2)), config=CACHED),
    counted(
        "a cache and other outputs",
        add_sub("counted_cache_outputs"),
        add_sub("counted_cache_outputs", outputs=["OUTPUT0"]),
        add_sub("counted_cache_outputs", outputs=["OUTPUT0"], request_id="again", parameters={"colour": "red"}),
        config=CACHED,
    ),
    counted(
        "a cache before a dynamic batcher",
        *(add_sub("counted_cache_batched", rows) for rows in (2, 2, 3)),
        config=CACHED + "dynamic_batching { }\n",
    ),
    Case(
        "a chain with a cache",
        CACHED_CHAIN,
        [add_sub("counted_cached_chain"), add_sub("counted_cached_chain"), add_sub("counted_cached_chain", 2)],
        [CACHED_MEMBER],
    ),
    Case(
        "a model that fails",
        ParityModel("counted_faults", python(FAULTS, 0), "faults"),
        [mode("counted_faults", what) for what in ("right", "error", "raise", "right", "few")],
    ),
    Case(
        "a decoupled model",
        ParityModel("counted_repeat", python(REPEAT, 0, "model_transaction_policy { decoupled: true }\n"), "repeat"),
        [repeat("counted_repeat", 3, 1), repeat("counted_repeat", 0), repeat("counted_repeat", -2)],
    ),
    Case(
        "a chain", CHAIN, [add_sub("counted_chain", 2), add_sub("counted_chain"), add_sub("counted_chain", 9)], [MEMBER]
    ),
    Case(
        "a chain whose member fails",
        FAULTY_CHAIN,
        [mode("counted_faulty_chain", what) for what in ("right", "error", "raise")],
        [FAULTY_MEMBER],
    ),
]


@pytest.fixture(scope="module")
def loadable(pair: Pair) -> Iterator[None]:
    for case in CASES:
        for model in [*case.members, case.model]:
            pair.dropped(write_model(pair.scratch, model))
    with pair.asking_ahead(*([case.exchange] for case in CASES)):
        yield


@pytest.mark.usefixtures("loadable")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_statistics(pair: Pair, case: Case) -> None:
    pair.compare(case.exchange, anew=[case.unloading])
