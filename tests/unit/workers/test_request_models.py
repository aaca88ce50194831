"""Models that see single requests: real workers, the real scheduler."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import os
import shutil
import signal
import venv
from pathlib import Path

import numpy as np
import pytest
from support.processes import stop
from support.request_models import DECOUPLED, RequestModels
from support.waiting import until
from support.workers import open_descriptors

from rocserve.core import bootstrap
from rocserve.core.errors import ServeError, StatusCode
from rocserve.scheduling import batch_policy

BATCHES = "dynamic_batching { max_queue_delay_microseconds: 3600000000 preferred_batch_size: [ 3 ] }"
"""Three requests are always one batch."""


async def test_a_request_comes_with_all_that_its_client_says(models: RequestModels) -> None:
    await models.load(
        "m", more='version_policy { latest { num_versions: 1 } } instance_group { kind: KIND_CPU name: "g" }'
    )
    parameters = {
        "sequence_id": "s",
        "sequence_start": True,
        "sequence_end": True,
        "priority": 0,
        "timeout": 5000000,
        "triton_enable_empty_final_response": True,
        "mine": 3,
        "name": "n",
        "share": 0.5,
        "flag": False,
    }
    answers = await models.ask("m", [[1, 2]], ("OUT", "TEXT"), "ä", parameters).done()
    assert answers.errors == []
    (response,) = answers.responses
    assert (response.head.model_name, response.head.model_version, response.id) == ("m", "1", "ä")
    assert response.parameters == {"of": "ä"}
    assert answers.out == [[1.0, 2.0]]
    details = json.loads(answers.array(0, "TEXT")[0, 0])
    assert details["id"] == "ä"
    assert details["correlation_id"] == "s"
    assert details["flags"] == 3
    assert details["timeout"] == 5000000
    assert details["parameters"] == {"mine": 3, "name": "n", "share": 0.5, "flag": False}
    assert details["requested"] == ["OUT", "TEXT"]
    assert details["thread"] == "MainThread"
    assert details["instance"] == "g_0"
    assert details["config"]["input"][0]["dims"] == [-1]
    assert details["config"]["parameters"]["behaviour"] == {"string_value": "echo"}
    assert details["config_before"]["name"] == "m"


async def test_a_model_may_put_each_answer_where_it_put_the_one_before(
    models: RequestModels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that wait for it are grouped, and run one by one."""
    monkeypatch.setattr(batch_policy, "LONGEST_GROUP_NS", 1_000_000_000)
    version = await models.load("m", "reuses")
    for first in range(0, 2000, 100):
        asked = [models.ask("m", [[value]]) for value in range(first, first + 100)]
        for value, answers in enumerate(asked, first):
            await answers.done()
            assert answers.out == [[float(value)]]
    counters = version.statistics.snapshot()
    assert counters.execution_count == counters.inference_count == 2000


async def test_the_requests_of_a_batch_are_answered_each_for_itself(models: RequestModels) -> None:
    version = await models.load("m", "renamed", BATCHES)
    asked = [models.ask("m", [[value]], request_id=str(value)) for value in (1, 4, 2)]
    for answers, value in zip(asked, (1, 4, 2), strict=True):
        await answers.done()
        assert answers.out == [[float(value)] * value]
    counters = version.statistics.snapshot()
    assert (counters.execution_count, counters.inference_count, counters.success.count) == (1, 3, 3)


async def test_without_a_batcher_the_model_gets_one_request_at_a_time(models: RequestModels) -> None:
    await models.load("echo")
    await models.load("picky", "picky")
    asked = [models.ask("echo", [[value]], ("OUT", "TEXT")) for value in range(100)]
    for value, answers in enumerate(asked):
        await answers.done()
        assert answers.out == [[float(value)]]
        assert json.loads(answers.array(0, "TEXT")[0, 0])["together"] == 1
    picked = [models.ask("picky", [[value if value % 3 else -1]]) for value in range(100)]
    for value, answers in enumerate(picked):
        await answers.done()
        assert answers.out == ([[2.0 * value]] if value % 3 else [])
        assert len(answers.errors) == (0 if value % 3 else 1)


