"""Requests with tensors in shared memory: inputs that are fetched, outputs that are left there, and how long a region
stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.dispatching import take_all
from support.shared_memory import GUARD, SharedFile, shared_file

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.exchange import Exchange
from rocserve.core.model_config import EnsembleStep, InputConfig, ModelConfig, SequenceBatching
from rocserve.core.requests import InferRequest, InputHead, RequestedOutput, RequestHead
from rocserve.core.responses import Answer, InferResponse
from rocserve.core.serving import ServedModel, ServingTable, ServingTableHolder
from rocserve.core.tensor_places import PlacedTensors
from rocserve.core.tensors import Tensor
from rocserve.plane.heap import COPIED_AT_ONCE
from rocserve.services.client_memory.attachment import ClientMemory
from rocserve.services.client_memory.regions import ClientRegion, ClientRegions

MOST = (1 << 64) - 1


@dataclass
class Version:
    """The part of a served version that is used here."""

    config: ModelConfig


@dataclass
class Heard:
    """Records its responses, and the regions that were registered at that moment."""

    regions: ClientRegions
    told: list[Any] = field(default_factory=list)
    registered: list[list[str]] = field(default_factory=list)

    def expect_many(self) -> None:
        pass

    def send(self, answer: Answer, final: bool = True) -> None:
        self._note(answer)

    def watch_cancellation(self, callback: Callable[[], None]) -> None:
        self._note(callback)

    def _note(self, what: Any) -> None:
        self.told.append(what)
        self.registered.append([region.name for region in self.regions.registered(ClientRegion)])


@pytest.fixture
def file() -> Iterator[SharedFile]:
    with shared_file(8192) as made:
        yield made


@pytest.fixture
def regions(file: SharedFile) -> ClientRegions:
    regions = ClientRegions(GUARD)
    regions.register("r", file.key, 0, 4096)
    return regions


@pytest.fixture
def tables() -> ServingTableHolder:
    tables = ServingTableHolder()
    configs = [
        ModelConfig(name="m"),
        ModelConfig(name="e", ensemble_steps=(EnsembleStep("m", -1, {}, {}),)),
        ModelConfig(name="cached", response_cache=True),
        ModelConfig(name="texts", inputs=(InputConfig("TEXT", DataType.BYTES, (1,)),)),
        ModelConfig(name="sequences", sequence_batching=SequenceBatching()),
    ]
    versions = {config.name: Version(config) for config in configs}
    tables.table = ServingTable({name: ServedModel(name, {1: version}, version) for name, version in versions.items()})  # type: ignore[dict-item, arg-type]
    return tables


@pytest.fixture
def memory(tables: ServingTableHolder, regions: ClientRegions) -> ClientMemory:
    return ClientMemory(tables, regions, most_bytes=1 << 20, work_off=take_all)


def part(nbytes: int | None = 16, offset: int | None = None, region: Any = "r", **more: Any) -> dict[str, Any]:
    given = {"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": nbytes}
    return {name: value for name, value in given.items() if value is not None} | more


def request(
    *inputs: InputHead, outputs: dict[str, dict[str, Any]] | None = None, model: str = "m", data: Any = None
) -> InferRequest:
    wanted = tuple(RequestedOutput(name, parameters) for name, parameters in (outputs or {}).items())
    return InferRequest(RequestHead(model, "", inputs, wanted), "", data or [b""] * len(inputs))


def four(name: str = "IN", **parameters: Any) -> InputHead:
    """An input of four 32-bit integers."""
    return InputHead(name, "INT32", (1, 4), parameters)


def answer(data: bytes, name: str = "OUT") -> InferResponse:
    return InferResponse.of("m", "1", "", [Tensor(name, DataType.INT32, (len(data) // 4,), data)])


def error_of(memory: ClientMemory, asked: InferRequest, regions: ClientRegions) -> str:
    with pytest.raises(ServeError) as caught:
        memory.attach(asked, Exchange(Heard(regions)))
    return f"{caught.value.code.name}: {caught.value.text}"


def test_a_head_knows_whether_it_is_concerned() -> None:
    assert not request(four()).head.uses_shared_memory
    assert not request(four(other=1), outputs={"OUT": {"classification": 1}}).head.uses_shared_memory
    assert request(four(**part())).head.uses_shared_memory
    assert request(four(shared_memory_offset=1)).head.uses_shared_memory
    assert request(four(), outputs={"OUT": part()}).head.uses_shared_memory


def test_inputs_are_fetched_beside_those_that_came_with_the_request(
    memory: ClientMemory, regions: ClientRegions, file: SharedFile
) -> None:
    file.put(32, bytes(range(16)))
    asked = request(four("A"), four("B", **part(16, 32)), data=[b"x" * 16, b""])
    heard = Heard(regions)
    exchange = Exchange(heard)
    assert memory.attach(asked, exchange) == []
    assert not exchange.hooks
    assert asked.data == [b"x" * 16, bytes(range(16))]


def test_what_a_client_changes_afterwards_does_not_reach_the_request(
    memory: ClientMemory, regions: ClientRegions, file: SharedFile
) -> None:
    asked = request(four(**part()))
    memory.attach(asked, Exchange(Heard(regions)))
    file.put(0, b"changed")
    assert asked.data == [bytes(16)]


LARGE = 20_000
"""Elements: more than 64 KiB."""


@pytest.fixture
def large(regions: ClientRegions) -> Iterator[SharedFile]:
    with shared_file(2 * 4 * LARGE, "large") as made:
        made.put(0, b"abcd" * LARGE)
        regions.register("large", made.key, 4, 8 * LARGE - 4)
        yield made


def large_input(name: str = "IN", **more: Any) -> InputHead:
    return InputHead(name, "INT32", (LARGE,), part(4 * LARGE, 0, "large", **more))


def test_a_large_input_is_seen_where_it_lies(memory: ClientMemory, regions: ClientRegions, large: SharedFile) -> None:
    asked, heard = request(large_input()), Heard(regions)
    memory.attach(asked, exchange := Exchange(heard))
    (seen,) = asked.data
    assert isinstance(seen, memoryview)
    assert (len(seen), bytes(seen[:4]), bytes(seen[-4:])) == (4 * LARGE, b"abcd", bytes(4))
    regions.unregister("large", ClientRegion)
    assert bytes(seen[:4]) == b"abcd"
    exchange.send(answer(b"done"))
    assert isinstance(heard.told[0], InferResponse)


@pytest.mark.parametrize(
    ("offsets", "is_placed"),
    [
        ((64, 64 + 4 * LARGE), True),
        ((64 + 4 * LARGE, 64), False),
        ((64, 128 + 4 * LARGE), False),
        ((68, 68 + 4 * LARGE), False),
    ],
    ids=["as in a slot", "in another order", "with a gap", "between multiples of 64"],
)
def test_large_inputs_are_named_by_their_place_where_they_lie_as_in_a_slot(
    memory: ClientMemory, regions: ClientRegions, offsets: tuple[int, int], is_placed: bool
) -> None:
    size = 4 * LARGE
    with shared_file(4096 + 3 * size, "placed") as made:
        made.put(4096 + offsets[0], b"abcd")
        regions.register("placed", made.key, 4096, 64 + 2 * size + 64)
        asked = request(
            *(
                InputHead(name, "FP32", (LARGE,), part(size, offset, "placed"))
                for name, offset in zip("AB", offsets, strict=True)
            )
        )
        memory.attach(asked, Exchange(Heard(regions)))
        assert [len(data) for data in asked.data] == [size, size]
        assert bytes(memoryview(asked.data[0])[:4]) == b"abcd"
        placed = asked.data if isinstance(asked.data, PlacedTensors) else None
        assert (placed and placed.offset) == (4096 + offsets[0] if is_placed else None)


def test_a_slots_end_lies_within_the_region_too(memory: ClientMemory, regions: ClientRegions) -> None:
    size = 4 * LARGE + 4
    with shared_file(2 * size, "end") as made:
        for name, nbytes in (("short", size), ("long", size + 60)):
            regions.register(name, made.key, 0, nbytes)
            asked = request(InputHead("IN", "FP32", (LARGE + 1,), part(size, 0, name)))
            memory.attach(asked, Exchange(Heard(regions)))
            assert isinstance(asked.data, PlacedTensors) == (name == "long")
            assert [len(data) for data in asked.data] == [size]


def test_what_is_done_with_inputs_beside_copying_them_has_a_copy(
    memory: ClientMemory, regions: ClientRegions, large: SharedFile
) -> None:
    for model in ("e", "cached", "texts", "sequences"):
        asked = request(large_input(), model=model)
        memory.attach(asked, Exchange(Heard(regions)))
        assert type(asked.data[0]) is bytes, model


def test_a_file_that_is_cut_while_its_request_is_under_way_fails_it(
    memory: ClientMemory, regions: ClientRegions, large: SharedFile
) -> None:
    heard = Heard(regions)
    memory.attach(request(large_input()), exchange := Exchange(heard))
    large.cut(4 * LARGE)
    exchange.send(answer(b"done"))
    end = 4 * LARGE + 4
    assert heard.told[0].text.startswith(f"shared memory region 'large' has been cut: byte {end} of")
    assert error_of(memory, request(large_input()), regions).startswith(
        "INVALID_ARGUMENT: shared memory region 'large'"
    )


def test_an_input_of_strings_is_fetched_whatever_its_size(
    memory: ClientMemory, regions: ClientRegions, file: SharedFile
) -> None:
    file.put(0, b"\3\0\0\0abc")
    asked = request(InputHead("IN", "BYTES", (1,), part(7)))
    memory.attach(asked, Exchange(Heard(regions)))
    assert asked.data == [b"\3\0\0\0abc"]


def test_an_input_of_the_wrong_size_keeps_its_size_for_validation_to_refuse(
    memory: ClientMemory, regions: ClientRegions
) -> None:
    asked = request(four(**part(12)), InputHead("IN", "NONSENSE", (1,), part(5)), four(**part(0)))
    memory.attach(asked, Exchange(Heard(regions)))
    assert [len(data) for data in asked.data] == [12, 5, 0]


def test_large_strings_for_a_model_that_takes_none_are_left_to_validation(
    memory: ClientMemory, regions: ClientRegions, large: SharedFile
) -> None:
    asked = request(InputHead("IN", "BYTES", (1,), part(4 * LARGE, 0, "large")))
    memory.attach(asked, Exchange(Heard(regions)))
    assert [len(data) for data in asked.data] == [4 * LARGE]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (part(16, -1), "INVALID_ARGUMENT: Invalid offset for shared memory region: 'r'"),
        (part(-1), "INVALID_ARGUMENT: Invalid offset + byte size for shared memory region: 'r'"),
        (
            part(-5, 10),
            f"INVALID_ARGUMENT: Integer overflow detected: byte_size ({MOST - 4}) + offset (10) exceeds maximum value"
            f" ({MOST}) for region 'r'",
        ),
        (
            part(region=3),
            "INVALID_ARGUMENT: invalid value type for 'shared_memory_region' parameter for tensor 'IN', expected"
            " string_param.",
        ),
        (
            part("16"),  # type: ignore[arg-type]
            "INVALID_ARGUMENT: invalid value type for 'shared_memory_byte_size' parameter for tensor 'IN', expected"
            " int64_param.",
        ),
        (
            part(16, True),
            "INVALID_ARGUMENT: invalid value type for 'shared_memory_offset' parameter for tensor 'IN', expected"
            " int64_param.",
        ),
    ],
)
def test_references_that_are_refused(
    memory: ClientMemory, regions: ClientRegions, parameters: dict[str, Any], text: str
) -> None:
    assert error_of(memory, request(four(**parameters)), regions) == text
    at_output = request(four(), outputs={"IN": parameters})
    assert error_of(memory, at_output, regions) == text


def test_no_more_is_fetched_than_may_wait(tables: ServingTableHolder, regions: ClientRegions) -> None:
    memory = ClientMemory(tables, regions, most_bytes=4000, work_off=take_all)
    texts = [InputHead(name, "BYTES", (1,), part(2001)) for name in ("A", "B")]
    memory.attach(request(texts[0]), Exchange(Heard(regions)))
    assert error_of(memory, request(*texts), regions) == (
        "RESOURCE_EXHAUSTED: the inputs in shared memory have more bytes than may wait for a model (4000;"
        " --max-queue-bytes)"
    )


def test_the_error_of_an_unknown_model_comes_before_that_of_an_unknown_region(
    memory: ClientMemory, regions: ClientRegions
) -> None:
    asked = request(four(**part(region="q")), model="nothing")
    assert error_of(memory, asked, regions) == (
        "NOT_FOUND: Request for unknown model: 'nothing' is not found; served are: cached, e, m, sequences, texts"
    )


def test_outputs_are_left_in_their_regions(memory: ClientMemory, regions: ClientRegions, file: SharedFile) -> None:
    heard = Heard(regions)
    memory.attach(request(four(), outputs={"A": part(32, 64), "B": {}}), exchange := Exchange(heard))
    given = InferResponse.of(
        "m",
        "1",
        "7",
        [Tensor("A", DataType.INT32, (4,), memoryview(b"a" * 16)), Tensor("B", DataType.INT32, (1,), b"bbbb")],
        {"key": 1},
    )
    exchange.send(given)
    (told,) = heard.told
    assert [(tensor.name, tensor.shape, bytes(tensor.data)) for tensor in told.outputs] == [
        ("A", (4,), b""),
        ("B", (1,), b"bbbb"),
    ]
    assert set(told.in_shared_memory) == {"A"}
    assert (told.id, told.parameters) == ("7", {"key": 1})
    assert bytes(given.outputs[0].data) == b"a" * 16
    assert file.get(63, 18) == b"\0" + b"a" * 16 + b"\0"


@pytest.mark.parametrize(("model", "where"), [("m", ""), ("e", "in ensemble 'e', ")])
def test_an_output_that_is_larger_than_its_part_fails(
    memory: ClientMemory, regions: ClientRegions, file: SharedFile, model: str, where: str
) -> None:
    heard = Heard(regions)
    memory.attach(request(four(), outputs={"OUT": part(15)}, model=model), exchange := Exchange(heard))
    exchange.send(answer(b"a" * 16))
    (error,) = heard.told
    assert error.code is StatusCode.INTERNAL
    assert error.text == (
        f"{where}shared memory size specified with the request for output 'OUT' (15 bytes) should be at least 16 bytes"
        " to hold the results"
    )
    assert file.get(0, 16) == bytes(16)


def test_an_output_whose_file_was_cut_fails(memory: ClientMemory, regions: ClientRegions, file: SharedFile) -> None:
    heard = Heard(regions)
    memory.attach(request(four(), outputs={"OUT": part()}), exchange := Exchange(heard))
    file.cut(8)
    exchange.send(answer(b"a" * 16))
    assert heard.told[0].text.startswith("shared memory region 'r' has been cut: byte 16 of")


def test_each_response_of_many_is_left_there(memory: ClientMemory, regions: ClientRegions, file: SharedFile) -> None:
    heard = Heard(regions)
    memory.attach(request(four(), outputs={"OUT": part(4)}), exchange := Exchange(heard))
    regions.unregister("r", ClientRegion)
    for text in (b"aaaa", b"too long", b"bbbb"):
        exchange.send(answer(text), False)
    exchange.send(None)
    kinds = [type(told).__name__ for told in heard.told]
    assert kinds == ["InferResponse", "ServeError", "InferResponse", "NoneType"]
    assert heard.registered == [["r"], ["r"], ["r"], []]
    assert file.get(0, 8) == b"bbbb\0\0\0\0"


def test_a_region_in_use_goes_when_its_last_user_has(memory: ClientMemory, regions: ClientRegions) -> None:
    def ask() -> tuple[Heard, Exchange]:
        exchange = Exchange(heard := Heard(regions))
        memory.attach(request(four(), outputs={"OUT": part(), "OTHER": part(16, 64)}), exchange)
        return heard, exchange

    first, first_exchange = ask()
    regions.unregister("", ClientRegion)
    with pytest.raises(ServeError, match="shared memory region 'r' already in manager"):
        regions.register("r", "/anything", 0, 1)
    second, second_exchange = ask()
    first_exchange.send(answer(bytes(16)))
    second_exchange.send(ServeError(StatusCode.UNAVAILABLE, "the worker died"))
    # Answered after the regions are released: a client with the answer finds them released.
    assert (first.registered, second.registered) == ([["r"]], [[]])


def test_a_refused_request_holds_no_region(memory: ClientMemory, regions: ClientRegions) -> None:
    error_of(memory, request(four(), outputs={"OUT": part(), "OTHER": part(region="q")}), regions)
    regions.unregister("r", ClientRegion)
    assert not regions.registered(ClientRegion)


def test_an_input_holds_no_region_once_it_is_fetched(memory: ClientMemory, regions: ClientRegions) -> None:
    memory.attach(request(four(**part())), Exchange(Heard(regions)))
    regions.unregister("r", ClientRegion)
    assert not regions.registered(ClientRegion)


def test_several_regions_may_lie_in_one_file(regions: ClientRegions, file: SharedFile) -> None:
    regions.register("second", file.key, 4096, 4096)
    regions.register("inner", file.key, 10, 20)
    found = [(region.name, region.offset, region.nbytes) for region in regions.registered(ClientRegion)]
    assert found == [("inner", 10, 20), ("r", 0, 4096), ("second", 4096, 4096)]
    regions.unregister("nothing", ClientRegion)
    regions.unregister("r", ClientRegion)
    assert [region.name for region in regions.registered(ClientRegion)] == ["inner", "second"]


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_large_input_that_has_to_be_copied_is_copied_in_steps(
    tables: ServingTableHolder, regions: ClientRegions, is_cut: bool
) -> None:
    memory, content = ClientMemory(tables, regions, 4 * COPIED_AT_ONCE, take_all), bytes(range(256)) * (13 << 10)
    with shared_file(len(content), "copied") as made:
        made.put(0, content)
        regions.register("copied", made.key, 0, len(content))
        entry = InputHead("IN", "UINT8", (len(content),), part(len(content), 0, "copied"))
        asked = request(entry, four(**part()), model="cached")
        (steps,) = memory.attach(asked, Exchange(Heard(regions)))
        for number in range(1, 5):
            next(steps)
            copied = min(number * COPIED_AT_ONCE, len(content))
            assert bytes(asked.data[0][:copied]) == content[:copied]
        if is_cut:
            made.cut(COPIED_AT_ONCE)
            with pytest.raises(ServeError, match="shared memory region 'copied' has been cut"):
                next(steps)
        else:
            assert list(steps) == []


def test_a_large_output_is_left_in_steps(tables: ServingTableHolder, regions: ClientRegions, large: SharedFile) -> None:
    begun: list[Iterator[None]] = []
    memory, heard = ClientMemory(tables, regions, 1 << 20, begun.append), Heard(regions)
    memory.attach(request(outputs={"OUT": part(4 * LARGE, 0, "large")}), exchange := Exchange(heard))
    given = answer(bytes(range(250)) * (4 * LARGE // 250))
    given.is_large = True
    exchange.send(given)
    assert heard.told == []
    (steps,) = begun
    take_all(steps)
    assert heard.told[0].data == [b""]
    assert large.get(4, 4 * LARGE) == given.data[0]
