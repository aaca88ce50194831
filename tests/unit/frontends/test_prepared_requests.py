"""Requests that are prepared concurrently: strings are counted, large inputs copied; sequences keep their order."""

from __future__ import annotations

import queue
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.observation import no_observer
from support.shared_memory import GUARD, shared_file
from support.waiting import PATIENCE_SECONDS

from rocserve.core.dispatch import Dispatcher
from rocserve.core.errors import ServeError
from rocserve.core.model_config import ModelConfig
from rocserve.core.private_paths import PrivatePaths
from rocserve.core.requests import InferRequest, InputHead, RequestHead
from rocserve.core.sequences import SequenceTag
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.tensors import COUNTED_AT_ONCE
from rocserve.plane import loop
from rocserve.plane.heap import COPIED_AT_ONCE
from rocserve.plane.loop import PlaneLoop
from rocserve.services.client_memory.attachment import ClientMemory
from rocserve.services.client_memory.regions import ClientRegions
from rocserve.services.inference import InferenceService

MANY = 4 * COUNTED_AT_ONCE
LARGE = 3 * COPIED_AT_ONCE


class TakingModel:
    """Records its requests."""

    # Inputs in shared memory are copied for it.
    config = ModelConfig(name="m", response_cache=True)

    def __init__(self) -> None:
        self.asked: queue.Queue[InferRequest] = queue.Queue()

    def infer(self, request: InferRequest, responder: object) -> None:
        self.asked.put(request)


@pytest.fixture(autouse=True)
def one_step_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """However fast the machine is."""
    monkeypatch.setattr(loop, "_STEPS_SECONDS", 0.0)


@pytest.fixture
def model() -> TakingModel:
    return TakingModel()


@pytest.fixture
def regions() -> ClientRegions:
    return ClientRegions(GUARD)


@pytest.fixture
def service(plane: PlaneLoop, model: TakingModel, regions: ClientRegions) -> InferenceService:
    tables = ServingTableHolder()
    tables.table = ServingTable({"m": ServedModel("m", {1: model}, model)})  # type: ignore[dict-item, arg-type]
    memory = ClientMemory(tables, regions, 2 * LARGE, plane.work_off)
    return InferenceService(Dispatcher(tables, plane.work_off), memory, no_observer(tables), PrivatePaths(), plane)


def ask_all(service: InferenceService, *requests: InferRequest) -> None:
    """Send all in one turn of the loop."""
    responder: Any = None
    service.plane.call_soon(lambda: [service.infer(request, responder) for request in requests])


def request(name: str, strings: int, sequence: int | None = None, data: bytes | None = None) -> InferRequest:
    head = RequestHead("m", "", (InputHead("TEXT", "BYTES", (strings,)),))
    tag = None if sequence is None else SequenceTag(sequence)
    return InferRequest(head, name, [bytes(4 * strings) if data is None else data], sequence=tag)


def test_others_go_before_a_request_whose_strings_are_counted(service: InferenceService, model: TakingModel) -> None:
    ask_all(service, request("many", MANY), request("few", 1))
    few, many = model.asked.get(timeout=PATIENCE_SECONDS), model.asked.get(timeout=PATIENCE_SECONDS)
    assert (few.id, few.element_faults) == ("few", None)
    assert (many.id, many.element_faults) == ("many", [""])


def test_what_is_wrong_comes_with_the_request(service: InferenceService, model: TakingModel) -> None:
    ask_all(service, request("bad", MANY, data=bytes(4 * MANY - 1)))
    faults = model.asked.get(timeout=PATIENCE_SECONDS).element_faults
    assert faults is not None and faults[0].startswith("incomplete string length indicator for {where}")


def test_requests_of_a_sequence_keep_their_order(service: InferenceService, model: TakingModel) -> None:
    ask = partial(request, sequence=7)
    ask_all(service, ask("1", MANY), ask("2", 1), ask("3", MANY), ask("4", 1), request("other", 1, sequence=8))
    assert [model.asked.get(timeout=PATIENCE_SECONDS).id for _ in range(5)] == ["other", "1", "2", "3", "4"]


def test_large_inputs_in_shared_memory_are_copied_beside_other_requests(
    service: InferenceService, model: TakingModel, regions: ClientRegions
) -> None:
    place = {"shared_memory_region": "r", "shared_memory_byte_size": LARGE}
    head = RequestHead("m", "", (InputHead("X", "UINT8", (LARGE,), place),))
    large, behind = (InferRequest(head, name, [b""], sequence=SequenceTag(7)) for name in ("large", "behind"))
    with shared_file(LARGE) as file:
        file.put(0, b"a" * LARGE)
        regions.register("r", file.key, 0, LARGE)
        ask_all(service, large, behind, request("small", 1))
        told = [model.asked.get(timeout=PATIENCE_SECONDS) for _ in range(3)]
    assert [asked.id for asked in told] == ["small", "large", "behind"]
    assert bytes(told[1].data[0]) == b"a" * LARGE


def test_a_region_that_is_cut_while_it_is_copied_fails_its_request_alone(
    service: InferenceService, model: TakingModel, regions: ClientRegions
) -> None:
    errors: queue.Queue[ServeError] = queue.Queue()
    failing: Any = SimpleNamespace(send=errors.put)
    place = {"shared_memory_region": "r", "shared_memory_byte_size": LARGE}
    head = RequestHead("m", "", (InputHead("X", "UINT8", (LARGE,), place),))
    cut = InferRequest(head, "cut", [b""], sequence=SequenceTag(7))
    with shared_file(LARGE) as file:
        regions.register("r", file.key, 0, LARGE)

        def ask() -> None:
            service.infer(cut, failing)
            service.infer(request("behind", 1, sequence=7), failing)
            file.cut(COPIED_AT_ONCE)

        service.plane.call_soon(ask)
        assert "has been cut" in errors.get(timeout=PATIENCE_SECONDS).text
        assert model.asked.get(timeout=PATIENCE_SECONDS).id == "behind"