async def test_an_exception_fails_what_is_not_answered_and_the_model_goes_on(
    models: RequestModels, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await models.load("m", "raises", BATCHES)
    for _ in range(2):
        asked = [models.ask("m", [[value]]) for value in (1, 2, 3)]
        for answers in asked:
            await answers.done()
        assert asked[0].out == [[1.0]]
        for answers in asked[1:]:
            (error,) = answers.errors
            assert (error.code, error.text) == (StatusCode.INTERNAL, "the model's own words")
    # What a worker writes comes by another way than its answers.
    await until(lambda: "in _raises" in caplog.text)
    traced = [record for record in caplog.records if "in _raises" in record.getMessage()]
    assert {record.levelno for record in traced} == {logging.ERROR}


async def test_a_model_that_forgets_answers_fails_its_batch(models: RequestModels) -> None:
    await models.load("m", "too_few")
    answers = await models.ask("m").done()
    assert answers.errors[0].text == "expected 1 answers, one per request, got 0"


async def test_inputs_are_the_models_own(models: RequestModels) -> None:
    await models.load("m", "keeps")
    sums = [(await models.ask("m", [[value]]).done()).out[0][0] for value in (5, 7, 9, 11, 13, 15)]
    # The model itself has set earlier values to 1.
    assert sums == [5.0, 8.0, 11.0, 14.0, 17.0, 20.0]


@pytest.mark.parametrize("more", ["", BATCHES])
async def test_a_model_may_answer_with_inputs_that_it_reads_in_place(models: RequestModels, more: str) -> None:
    await models.load("m", "in_place", more)
    values = np.random.default_rng(0).random((3, 1, 50_000), np.float32)
    asked = [models.ask("m", rows) for rows in values]
    for rows, answers in zip(values, asked, strict=True):
        await answers.done()
        assert answers.errors == []
        assert np.array_equal(answers.array(0, "OUT"), rows)


async def test_large_tensors_go_both_ways(models: RequestModels) -> None:
    await models.load("m")
    await models.load("caller", "calls", target="m")
    values = np.random.default_rng(0).random((8, 100_000), np.float32)
    for name in ("m", "caller"):
        answers = await models.ask(name, values).done()
        assert answers.errors == []
        assert np.array_equal(answers.array(0, "OUT"), values)


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_a_decoupled_model_answers_any_number_of_times(models: RequestModels, count: int) -> None:
    version = await models.load("m", "counts", DECOUPLED)
    answers = models.ask("m", [[count]])
    await answers.done()
    assert answers.expects_many
    assert answers.out == [[float(number)] for number in range(count)]
    # The last response may come before the batch, which counts as the execution.
    await until(lambda: version.statistics.snapshot().execution_count == 1)
    counters = version.statistics.snapshot()
    assert (counters.inference_count, counters.success.count) == (1, 1)
    assert counters.success.ns >= 50_000_000


async def test_a_model_may_ask_to_be_decoupled(models: RequestModels) -> None:
    version = await models.load("m", "counts", 'parameters { key: "asks_for" value { string_value: "decoupled" } }')
    assert version.config.decoupled
    assert (await models.ask("m", [[2]]).done()).out == [[0.0], [1.0]]


@pytest.mark.parametrize("more", ["", DECOUPLED])
async def test_a_request_that_a_dead_worker_had_not_taken_runs_in_the_next(models: RequestModels, more: str) -> None:
    version = await models.load("m", more=more)
    assert (await models.ask("m", [[1]]).done()).out == [[1.0]]
    (pid,) = version.worker_pids
    stop(pid)
    asked = [models.ask("m", [[value]]) for value in range(5)]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    for value, answers in enumerate(asked):
        await answers.done()
        assert (answers.errors, answers.out) == ([], [[float(value)]])


@pytest.mark.parametrize("more", ["", "dynamic_batching {}"])
async def test_a_request_that_ends_its_worker_harms_none_that_had_not_begun(
    models: RequestModels, monkeypatch: pytest.MonkeyPatch, more: str
) -> None:
    """Also if they went to the worker in one message."""
    monkeypatch.setattr(batch_policy, "LONGEST_GROUP_NS", 1_000_000_000)
    monkeypatch.setattr(batch_policy, "CALM_REQUESTS", 1)
    version = await models.load("m", "crashes", more)
    for _ in range(5):
        await models.ask("m", [[1]]).done()
    (pid,) = version.worker_pids
    stop(pid)
    # Requests that share no batch are grouped: with batching, those of unlike shapes.
    values = [[float(number)] * (number if more else 1) for number in range(1, 13)]
    values[5] = [-1.0] * len(values[5])
    asked = [models.ask("m", [value]) for value in values]
    await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGCONT)
    for answers in asked:
        await answers.done()
    assert [bool(answers.errors) for answers in asked[5:]] == [True] + [False] * 6
    assert [answers.out for answers in asked[6:]] == [[value] for value in values[6:]]
    # Those before it had run, and their answers were lost with the worker.
    lost = [len(answers.errors) for answers in asked[:5]]
    assert lost == sorted(lost)


