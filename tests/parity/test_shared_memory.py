"""The extension of system shared memory; both servers get the same regions."""

from __future__ import annotations

import fcntl
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.parity.exchange import Asked, Call, Exchange, Local, Outcome, Step
from support.parity.inference import Input, Output, infer, raw_input
from support.parity.pair import Pair
from support.shared_memory import FOLDER
from support.waiting import PATIENCE_SECONDS
from tritonclient.grpc import service_pb2 as pb

KEY = "rocserve_parity"
SIZE = 8192
PAGE = 4096
"""Triton maps whole pages."""
ROW = np.arange(4, dtype=np.int32)
BYTES = b"\x03\0\0\0one\x05\0\0\0three"


@pytest.fixture(scope="module")
def memory() -> Iterator[SharedMemory]:
    """Two pages: a row of INT32 at 0 and at 16, BYTES elements at 32; results are written from 128 on. The second page
    begins like the first."""
    # Recorded requests name the region, so that another run on this machine has to wait.
    with (Path(tempfile.gettempdir()) / f"{KEY}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (FOLDER / KEY).unlink(missing_ok=True)  # Of a run that was killed.
        region = SharedMemory(KEY, create=True, size=SIZE)
        # The servers map the file themselves; this fixture removes it.
        resource_tracker.unregister(f"/{KEY}", "shared_memory")
        yield region
        region.close()
        resource_tracker.register(f"/{KEY}", "shared_memory")
        region.unlink()


def register(name: str, key: str = f"/{KEY}", offset: int = 0, size: int = SIZE) -> Call:
    request = pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size)
    return Call("SystemSharedMemoryRegister", request)


def unregister(name: str = "") -> Call:
    return Call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name=name))


def status(name: str = "") -> Call:
    return Call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name=name))


def place(region: Any, offset: Any = None, size: Any = None) -> dict[str, Any]:
    given = {"shared_memory_region": region, "shared_memory_offset": offset, "shared_memory_byte_size": size}
    return {name: value for name, value in given.items() if value is not None}


def lying(name: str, *where: Any, shape: tuple[int, ...] = (1, 4), datatype: str = "INT32") -> Input:
    return Input(name, datatype, shape, parameters=place(*where))


def ask(first: Input, second: Input, *outputs: Output | str, **more: Any) -> Call:
    return Call("ModelInfer", infer("add_sub", first, second, outputs=outputs, **more))


@dataclass(frozen=True, slots=True)
class LetGo:
    """Unregister all regions, once Triton has released the previous request."""

    def digest(self) -> str:
        return unregister().digest()

    def ask(self, server: Asked) -> Outcome:
        end = time.monotonic() + PATIENCE_SECONDS
        while (outcome := unregister().ask(server)).status == "INTERNAL" and time.monotonic() < end:
            time.sleep(0.02)
        return outcome


def exchange(name: str, *steps: Step) -> Exchange:
    """An exchange that unregisters all regions before and after its steps."""
    return Exchange(name, [LetGo(), *steps, LetGo()])


