"""Batches through a real worker; and samples of `model_warmup` as batches: every datatype, from zeros, random numbers
and files."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.outputs import tensors_of
from support.waiting import PATIENCE_SECONDS
from support.workers import (
    BatchInput,
    Workshop,
    add_sub_inputs,
    batch_input,
    config_of,
    execute,
    on_plane,
    pids,
    run_add_sub,
    submit,
)

from rocserve.backends.warmup import warm_up_samples
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InstanceKind, ModelConfig, OutputConfig, WarmupInput, WarmupSample
from rocserve.core.tensors import Tensor, encode_bytes_elements
from rocserve.workers import model_service
from rocserve.workers.messages import WorkerPlan
from rocserve.workers.results import BatchOutcome
from rocserve.workers.worker_end import ReceivedBatch

ROWS = 100
"""Of 16 INT32: their sums are too large to be copied anyway, so that a batch gets room for them."""


async def test_one_request(workshop: Workshop) -> None:
    group = await workshop.serving()
    (instance,) = group.instances
    started = time.monotonic_ns()
    answer = await run_add_sub(instance, 2)
    a = np.arange(32, dtype=np.int32).reshape(2, 16)
    assert answer.error is None
    np.testing.assert_array_equal(answer.outputs[0]["SUM"], a + 3)
    np.testing.assert_array_equal(answer.outputs[0]["DIFFERENCE"], a - 3)
    assert started < answer.times[0] <= answer.times[1] <= answer.times[2] < time.monotonic_ns()


async def test_a_batch_of_requests_is_cut_by_their_sizes(workshop: Workshop) -> None:
    group = await workshop.serving()
    (instance,) = group.instances
    arrays = [np.full((rows, 16), rows, np.int32) for rows in (1, 3, 2)]
    inputs = [batch_input("A", *arrays), batch_input("B", *arrays)]
    for _ in range(3):  # The later ones take the remembered path.
        answer = await submit(instance, inputs, ("DIFFERENCE", "SUM"), (1, 3, 2))
        assert [list(outputs) for outputs in answer.outputs] == [["DIFFERENCE", "SUM"]] * 3
        for array, outputs in zip(arrays, answer.outputs, strict=True):
            np.testing.assert_array_equal(outputs["SUM"], 2 * array)
            assert outputs["DIFFERENCE"].shape == array.shape and not outputs["DIFFERENCE"].any()


async def test_what_is_left_to_prepare_is_prepared_while_there_is_no_batch(workshop: Workshop) -> None:
    group = await workshop.serving("prepares")
    (instance,) = group.instances
    prepared: list[int] = []
    while not prepared or prepared[-1] < 3:
        outputs = (await run_add_sub(instance, 2)).outputs[0]
        np.testing.assert_array_equal(outputs["SUM"], np.arange(32, dtype=np.int32).reshape(2, 16) + 3)
        prepared += np.unique(outputs["DIFFERENCE"]).tolist()
    assert prepared == sorted(prepared)
    assert (await run_add_sub(instance, 2)).outputs[0]["DIFFERENCE"].max() == 3, "three parts, and no more"


async def test_a_worker_that_prepares_ends_when_its_model_is_unloaded(
    workshop: Workshop, caplog: pytest.LogCaptureFixture
) -> None:
    group = await workshop.serving("prepares_for_long")
    assert (await run_add_sub(group.instances[0], 2)).error is None
    await group.stop(PATIENCE_SECONDS)
    assert not any("did not stop" in line for line in caplog.messages)


class _Lane:
    """A lane of an executor; writes what it does into a log."""

    is_done = False

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def start(self, batch: ReceivedBatch) -> None:
        self._log.append(f"start {batch.id}")

    def finish(self, engine_free_ns: int) -> int:
        self._log.append("finish")
        return engine_free_ns

    def drop(self) -> None:
        self._log.append("drop")


def test_a_model_that_always_has_batches_prepares_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    now_ns = 0
    parts = iter((True, False))
    monkeypatch.setattr(model_service, "BatchLane", lambda *_: _Lane(log))
    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)

    class Model:
        executions = (None, None)

        def prepare_more(self) -> bool:
            log.append("prepare")
            return next(parts)

    class End:
        def batches(self, run_started: Callable[[], bool], prepare: Callable[[], bool]) -> Iterator[ReceivedBatch]:
            nonlocal now_ns
            for number, tenths in enumerate((9, 11, 20, 22, 40)):
                now_ns = tenths * 100_000_000
                yield ReceivedBatch(number, False, [], now_ns)
            assert not prepare(), "nothing is left"

    executor = model_service.TensorExecutor(
        End(),  # type: ignore[arg-type]
        Model(),  # type: ignore[arg-type]
        config_of("add_sub"),
        logging.getLogger("test"),
    )
    executor.run()
    # Two lanes: a batch is finished when the other lane's begins, or before a part is prepared.
    begins = ["start 0", "finish", "prepare", "start 1", "start 2", "finish", "finish", "prepare"]
    assert log == [*begins, "start 3", "start 4", "finish", "drop"]


@pytest.mark.parametrize("names", [("SUM", "DIFFERENCE"), ("DIFFERENCE", "SUM")])
async def test_an_engine_may_put_outputs_where_those_of_a_batch_alike_went(
    workshop: Workshop, names: tuple[str, ...]
) -> None:
    group = await workshop.serving("in_room")
    (instance,) = group.instances
    found = []
    for number, width in enumerate((1, 1, 1, 4000, 1, 4000, 4000, 17, 1)):
        a, b = np.full((ROWS, 16), number, np.int32), np.full((ROWS, 16), width, np.int32)
        answer = await submit(instance, [batch_input("A", a), batch_input("B", b)], names, (ROWS,))
        np.testing.assert_array_equal(answer.outputs[0]["SUM"], a + b)
        assert answer.outputs[0]["DIFFERENCE"].shape == (ROWS, width)
        found += np.unique(answer.outputs[0]["DIFFERENCE"]).tolist()
    assert found == [0] + [1] * 8


async def test_room_has_the_shape_that_the_inputs_of_a_batch_lead_to(workshop: Workshop) -> None:
    group = await workshop.serving("in_room")
    (instance,) = group.instances
    found = []
    for length in (16, 32, 16, 32):
        inputs = [batch_input(name, np.ones((ROWS, length), np.int32)) for name in ("A", "B")]
        answer = await submit(instance, inputs, ("SUM", "DIFFERENCE"), (ROWS,))
        assert answer.error is None, answer.error
        np.testing.assert_array_equal(answer.outputs[0]["SUM"], np.full((ROWS, length), 2))
        found += np.unique(answer.outputs[0]["DIFFERENCE"]).tolist()
    assert found == [0, 0, 1, 1]


async def test_two_batches_under_way_have_room_of_their_own(workshop: Workshop) -> None:
    group = await workshop.serving("in_room")
    (instance,) = group.instances
    for _ in range(3):
        numbers = [np.full((ROWS, 16), number, np.int32) for number in (5, 6)]
        inputs = [[batch_input("A", array), batch_input("B", array)] for array in numbers]
        answers = await asyncio.gather(*(submit(instance, one, ("SUM",), (ROWS,)) for one in inputs))
        for array, answer in zip(numbers, answers, strict=True):
            np.testing.assert_array_equal(answer.outputs[0]["SUM"], 2 * array)
            assert list(answer.outputs[0]) == ["SUM"], "what was not asked for"


@pytest.mark.parametrize("behaviour", ["identity", "identity_tensor"])
async def test_every_datatype_comes_back_as_it_went(workshop: Workshop, behaviour: str) -> None:
    group = await workshop.serving(behaviour)
    (instance,) = group.instances
    generator = np.random.default_rng(1)
    for kind in DataType:
        if kind in (DataType.BYTES, DataType.BF16 if behaviour == "identity" else None):
            continue
        array = generator.integers(0, 2, (3, 2, 5)).astype(kind.numpy_dtype)
        parts = [memoryview(array[:1].tobytes()), array[1:].tobytes()]
        inputs = [BatchInput("X", kind, (3, 2, 5), parts)]
        answer = await submit(instance, inputs, ("OUT_X",), (1, 2))
        assert answer.error is None, (kind, answer.error)
        np.testing.assert_array_equal(answer.outputs[0]["OUT_X"], array[:1])
        np.testing.assert_array_equal(answer.outputs[1]["OUT_X"], array[1:])


@pytest.mark.parametrize("behaviour", ["identity", "identity_tensor"])
async def test_strings_of_several_requests(workshop: Workshop, behaviour: str) -> None:
    group = await workshop.serving(behaviour)
    (instance,) = group.instances
    first, second = [b"", b"a\x00\xff"], [b"x" * 100_000, b"y", "ü".encode(), b""]
    for _ in range(2):
        inputs = [
            BatchInput("X", DataType.BYTES, (3, 2), [encode_bytes_elements(first), encode_bytes_elements(second)])
        ]
        answer = await submit(instance, inputs, ("OUT_X",), (1, 2))
        assert answer.outputs[0]["OUT_X"].tolist() == [first]
        assert answer.outputs[1]["OUT_X"].tolist() == [second[:2], second[2:]]
        first[0] += b"longer"


@pytest.mark.parametrize("behaviour", ["identity", "identity_tensor"])
async def test_tensors_of_no_size(workshop: Workshop, behaviour: str) -> None:
    group = await workshop.serving(behaviour)
    inputs = [
        batch_input("X", np.zeros((2, 0), np.float32)),
        BatchInput("S", DataType.BYTES, (2, 0), [b""]),
        batch_input("Y", np.ones((2, 1), np.float32)),
    ]
    for sizes in ((2,), (1, 1)):
        inputs[0].parts = [b""] * len(sizes)
        inputs[1].parts = [b""] * len(sizes)
        ones = np.ones((2, 1), np.float32)
        inputs[2] = batch_input("Y", *np.split(ones, len(sizes)))
        answer = await submit(group.instances[0], inputs, ("OUT_X", "OUT_S", "OUT_Y"), sizes)
        assert answer.error is None, answer.error
        assert answer.outputs[0]["OUT_X"].shape == (sizes[0], 0)
        assert answer.outputs[0]["OUT_S"].shape == (sizes[0], 0)
        assert answer.outputs[-1]["OUT_Y"].tolist() == [[1.0]] * sizes[-1]


async def test_without_batching_shapes_are_the_models_own(workshop: Workshop) -> None:
    config = config_of("identity", max_batch_size=0)
    group = await workshop.serving("identity", config=config)
    inputs = [batch_input("X", np.float64(2.5).reshape(())), batch_input("Y", np.zeros((3, 4), np.int8))]
    answer = await submit(group.instances[0], inputs, (), (1,))
    assert answer.outputs[0]["OUT_X"].shape == () and answer.outputs[0]["OUT_X"] == 2.5
    assert answer.outputs[0]["OUT_Y"].shape == (3, 4)


async def test_large_tensors_both_ways(workshop: Workshop) -> None:
    group = await workshop.serving("identity")
    (instance,) = group.instances
    array = np.random.default_rng(2).integers(0, 255, (4, 5_000_000), dtype=np.uint8)
    answers = [submit(instance, [batch_input("X", array[:1], array[1:])], ("OUT_X",), (1, 3)) for _ in range(2)]
    for answer in await asyncio.gather(*answers):
        np.testing.assert_array_equal(answer.outputs[0]["OUT_X"], array[:1])
        np.testing.assert_array_equal(answer.outputs[1]["OUT_X"], array[1:])


async def test_two_batches_are_under_way_at_once(workshop: Workshop) -> None:
    group = await workshop.serving("gated")
    (instance,) = group.instances
    assert not instance.pending_answers().batch
    first, second = run_add_sub(instance, 1, 100), run_add_sub(instance, 3, 200)
    assert len(instance._sent) == 2
    (workshop.folder / "open").touch()
    assert (await first).outputs[0]["SUM"][0, 0] == 103
    assert (await second).outputs[0]["SUM"].shape == (3, 16)
    assert not instance.pending_answers().batch


async def test_outputs_are_valid_while_somebody_holds_their_slot(workshop: Workshop) -> None:
    group = await workshop.serving()
    (instance,) = group.instances
    loop = asyncio.get_running_loop()
    kept: asyncio.Future[BatchOutcome] = loop.create_future()
    execute(
        instance, add_sub_inputs(), ("SUM",), (1,), lambda outcome: loop.call_soon_threadsafe(kept.set_result, outcome)
    )
    outcome = await kept
    array = tensors_of(outcome.outputs_of(0))[0].numpy()
    assert not instance.pending_answers().batch
    for value in range(50):
        await run_add_sub(instance, 1, 1000 + value)
    assert array.tolist() == [[number + 3 for number in range(16)]]
    held = [outcome.slot]
    assert outcome.slot.offset not in instance._places_to_return
    del outcome
    kept = loop.create_future()
    on_plane(workshop.plane, held.clear)
    assert (await run_add_sub(instance)).error is None


async def test_instances_of_one_worker_run_beside_each_other(workshop: Workshop) -> None:
    group = await workshop.serving("four_at_once", plans=[WorkerPlan(InstanceKind.CPU, None, 4)])
    assert len(group.instances) == 4 and len(pids(group)) == 1
    answers = await asyncio.gather(*(run_add_sub(instance) for instance in group.instances))
    assert all(answer.error is None for answer in answers)


@pytest.mark.parametrize(
    ("behaviour", "code", "text"),
    [
        ("raise", StatusCode.INTERNAL, "the engine's own words"),
        ("refuse", StatusCode.INVALID_ARGUMENT, "that will not do"),
        ("sys_exit", StatusCode.INTERNAL, "SystemExit: enough"),
        ("bad_rows", StatusCode.INTERNAL, "output 'SUM' has the shape [1, 16], expected the batch's 2 rows"),
        ("missing", StatusCode.INTERNAL, "expected output 'SUM' from the engine, got ['OTHER']"),
    ],
)
async def test_a_failed_batch_fails_alone(workshop: Workshop, behaviour: str, code: StatusCode, text: str) -> None:
    group = await workshop.serving(behaviour)
    (pid,) = pids(group)
    for _ in range(2):
        answer = await run_add_sub(group.instances[0], 2)
        assert answer.error is not None
        assert (answer.error.code, answer.error.text) == (code, text)
    assert pids(group) == [pid]


async def test_single_requests_fail_alone(workshop: Workshop) -> None:
    group = await workshop.serving("failures")
    (instance,) = group.instances
    rows = [np.full((1, 16), value, np.int32) for value in (5, -1, 6, -1)]
    answer = await submit(instance, [batch_input("A", *rows), batch_input("B", *rows)], ("SUM",), (1, 1, 1, 1))
    assert answer.error is None
    assert sorted(answer.failures) == [1, 3]
    assert answer.failures[3].code is StatusCode.INVALID_ARGUMENT
    assert answer.failures[3].text.startswith("request 3 is negative")
    assert answer.outputs[2]["SUM"].tolist() == [[12] * 16]


async def test_very_many_failures_fit_a_message(workshop: Workshop) -> None:
    group = await workshop.serving("failures")
    rows = [np.full((1, 16), -1, np.int32)] * 1500
    inputs = [batch_input("A", *rows), batch_input("B", *rows)]
    answer = await submit(group.instances[0], inputs, ("SUM",), (1,) * 1500)
    assert answer.error is None and len(answer.failures) == 1500
    assert answer.failures[1499].text.startswith("request 1499 is negative")


async def test_inputs_of_the_wrong_size_are_refused_here(workshop: Workshop) -> None:
    group = await workshop.serving()
    (instance,) = group.instances
    for shape, part in (((1, 16), b"123"), ((70_000, 16), b"123"), ((1, 16), b"1" * 65)):
        inputs = [BatchInput("A", DataType.INT32, shape, [part]), *add_sub_inputs()[1:]]
        with pytest.raises(ServeError, match=r"input 'A' of shape \[\d+, 16\] needs \d+ bytes, got"):
            submit(instance, inputs, ("SUM",), (1,))
        with pytest.raises(ServeError, match="needs 64 bytes, got 3"):
            strings = BatchInput("S", DataType.BYTES, (1, 1), [b"\x00\x00\x00\x00"])
            submit(instance, [strings, BatchInput("A", DataType.INT32, (1, 16), [b"123"])], ("SUM",), (1,))
    assert not instance.pending_answers().batch
    assert (await run_add_sub(instance)).error is None


async def test_grouped_requests_run_one_by_one_and_a_failure_is_one_requests_own(workshop: Workshop) -> None:
    group = await workshop.serving("single")
    values = [np.full((2, 16), 5, np.int32), np.zeros((1, 16), np.int32), np.full((1, 16), 7, np.int32)]
    ones = [np.ones_like(value) for value in values]
    for _ in range(2):
        inputs = [batch_input("A", *values), batch_input("B", *ones)]
        answer = await submit(group.instances[0], inputs, ("SUM",), (2, 1, 1), is_grouped=True)
        assert answer.error is None
        assert {index: failure.text for index, failure in answer.failures.items()} == {1: "nothing but zeros"}
        assert answer.outputs[0]["SUM"].tolist() == [[6] * 16] * 2
        assert answer.outputs[2]["SUM"].tolist() == [[8] * 16]


async def test_a_dead_worker_has_told_how_far_it_was_with_a_group(workshop: Workshop) -> None:
    group = await workshop.serving("crash_at_zeros")
    instance = group.instances[0]
    ones = np.ones((1, 16), np.int32)
    for values in ([ones] * 3, [ones, 0 * ones, ones, ones]):
        inputs = [batch_input("A", *values), batch_input("B", *[ones] * len(values))]
        answer = await submit(instance, inputs, ("SUM",), (1,) * len(values), is_grouped=True)
    assert answer.error is not None and answer.begun == 2


@pytest.mark.parametrize("behaviour", ["identity", "identity_tensor"])
@pytest.mark.parametrize("width", [1, 16, 2000])
async def test_grouped_requests_whose_outputs_are_their_inputs_have_their_own(
    workshop: Workshop, behaviour: str, width: int
) -> None:
    """The next request is gathered where the previous one was."""
    group = await workshop.serving(behaviour)
    values = [np.full((1, width), value, np.int32) for value in (5, 6, 7)]
    for _ in range(3):
        inputs = [batch_input("A", *values), batch_input("B", *[-value for value in values])]
        answer = await submit(group.instances[0], inputs, ("OUT_A", "OUT_B"), (1, 1, 1), is_grouped=True)
        assert answer.error is None
        assert [outputs["OUT_A"][0, 0] for outputs in answer.outputs] == [5, 6, 7]
        assert [outputs["OUT_B"][0, 0] for outputs in answer.outputs] == [-5, -6, -7]


def config(source: str, datatype: DataType, max_batch_size: int, batch_size: int = 2, count: int = 1) -> ModelConfig:
    sample = WarmupSample("s", batch_size, {"X": WarmupInput(datatype, (3,), source)}, count)
    outputs = (OutputConfig("Y", datatype, (3,)),)
    return ModelConfig("m", max_batch_size=max_batch_size, outputs=outputs, model_warmup=(sample,))


def tensor_of(folder: Path, source: str, datatype: DataType, max_batch_size: int = 4) -> Tensor:
    ((_, batch),) = warm_up_samples(config(source, datatype, max_batch_size), folder)
    return batch.inputs["X"]


@pytest.mark.parametrize("datatype", list(DataType))
@pytest.mark.parametrize("source", ["zero", "random"])
def test_every_datatype(tmp_path: Path, source: str, datatype: DataType) -> None:
    tensor = tensor_of(tmp_path, source, datatype)
    assert (tensor.datatype, tensor.shape) == (datatype, (2, 3))
    rows = tensor.numpy()
    assert rows.shape == (2, 3)
    assert rows[0].tolist() == rows[1].tolist(), "each row has the same data"
    again = tensor_of(tmp_path, source, datatype).numpy()
    assert rows.tolist() == again.tolist(), "a model that fails on them fails each time"
    if source == "zero":
        assert not any(rows[0].tolist())


def test_a_model_without_batches(tmp_path: Path) -> None:
    ((_, batch),) = warm_up_samples(config("zero", DataType.FP32, 0, batch_size=1), tmp_path)
    assert batch.inputs["X"].shape == (3,) and batch.request_sizes == (1,)
    assert batch.requested_outputs == ("Y",)


def test_how_often(tmp_path: Path) -> None:
    assert len([*warm_up_samples(config("zero", DataType.FP32, 4, count=5), tmp_path)]) == 5


def test_files_may_hold_more_than_is_needed(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "raw").write_bytes(np.arange(5, dtype=np.float32).tobytes())
    assert tensor_of(tmp_path, "file:raw", DataType.FP32).numpy().tolist() == [[0, 1, 2], [0, 1, 2]]
    with pytest.raises(ServeError) as raised:
        tensor_of(tmp_path, "file:raw", DataType.FP64)
    assert raised.value.text == (
        "warmup setting expects 24 bytes, but the data provided from raw only has 20 bytes (input 'X')"
    )


def test_files_of_strings_are_taken_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "warmup").mkdir()
    (tmp_path / "warmup" / "text").write_bytes(
        b"".join(len(word).to_bytes(4, "little") + word for word in (b"a", b"", b"ccc"))
    )
    assert tensor_of(tmp_path, "file:text", DataType.BYTES).numpy().tolist() == [[b"a", b"", b"ccc"]] * 2
