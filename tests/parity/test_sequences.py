"""Sequences: the same requests give the same batches, controls, errors and counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from support.parity.counters import Counters
from support.parity.exchange import Call, Exchange, Local, Step
from support.parity.inference import Input, infer, raw_input
from support.parity.models import ParityModel, python, tensor, write_model
from support.parity.pair import Pair
from support.parity.repository import load, unload
from tritonclient.grpc import service_pb2 as pb

TENSORS = tensor("input", "IN", "INT32", [1]) + tensor("output", "SEEN", "STRING", [1])
CONTROLS = """
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [-1, 5] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [0.5, 1.5] } }
  control_input { name: "READY" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } }
"""
IDLE = "max_sequence_idle_microseconds: 20000000"


def corrid(datatype: str) -> str:
    return f'control_input {{ name: "ID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_{datatype} }} }}'


def pause(seconds: float) -> Local:
    return Local(lambda server: time.sleep(seconds))


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    sequence: object = 1
    start: bool = False
    end: bool = False
    value: int = 0
    name: str = ""
    rows: int = 1
    more: dict[str, object] = field(default_factory=dict)

    def call(self, model: str, batches: bool) -> Call:
        values = [[self.value]] * self.rows if batches else [self.value]
        parameters: dict[str, object] = {"sequence_start": self.start, "sequence_end": self.end, **self.more}
        if self.sequence is not None:
            parameters["sequence_id"] = self.sequence
        given: Input = raw_input("IN", values)
        return Call("ModelInfer", infer(model, given, parameters=parameters, request_id=self.name))


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    batching: str
    asks: list[Ask]
    max_batch_size: int = 4
    counts: bool = True
    """Whether the statistics are compared."""
    seconds_apart: float = 0
    """The pause after each answer."""

    @property
    def model(self) -> ParityModel:
        config = python(TENSORS, self.max_batch_size, f"sequence_batching {{ {self.batching} }}")
        return ParityModel(f"sequence_{CASES.index(self)}", config, "sequence")

    @property
    def exchange(self) -> Exchange:
        name = self.model.name
        calls: list[Step] = []
        for ask in self.asks:
            calls.append(ask.call(name, self.max_batch_size > 0))
            if self.seconds_apart:
                calls.append(pause(self.seconds_apart))
        config = Call("ModelConfig", pb.ModelConfigRequest(name=name))
        counted = [Counters(name)] if self.counts else []
        steps = [load(name), config, *calls, *counted, unload(name)]
        return Exchange(f"sequences: {self.name}", steps, at_once=True, timed=self.counts or self.seconds_apart > 0)


WHOLE = [Ask(start=True), Ask(), Ask(end=True)]
THREE = [Ask(1, start=True), Ask(2, start=True), Ask(3, start=True)]
ENDS = [Ask(1, end=True), Ask(2, end=True), Ask(3, end=True)]
ALL = f"{CONTROLS} {corrid('UINT64')} {IDLE}"

CASES = [
    Case("direct", f"{ALL} direct {{ }}", WHOLE),
    Case("no strategy", ALL, WHOLE),
    Case("oldest", f"{ALL} oldest {{ max_candidate_sequences: 4 }}", WHOLE),
    Case("no batch dimension", ALL, WHOLE, max_batch_size=0),
    Case("oldest without batches", f"{ALL} oldest {{ max_candidate_sequences: 4 }}", [*THREE, *ENDS], max_batch_size=0),
    Case("no controls", IDLE, [*THREE, *ENDS]),
    Case("rows of nobody", f"{ALL} direct {{ }}", [*THREE, Ask(3), Ask(2), Ask(1), Ask(3), *ENDS]),
    Case("rows of nobody without READY", f"{corrid('INT32')} {IDLE}", [*THREE, Ask(3), Ask(2), *ENDS]),
    Case("a row is taken again", f"{ALL} direct {{ }}", [*THREE, Ask(2, end=True), Ask(9, start=True), Ask(3), Ask(9)]),
    Case("oldest has no such rows", f"{ALL} oldest {{ max_candidate_sequences: 4 }}", [*THREE, Ask(3), Ask(2), *ENDS]),
    Case("a second start", f"{ALL} direct {{ }}", [Ask(start=True), Ask(), Ask(start=True), Ask(end=True)]),
    Case("start and end in one", f"{ALL} direct {{ }}", [Ask(start=True, end=True), Ask(start=True, end=True)]),
    Case("an end without a start", f"{ALL} direct {{ }}", [Ask(end=True)], counts=False),
    Case("what begins nowhere", f"{ALL} oldest {{ }}", [Ask(), Ask("", start=True), Ask(0, start=True)], counts=False),
    Case("after the end", f"{ALL} oldest {{ }}", [*WHOLE, Ask(), Ask(end=True)], counts=False),
    Case(
        "no id",
        f"{CONTROLS} {IDLE}",
        [Ask(0), Ask(""), Ask(None), Ask(None, start=True), Ask(0, end=True)],
        counts=False,
    ),
    Case("an id below 0", f"{ALL} direct {{ }}", [Ask(-1, start=True), Ask(-1, end=True)]),
    Case(
        "texts as ids",
        f"{CONTROLS} {corrid('STRING')} {IDLE}",
        [Ask("a b", start=True), Ask("a b", end=True)],
        counts=False,
    ),
    Case(
        "a row of nobody with texts",
        f"{corrid('STRING')} {IDLE}",
        [Ask("a", start=True), Ask("b", start=True)],
        counts=False,
    ),
    Case("a text for a number", f"{ALL} direct {{ }}", [Ask("a", start=True)], counts=False),
    Case("a number for a text", f"{corrid('STRING')} {IDLE}", [Ask(4, start=True)], counts=False),
    Case(
        "texts without a control",
        f"{CONTROLS} {IDLE}",
        [Ask("x", start=True), Ask("x"), Ask("y"), Ask("x", end=True)],
        counts=False,
    ),
    *(
        Case(f"id as {datatype}", f"{corrid(datatype)} {IDLE}", [Ask(2**31 + 7, start=True), Ask(2**31 + 7, end=True)])
        for datatype in ("UINT64", "INT64", "UINT32", "INT32")
    ),
    Case("a batch of two", f"{ALL} direct {{ }}", [Ask(start=True, rows=2)], counts=False),
    Case("too large a batch", f"{ALL} direct {{ }}", [Ask(start=True, rows=5)], counts=False),
    Case(
        "wrong types",
        f"{ALL} direct {{ }}",
        [
            Ask(True, start=True),
            Ask(1.5, start=True),
            Ask(more={"sequence_start": 1}),
            Ask(more={"sequence_end": "true"}),
        ],
        counts=False,
    ),
    Case(
        "a request that fails",
        f"{ALL} direct {{ }}",
        [Ask(start=True), Ask(value=-1), Ask(), Ask(end=True, value=-1)],
        counts=False,
    ),
    Case("idle for too long", f"{CONTROLS} max_sequence_idle_microseconds: 1000", [Ask(start=True)]),
    Case(
        "iterative",
        f"{CONTROLS} iterative_sequence: true {IDLE}",
        [Ask(None, value=2, name="a"), Ask(None, name="b")],
        # Triton frees a sequence's slot after its last answer.
        seconds_apart=0.5,
    ),
    Case("iterative, oldest", f"{ALL} iterative_sequence: true oldest {{ }}", [Ask(None, value=1, name="a")]),
    Case("iterative, not again", f"{ALL} iterative_sequence: true oldest {{ }}", [Ask(None), Ask(None), Ask(None)]),
    Case(
        "iterative with ids",
        f"{CONTROLS} iterative_sequence: true {IDLE}",
        [Ask(5, start=True, value=1, name="a"), Ask(5), Ask(5, start=True, end=True)],
        counts=False,
        # Triton ends the sequence after its last answer, by an internal request.
        seconds_apart=0.5,
    ),
]


@pytest.fixture(scope="module")
def loadable(pair: Pair) -> Iterator[None]:
    for case in CASES:
        pair.dropped(write_model(pair.scratch, case.model))
    with pair.asking_ahead(*([case.exchange] for case in CASES)):
        yield


@pytest.mark.usefixtures("loadable")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sequences(pair: Pair, case: Case) -> None:
    pair.compare(case.exchange, case.model.name)