FIRST, SECOND = lying("INPUT0", "r", 0, 16), lying("INPUT1", "r", 16, 16)
RAW_FIRST, RAW_SECOND = raw_input("INPUT0", [ROW]), raw_input("INPUT1", [ROW])
REGISTRATIONS = [
    exchange("status of no regions", status()),
    exchange("status of an unknown region", status("r")),
    exchange("register and look", register("r"), status(), status("r")),
    exchange("register a part", register("r", offset=PAGE, size=32), status("r")),
    exchange("register from within a page", register("r", offset=16, size=32)),
    exchange("register two", register("a"), register("b", offset=PAGE, size=8), status()),
    exchange("register twice", register("r"), register("r")),
    exchange("register another under the name", register("r"), register("r", offset=PAGE, size=8)),
    exchange("register without a name", register("")),
    exchange("register without a key", register("r", key="")),
    exchange("register an unknown key", register("r", key="/rocserve_parity_none")),
    exchange("register a key without a slash", register("r", key=KEY)),
    exchange("register a key of a path", register("r", key="/../etc/passwd")),
    exchange("register too much", register("r", size=100_000)),
    exchange("register behind the end", register("r", offset=100_000, size=16)),
    exchange("register over the end", register("r", offset=PAGE, size=PAGE + 100)),
    exchange("register no bytes", register("r", size=0)),
    exchange("register an offset that overflows", register("r", offset=2**64 - 8, size=16)),
    exchange("unregister unknown", unregister("r")),
    exchange("unregister and look", register("r"), unregister("r"), status("r"), status()),
    exchange("unregister all", register("a"), register("b"), unregister(), status()),
    exchange("register again", register("r"), unregister("r"), register("r"), status("r")),
]
INFERENCES = [
    exchange("inputs in shared memory", register("r"), ask(FIRST, SECOND)),
    exchange("one input in shared memory", register("r"), ask(FIRST, RAW_SECOND)),
    exchange("the other input in shared memory", register("r"), ask(RAW_FIRST, SECOND)),
    exchange("inputs in a part", register("r", offset=PAGE, size=32), ask(lying("INPUT0", "r", 0, 16), RAW_SECOND)),
    exchange("no offset", register("r"), ask(lying("INPUT0", "r", None, 16), RAW_SECOND)),
    exchange(
        "input in two regions",
        register("a"),
        register("b", offset=PAGE, size=64),
        ask(lying("INPUT0", "a", 0, 16), lying("INPUT1", "b", 0, 16)),
    ),
    exchange(
        "outputs in shared memory",
        register("r"),
        ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", place("r", 128, 16)), Output("OUTPUT1", place("r", 144, 16))),
        Local(lambda server: results()),
    ),
    exchange(
        "an output in more room than it needs",
        register("r"),
        ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", place("r", 160, 96))),
    ),
    exchange(
        "an output beside a raw one",
        register("r"),
        ask(RAW_FIRST, RAW_SECOND, "OUTPUT1", Output("OUTPUT0", place("r", 128, 16))),
    ),
    exchange(
        "all in shared memory",
        register("r"),
        ask(FIRST, SECOND, Output("OUTPUT0", place("r", 128, 16))),
        Local(lambda server: results()),
    ),
    exchange(
        "BYTES in shared memory",
        register("r"),
        Call(
            "ModelInfer", infer("types_whole", lying("INPUT_BYTES", "r", 32, len(BYTES), shape=(2,), datatype="BYTES"))
        ),
    ),
    exchange(
        "BYTES into shared memory",
        register("r"),
        Call(
            "ModelInfer",
            infer(
                "types_whole",
                Input("INPUT_BYTES", "BYTES", [2], BYTES),
                outputs=[Output("OUTPUT_BYTES", place("r", 128, 64))],
            ),
        ),
        Local(lambda server: results()),
    ),
    exchange(
        "classes into shared memory",
        register("r"),
        ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", {"classification": 2, **place("r", 128, 64)})),
    ),
    exchange(
        "chain in shared memory",
        register("r"),
        Call("ModelInfer", infer("chain", FIRST, SECOND, outputs=[Output("OUTPUT0", place("r", 128, 16))])),
        Local(lambda server: results()),
    ),
]
REFUSALS = [
    exchange("region that is gone", register("r"), unregister("r"), ask(FIRST, SECOND)),
    exchange("unknown region", ask(lying("INPUT0", "nowhere", 0, 16), RAW_SECOND)),
    exchange("unknown region of an output", ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", place("nowhere", 0, 16)))),
    exchange("input over the end", register("r"), ask(lying("INPUT0", "r", SIZE - 8, 16), RAW_SECOND)),
    exchange("input behind the end", register("r"), ask(lying("INPUT0", "r", SIZE, 16), RAW_SECOND)),
    exchange("input far behind the end", register("r"), ask(lying("INPUT0", "r", 2**40, 16), RAW_SECOND)),
    exchange("input before the beginning", register("r"), ask(lying("INPUT0", "r", -16, 16), RAW_SECOND)),
    exchange("input that overflows", register("r"), ask(lying("INPUT0", "r", 2**63 - 8, 16), RAW_SECOND)),
    exchange(
        "input over the end of a part",
        register("r", offset=PAGE, size=32),
        ask(lying("INPUT0", "r", 24, 16), RAW_SECOND),
    ),
    exchange("input too small", register("r"), ask(lying("INPUT0", "r", 0, 12), RAW_SECOND)),
    exchange("input too large", register("r"), ask(lying("INPUT0", "r", 0, 20), RAW_SECOND)),
    exchange("input of no size", register("r"), ask(lying("INPUT0", "r", 0, 0), RAW_SECOND)),
    exchange("input of a size below zero", register("r"), ask(lying("INPUT0", "r", 0, -16), RAW_SECOND)),
    exchange("input without a size", register("r"), ask(lying("INPUT0", "r", 0), RAW_SECOND)),
    exchange("size of text", register("r"), ask(lying("INPUT0", "r", 0, "16"), RAW_SECOND)),
    exchange("offset of text", register("r"), ask(lying("INPUT0", "r", "0", 16), RAW_SECOND)),
    exchange("region that is a number", register("r"), ask(lying("INPUT0", 7, 0, 16), RAW_SECOND)),
    exchange(
        "contents beside shared memory",
        register("r"),
        ask(
            Input("INPUT0", "INT32", (1, 4), contents={"int_contents": [1, 2, 3, 4]}, parameters=place("r", 0, 16)),
            Input("INPUT1", "INT32", (1, 4), contents={"int_contents": [1, 2, 3, 4]}),
        ),
    ),
    exchange(
        "BYTES cut off in shared memory",
        register("r"),
        Call(
            "ModelInfer",
            infer("types_whole", lying("INPUT_BYTES", "r", 32, len(BYTES) - 2, shape=(2,), datatype="BYTES")),
        ),
    ),
    exchange(
        "output over the end", register("r"), ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", place("r", SIZE - 8, 16)))
    ),
    exchange(
        "output behind the end", register("r"), ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", place("r", SIZE + 8, 16)))
    ),
    exchange("output too small", register("r"), ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", place("r", 128, 12)))),
    exchange("output of no size", register("r"), ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", place("r", 128, 0)))),
    exchange("output without a size", register("r"), ask(RAW_FIRST, RAW_SECOND, Output("OUTPUT0", place("r", 128)))),
]
CUDA = [
    Exchange("CUDA: status", [Call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest())]),
    Exchange(
        "CUDA: status of an unknown region",
        [Call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest(name="c"))],
    ),
    Exchange("CUDA: unregister all", [Call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest())]),
    Exchange(
        "CUDA: unregister unknown", [Call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest(name="c"))]
    ),
    Exchange(
        "CUDA: register",
        [
            Call(
                "CudaSharedMemoryRegister",
                pb.CudaSharedMemoryRegisterRequest(name="c", raw_handle=bytes(64), byte_size=16),
            )
        ],
    ),
]


def results() -> bytes:
    """The content of the second half, which is cleared for the next server."""
    region = SharedMemory(KEY)
    try:
        found = bytes(region.buf[128:PAGE])
        region.buf[128:PAGE] = bytes(PAGE - 128)
        return found
    finally:
        resource_tracker.unregister(f"/{KEY}", "shared_memory")
        region.close()


@pytest.mark.parametrize(
    "exchange", [*REGISTRATIONS, *INFERENCES, *REFUSALS, *CUDA], ids=lambda exchange: exchange.name
)
def test_shared_memory(pair: Pair, memory: SharedMemory, exchange: Exchange) -> None:
    memory.buf[:] = 2 * (ROW.tobytes() + (ROW * 3).tobytes() + BYTES).ljust(PAGE, b"\0")
    pair.compare(exchange)
