"""Requests of unlike sizes through a real worker: what the engine sees, and what each request gets back."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from support.outputs import tensors_of
from support.waiting import until
from support.workers import Workshop, config_of, on_plane

from rocserve.core.datatypes import DataType
from rocserve.core.errors import StatusCode
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.requests import Member, RequestForm, RequestLayout
from rocserve.core.tensors import Tensor, TensorHead
from rocserve.load_check.recorded import RecordedAnswers, write_recorded
from rocserve.workers.instance import Instance
from rocserve.workers.results import BatchOutcome

Answer = Mapping[str, Tensor]

OUTPUTS = {
    "IMAGE": (DataType.UINT8, (3, -1, -1)),
    "HALF": (DataType.FP16, (-1,)),
    "BITS": (DataType.BF16, (-1,)),
    "SCALE": (DataType.FP32, (2,)),
    "TEXTS": (DataType.BYTES, (-1,)),
    "SEEN": (DataType.INT64, (2,)),
    "LAST": (DataType.FP32, (3,)),
}
INPUTS = ("IMAGE", "HALF", "BITS", "SCALE")


def config(behaviour: str = "") -> ModelConfig:
    return ModelConfig(
        "m",
        max_batch_size=64,
        inputs=tuple(InputConfig(name, *OUTPUTS[name]) for name in INPUTS),
        outputs=tuple(OutputConfig(name, *spec) for name, spec in OUTPUTS.items()),
        parameters={"behaviour": behaviour},
    )


def made(rows: int, height: int, width: int, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "IMAGE": rng.integers(1, 255, (rows, 3, height, width)).astype(np.uint8),
        "HALF": rng.random((rows, width)).astype(np.float16),
        "BITS": rng.integers(1, 1000, (rows, width)).astype(np.uint16),
        "SCALE": rng.random((rows, 2)).astype(np.float32),
    }


def member(inputs: Mapping[str, np.ndarray], names: Sequence[str] = (*OUTPUTS,)) -> Member:
    heads = tuple(TensorHead(name, OUTPUTS[name][0], array.shape) for name, array in inputs.items())
    data = [memoryview(array.tobytes()) for array in inputs.values()]
    return RequestForm(RequestLayout(heads, tuple(names), len(inputs["HALF"]))), data, 0, b""


def run(
    instance: Instance, members: Sequence[Member], is_grouped: bool = False
) -> asyncio.Future[tuple[BatchOutcome, list[Answer]]]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[BatchOutcome, list[Answer]]] = loop.create_future()

    def on_outcome(outcome: BatchOutcome) -> None:
        answers: list[Answer] = []
        if outcome.error is None:
            own = [tensors_of(outcome.outputs_of(index)) for index in range(len(members))]
            answers = [{tensor.name: tensor.copied() for tensor in one} for one in own]
        loop.call_soon_threadsafe(future.set_result, (outcome, answers))

    on_plane(instance.plane, lambda: instance.execute(is_grouped, members, on_outcome))
    return future


def check(answer: Answer, inputs: Mapping[str, np.ndarray], height: int, width: int) -> None:
    for name, array in inputs.items():
        np.testing.assert_array_equal(answer[name].numpy(), array, err_msg=name)
    assert answer["TEXTS"].numpy().tolist() == [[b"%d" % value for value in row] for row in inputs["BITS"]]
    rows = len(inputs["HALF"])
    assert answer["SEEN"].numpy().tolist() == [[height, width]] * rows
    if (height, width) != inputs["IMAGE"].shape[2:]:
        # What is added: 7, -inf, and 1.5 as BF16, whose bits are 0x3fc0.
        last = answer["LAST"].numpy()
        assert set(last[:, 0]) == {7.0}
        if width != inputs["HALF"].shape[1]:
            assert set(last[:, 1]) == {-np.inf} and set(last[:, 2]) == {0x3FC0}


async def serving(workshop: Workshop, behaviour: str = "") -> Instance:
    group = await workshop.serving(engine="rocserve_padding_engine", config=config(behaviour))
    (instance,) = group.instances
    return instance


@pytest.mark.parametrize("behaviour", ["", "lends"])
async def test_each_request_gets_its_own_back(workshop: Workshop, behaviour: str) -> None:
    instance = await serving(workshop, behaviour)
    batches = [
        ([(1, 3, 2), (2, 1, 4), (1, 4, 1)], (4, 4)),
        # The largest size in each dimension, though no request has both.
        ([(1, 5, 2), (1, 1, 7)], (8, 8)),
        ([(3, 2, 3)], (4, 4)),
        ([(1, 4, 4), (2, 4, 4)], (4, 4)),
        ([(2, 8, 4)], (8, 4)),
    ]
    for seed, (shapes, seen) in enumerate(batches):
        inputs = [made(*shape, seed=seed + number) for number, shape in enumerate(shapes)]
        for _ in range(2):  # The second takes what is remembered.
            _, answers = await run(instance, [member(one) for one in inputs])
            for answer, own in zip(answers, inputs, strict=True):
                check(answer, own, *seen)


async def test_requests_may_name_inputs_in_any_order_and_want_other_outputs(workshop: Workshop) -> None:
    instance = await serving(workshop)
    inputs = [made(1, 2, 3), dict(reversed(made(2, 4, 1, seed=1).items())), made(1, 1, 1, seed=2)]
    wanted = [("HALF", "SCALE"), ("LAST", "BITS"), ("SEEN",)]
    members = [member(own, names) for own, names in zip(inputs, wanted, strict=True)]
    _, answers = await run(instance, members)
    assert all({*names} <= {*answer} for names, answer in zip(wanted, answers, strict=True))
    for answer, own in zip(answers, inputs, strict=True):
        assert answer["SEEN"].numpy().tolist() == [[4, 4]] * len(own["HALF"])
        np.testing.assert_array_equal(answer["HALF"].numpy(), own["HALF"])


async def test_an_answer_without_padded_outputs_has_rows_only(workshop: Workshop) -> None:
    instance = await serving(workshop)
    inputs = [made(1, 2, 3), made(2, 4, 1, seed=1)]
    for _ in range(2):
        _, answers = await run(instance, [member(own, ("SCALE",)) for own in inputs])
        for answer, own in zip(answers, inputs, strict=True):
            np.testing.assert_array_equal(answer["SCALE"].numpy(), own["SCALE"])


async def test_grouped_requests_are_padded_one_by_one(workshop: Workshop) -> None:
    instance = await serving(workshop)
    inputs = [made(1, 3, 2), made(1, 3, 2, seed=1), made(1, 4, 1, seed=2), made(1, 7, 3, seed=3)]
    form, *_ = member(inputs[0])
    members: list[Member] = [(form, member(own)[1], 0, b"") for own in inputs[:2]] + [*map(member, inputs[2:])]
    for _ in range(2):
        _, answers = await run(instance, members, is_grouped=True)
        for answer, own, height in zip(answers, inputs, (4, 4, 4, 8), strict=True):
            check(answer, own, height, 4)


async def test_an_output_of_another_length_is_no_answer(workshop: Workshop) -> None:
    instance = await serving(workshop, "short")
    outcome, _ = await run(instance, [member(made(1, 2, 3))])
    assert outcome.error is not None and outcome.error.code is StatusCode.INTERNAL
    assert "output 'HALF' has the shape [1, 3], expected 4 for dimension 1" in outcome.error.text


async def test_what_is_too_long_is_refused_in_the_worker_too(workshop: Workshop) -> None:
    instance = await serving(workshop)
    outcome, _ = await run(instance, [member(made(1, 9, 3))])
    assert outcome.error is not None and outcome.error.code is StatusCode.INVALID_ARGUMENT
    assert "dimension 'H' of input 'IMAGE' is 9, expected 1 to 8" in outcome.error.text


async def test_a_recorded_request_is_padded(workshop: Workshop) -> None:
    inputs = made(2, 3, 3)
    outputs = {name: array for name, array in inputs.items() if name != "SCALE"}
    file = workshop.folder / "check.npz"
    write_recorded(file, RecordedAnswers(inputs, {**outputs, "SEEN": np.full((2, 2), 4)}))
    group = workshop.group(engine="rocserve_padding_engine", config=config())
    await group.load()
    await group.warm_up(config(), "", str(file))
    assert group.load_check.text == "recorded answers are equal"


async def test_an_engine_that_does_not_pad_says_so(workshop: Workshop, caplog: pytest.LogCaptureFixture) -> None:
    await workshop.serving(config=config_of("add_sub", parameters={"behaviour": "add_sub", "sizes": "n=4"}))
    text = "model 'm': parameter 'sizes' has no effect: its engine does not pad requests"
    await until(lambda: text in caplog.text, "the warning")