async def test_calls(models: RequestModels) -> None:
    await models.load("echo")
    await models.load("counts", "counts", DECOUPLED)
    await models.load("picky", "picky")
    for target in ("echo", "counts", "picky", "missing"):
        await models.load(f"of_{target}", "calls", target=target)
    echo = await models.ask("of_echo", [[3, 4]], request_id="a").done()
    assert echo.out == [[3.0, 4.0]]
    assert echo.responses[0].parameters == {"of": "a'"}
    assert (await models.ask("of_counts", [[4]]).done()).out == [[4.0]]
    error = (await models.ask("of_picky", [[-1]]).done()).errors[0]
    assert (error.code, error.text) == (StatusCode.INVALID_ARGUMENT, "r' is negative")
    error = (await models.ask("of_missing").done()).errors[0]
    assert error.code is StatusCode.NOT_FOUND
    assert error.text.startswith("Request for unknown model: 'missing' is not found; served are: counts, ")


async def test_calls_of_calls(models: RequestModels) -> None:
    await models.load("echo")
    await models.load("inner", "calls", target="echo")
    await models.load("outer", "calls", target="inner")
    asked = [models.ask("outer", [[value]]) for value in range(20)]
    for value, answers in enumerate(asked):
        await answers.done()
        assert answers.out == [[float(value)]]


async def test_a_model_may_call_itself_as_deep_as_it_has_instances(models: RequestModels) -> None:
    await models.load("m", "descends", "instance_group { count: 2 kind: KIND_CPU }")
    for _ in range(50):
        # The answer to a request without a call comes from a busy moment of either instance.
        assert (await models.ask("m", [[0]]).done()).out == [[0.0]]
        assert (await models.ask("m", [[1]]).done()).out == [[0.0]]


async def test_nothing_is_left_behind(models: RequestModels) -> None:
    await models.load("echo")

    async def come_and_go() -> None:
        version = await models.load("m", "waits", DECOUPLED)
        await models.load("caller", "calls", target="echo")
        assert (await models.ask("caller", np.zeros((8, 50_000))).done()).errors == []
        waiting = models.ask("m")
        await waiting.until(lambda answers: answers.responses)
        os.kill(next(iter(version.worker_pids)), signal.SIGKILL)
        await waiting.done()
        for name in ("m", "caller"):
            await models.unload(name)
            shutil.rmtree(models.folder / name)

    await come_and_go()
    before = open_descriptors()
    for _ in range(3):
        await come_and_go()
    # The ends of the workers' pipes are closed once their ends are known.
    await until(lambda: open_descriptors() <= before)


async def test_warm_up_samples_are_requests(models: RequestModels) -> None:
    sample = (
        'model_warmup { name: "w" batch_size: 2 inputs { key: "IN" value { data_type: TYPE_FP32 dims: 3 %s: true } } }'
    )
    await models.load("echo", more=sample % "zero_data")
    await models.load("counts", "counts", DECOUPLED + sample % "zero_data")
    with pytest.raises(ServeError, match="failed to run warmup sample 'w': the model's own words"):
        await models.load("raises", "raises", sample % "zero_data")


async def test_a_python_without_numpy_is_named(models: RequestModels, tmp_path: Path) -> None:
    venv.create(tmp_path / "m" / "env", symlinks=True)
    with pytest.raises(ServeError, match=r"env/bin/python has no numpy, which a worker needs; install it: "):
        await models.load("m", more=environment("env"))


def test_a_python_that_is_too_old_can_read_that_it_is() -> None:
    """3.6 has no annotations in __future__: the answer was a SyntaxError."""
    tree = ast.parse(Path(bootstrap.__file__).read_text(), feature_version=(3, 6))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert "__future__" not in imported


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("env.tar.gz", "'env.tar.gz' is an archive; unpack it"),
        ("nowhere", "there is no Python at .*/m/nowhere; make it with: python3 -m venv --copies /"),
        ("/nowhere", "there is no Python at /nowhere; make it with: python3 -m venv /nowhere"),
        ("config.pbtxt", "config.pbtxt cannot be executed"),
    ],
)
async def test_what_is_no_python_is_refused(models: RequestModels, path: str, reason: str) -> None:
    with pytest.raises(ServeError, match=f"model 'm': parameter EXECUTION_ENV_PATH: .*{reason}"):
        await models.load("m", more=environment(path))


def environment(path: str) -> str:
    return f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}'
