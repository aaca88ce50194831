"""Requests of every datatype on the page: it shows the values, and the code that it copies gets the same."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
from support.browser import COPIES, NEEDS_CHROMIUM, copied, opened_page, ran, send_json, visit
from support.parity.models import DATATYPES, ParityModel, python, tensor, write_model
from support.server import RocserveProcess
from tritonclient.utils import shared_memory

CURL, PYTHON, TRITON = COPIES
VALUES: dict[str, list[Any]] = {
    "BOOL": [True, False],
    "INT64": [-(2**63), 2**53 + 1],
    "UINT64": [2**64 - 1, 0],
    "FP16": [0.0999755859375, -65504.0],
    "FP32": [0.5, -2.0],
    "FP64": [0.1, 1e300],
    "BF16": [0.10009765625, -3.0],
    "BYTES": ['it\'s "é"', ""],
}
"""Values that the datatypes hold exactly; those that are not here have 1 and 2."""
TYPES = {"BOOL": np.bool_, "BYTES": np.object_, "BF16": ml_dtypes.bfloat16}
TYPES |= {name: np.dtype(name.lower().replace("fp", "float")) for name in DATATYPES if name not in TYPES}
WORD = 3.140625
"""BF16 and FP16 hold it."""

pytestmark = NEEDS_CHROMIUM


def data_type(datatype: str) -> str:
    return "STRING" if datatype == "BYTES" else datatype


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocserveProcess]:
    folder = tmp_path_factory.mktemp("copies")
    repository = folder / "repository"
    repository.mkdir()
    every = "".join(
        tensor("input", f"INPUT_{datatype}", data_type(datatype), [-1], "optional: true")
        + tensor("output", f"OUTPUT_{datatype}", data_type(datatype), [-1])
        for datatype in DATATYPES
    )
    write_model(repository, ParityModel("types", python(every), "identity"))
    for datatype in ("FP16", "BF16"):
        sides = tensor("input", "INPUT", datatype, [-1, 2]) + tensor("output", "OUTPUT", datatype, [-1, 2])
        named = python(sides).replace("INPUT", f"INPUT_{datatype}").replace("OUTPUT", f"OUTPUT_{datatype}")
        write_model(repository, ParityModel(f"only_{datatype}", named, "identity"))
    with RocserveProcess([repository], "--allow-client-shm=true", log=folder / "server.log") as running:
        running.wait_until_ready()
        yield running


def values_of(datatype: str) -> list[Any]:
    return VALUES.get(datatype, [1, 2])


def shown(page: Any, output: str) -> Any:
    """The values that the page shows."""
    section = page.locator(".answer section").filter(has=page.get_by_role("heading", name=f"{output} "))
    return json.loads(f"[{section.locator('pre').inner_text()}]")


def answered(folder: Path) -> dict[str, Any]:
    """What curl has written to answer.bin: name -> values."""
    text = (folder / "answer.bin").read_bytes()
    head, length = json.JSONDecoder().raw_decode(text.decode("latin-1"))
    outputs = json.loads(text[:length])["outputs"]
    assert len(outputs) == len(head["outputs"])
    for output in outputs:
        if size := output.get("parameters", {}).get("binary_data_size"):
            output["data"] = np.frombuffer(text[length : length + size], TYPES[output["datatype"]]).tolist()
            length += size
    assert length == len(text)
    return {output["name"]: output["data"] for output in outputs}


@pytest.mark.parametrize(
    ("missing", "can_send"),
    [
        ("JSON.rawJSON", {"only_BF16": False}),
        ("DataView.prototype.getFloat16", {"only_FP16": False, "only_BF16": True}),
    ],
)
def test_an_older_browser_learns_what_it_needs(
    browser: Any, server: RocserveProcess, missing: str, can_send: dict[str, bool]
) -> None:
    with opened_page(browser) as (page, faults):
        page.add_init_script(f"delete {missing}")
        for model, can in can_send.items():
            visit(page, server, model)
            page.get_by_role("heading", name="Try it").wait_for()
            told = page.get_by_text("the page needs Chrome 135, Firefox 135 or Safari 18.4")
            assert (told.count(), page.get_by_role("button", name="Send").count()) == (not can, can)
        assert not faults


def test_each_datatype_is_sent_shown_and_copied(page: Any, server: RocserveProcess, tmp_path: Path) -> None:
    inputs = [
        {"name": f"INPUT_{datatype}", "datatype": datatype, "shape": [1, 2], "data": values_of(datatype)}
        for datatype in DATATYPES
    ]
    outputs = [{"name": f"OUTPUT_{datatype}"} for datatype in DATATYPES]
    send_json(page, server, "types", {"inputs": inputs, "outputs": outputs})
    expected = {f"OUTPUT_{datatype}": values_of(datatype) for datatype in DATATYPES}
    assert {name: shown(page, name) for name in expected} == expected
    assert ran(copied(page, CURL), is_python=False, folder=tmp_path) == ""
    assert answered(tmp_path) == expected
    printed = ran(copied(page, PYTHON), is_python=True, folder=tmp_path)
    assert sorted(printed.splitlines()) == sorted(f"{name} {values}" for name, values in expected.items())
    arrays = {f"OUTPUT_{kind}": np.array([values_of(kind)], TYPES[kind]) for kind in DATATYPES}
    arrays["OUTPUT_BYTES"] = np.array([[text.encode() for text in values_of("BYTES")]], np.object_)
    printed = ran(copied(page, TRITON), is_python=True, folder=tmp_path)
    assert sorted(printed.splitlines()) == sorted(f"{name} {array}" for name, array in arrays.items())


def test_requests_without_16_bit_inputs_get_16_bit_outputs_and_the_reverse(
    page: Any, server: RocserveProcess, tmp_path: Path
) -> None:
    # One optional input of many; the answer has only JSON.
    floats = {"name": "INPUT_BF16", "datatype": "BF16", "shape": [1, 1], "data": [WORD]}
    others = {"name": "INPUT_INT8", "datatype": "INT8", "shape": [1, 3], "data": [[-1, 0, 1]]}
    send_json(page, server, "types", {"inputs": [floats, others], "outputs": [{"name": "OUTPUT_INT8"}]})
    assert shown(page, "OUTPUT_INT8") == [-1, 0, 1]
    assert '"data":[-1,0,1]' in ran(copied(page, CURL), is_python=False, folder=tmp_path)
    assert ran(copied(page, PYTHON), is_python=True, folder=tmp_path) == "OUTPUT_INT8 [-1, 0, 1]\n"
    assert ran(copied(page, TRITON), is_python=True, folder=tmp_path) == "OUTPUT_INT8 [[-1  0  1]]\n"


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_the_proposed_request_of_a_16_bit_model_is_answered(
    page: Any, server: RocserveProcess, tmp_path: Path, datatype: str
) -> None:
    """Its open dimensions are 1 in the request."""
    visit(page, server, f"only_{datatype}")
    page.get_by_role("button", name="Send").click()
    page.locator(".answer section").first.wait_for()
    assert shown(page, f"OUTPUT_{datatype}") == [0, 0]
    ran(copied(page, CURL), is_python=False, folder=tmp_path)
    assert answered(tmp_path) == {f"OUTPUT_{datatype}": [0.0, 0.0]}
    assert ran(copied(page, PYTHON), is_python=True, folder=tmp_path) == f"OUTPUT_{datatype} [0.0, 0.0]\n"
    zeros = np.zeros((1, 1, 2), TYPES[datatype])
    assert ran(copied(page, TRITON), is_python=True, folder=tmp_path) == f"OUTPUT_{datatype} {zeros}\n"


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
def test_numbers_are_rounded_as_numpy_does(page: Any, server: RocserveProcess, datatype: str) -> None:
    typed = [0.1, -1 / 3, 1 + 3 / 256, 1 + 1 / 256, 1e-7, 3.4e38 if datatype == "BF16" else 65519.0]
    tensor = {"name": f"INPUT_{datatype}", "datatype": datatype, "shape": [1, 3, 2], "data": typed}
    send_json(page, server, f"only_{datatype}", {"inputs": [tensor]})
    expected = np.array(typed, TYPES[datatype]).astype(np.float64).tolist()
    assert shown(page, f"OUTPUT_{datatype}") == [None if np.isinf(value) else value for value in expected]


def test_base64_is_decoded(page: Any, server: RocserveProcess, tmp_path: Path) -> None:
    raw = base64.b64encode(b"\xff\x00").decode()
    texts = {"name": "INPUT_BYTES", "datatype": "BYTES", "shape": [1, 1], "data": [base64.b64encode(b"two").decode()]}
    texts["parameters"] = {"content_type": "base64"}
    bytes_ = {"name": "INPUT_UINT8", "datatype": "UINT8", "shape": [1, 2], "data": [{"b64": raw}]}
    outputs = [{"name": "OUTPUT_BYTES"}, {"name": "OUTPUT_UINT8"}]
    send_json(page, server, "types", {"inputs": [texts, bytes_], "outputs": outputs})
    assert (shown(page, "OUTPUT_BYTES"), shown(page, "OUTPUT_UINT8")) == (["two"], [255, 0])
    assert '"data":[255,0]' in ran(copied(page, CURL), is_python=False, folder=tmp_path)
    lines = ran(copied(page, PYTHON), is_python=True, folder=tmp_path).splitlines()
    assert sorted(lines) == ["OUTPUT_BYTES ['two']", "OUTPUT_UINT8 [255, 0]"]
    lines = ran(copied(page, TRITON), is_python=True, folder=tmp_path).splitlines()
    assert sorted(lines) == ["OUTPUT_BYTES [[b'two']]", "OUTPUT_UINT8 [[255   0]]"]


def test_tensors_in_shared_memory(page: Any, server: RocserveProcess, tmp_path: Path) -> None:
    """The copied code names the same regions: what it sends is there, what it gets is written there."""
    handle = shared_memory.create_shared_memory_region("page", f"/rocserve-page-{server.http_port}", 64)
    client = triton.InferenceServerClient(server.http_address)
    try:
        shared_memory.set_shared_memory_region(handle, [np.array([1, -2], np.int32), np.array([WORD], np.float16)])
        client.register_system_shared_memory("page", f"/rocserve-page-{server.http_port}", 64)
        inputs = [
            {"name": "INPUT_INT32", "datatype": "INT32", "shape": [1, 2], "parameters": place(8)},
            {"name": "INPUT_FP16", "datatype": "FP16", "shape": [1, 1], "parameters": place(2, 8)},
        ]
        outputs = [{"name": "OUTPUT_INT32", "parameters": place(8, 32)}, {"name": "OUTPUT_FP16"}]
        send_json(page, server, "types", {"inputs": inputs, "outputs": outputs})
        assert shown(page, "OUTPUT_FP16") == [WORD]
        assert written(handle) == [1, -2]
        for button, printed in ((CURL, ""), (PYTHON, "OUTPUT_FP16 [3.140625]"), (TRITON, "OUTPUT_FP16 [[3.14]]")):
            shared_memory.set_shared_memory_region(handle, [np.zeros(2, np.int32)], 32)
            lines = ran(copied(page, button), button != CURL, tmp_path).splitlines()
            assert sorted(lines) == ([printed, "OUTPUT_INT32 in shared memory"] if printed else [])
            assert written(handle) == [1, -2]
    finally:
        client.unregister_system_shared_memory()
        client.close()
        shared_memory.destroy_shared_memory_region(handle)


def place(size: int, offset: int = 0) -> dict[str, Any]:
    return {"shared_memory_region": "page", "shared_memory_byte_size": size, "shared_memory_offset": offset}


def written(handle: Any) -> list[int]:
    numbers: list[int] = shared_memory.get_contents_as_numpy(handle, np.int32, [2], 32).tolist()
    return numbers
