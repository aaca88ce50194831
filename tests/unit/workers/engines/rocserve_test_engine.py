"""An engine for tests; the config's parameter `behaviour` says what it does."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from rocserve.backends.base import Batch, BatchResult, ModelSource
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor

SIGNATURE = Signature(
    (TensorSpec("A", DataType.INT32, (-1, 16)), TensorSpec("B", DataType.INT32, (-1, 16))),
    (TensorSpec("SUM", DataType.INT32, (-1, 16)), TensorSpec("DIFFERENCE", DataType.INT32, (-1, 16))),
    True,
)


def load(model: ModelSource) -> Model:
    behaviour = model.config.parameters.get("behaviour", "add_sub")
    if behaviour == "load_fails":
        # As in the texts of some libraries.
        raise RuntimeError("the file makes \x1b[1mno sense\x1b[0m at byte 7")
    if behaviour == "load_refuses":
        raise ServeError(StatusCode.FAILED_PRECONDITION, "no such device")
    if behaviour == "load_refuses_at_length":
        raise ServeError(StatusCode.INVALID_ARGUMENT, "no such device " * 400_000)
    if behaviour == "load_crashes":
        print("about to fall over", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if behaviour == "load_exits":
        os._exit(3)
    if behaviour == "load_misses_file":
        (model.model_folder / "weights").read_bytes()
    if behaviour == "restarts_slowly":
        started = model.model_folder / "started"
        while started.exists() and not (model.model_folder / "open").exists():
            note_stuck(model)
            time.sleep(0.01)
        started.touch()
    if behaviour == "load_slow":
        note_stuck(model)
        time.sleep(600)
    if behaviour == "load_holds_gil":
        note_stuck(model)
        ctypes.PyDLL(None).sleep(600)
    return Model(behaviour, model)


def note_stuck(source: ModelSource) -> None:
    (source.model_folder / f"stuck-{os.getpid()}-{threading.get_ident()}").touch()


class Model:
    def __init__(self, behaviour: str, source: ModelSource) -> None:
        self.signature = SIGNATURE
        self._behaviour = behaviour
        self._source = source
        self._warm_ups: list[tuple[object, ...]] = []
        self._four = threading.Barrier(4)
        self._prepared = 0
        if behaviour in ("prepares", "prepares_for_long"):
            self.prepare_more = self._prepare_more

    def warm_up(self, samples: list[Batch]) -> None:
        if self._behaviour == "warm_up_fails":
            raise ValueError("too cold")
        if self._behaviour == "crash_at_restart" and (self._source.model_folder / "crashed").exists():
            os._exit(9)
        self._warm_ups = [(batch.request_sizes, {n: t.numpy() for n, t in batch.inputs.items()}) for batch in samples]

    def execute(self, batch: Batch) -> BatchResult:
        return getattr(self, f"_{self._behaviour}")(batch)

    def close(self) -> None:
        print("closed")

    def _add_sub(self, batch: Batch) -> BatchResult:
        a, b = batch.inputs["A"].numpy(), batch.inputs["B"].numpy()
        return BatchResult({"SUM": a + b, "DIFFERENCE": a - b})

    def _prepares(self, batch: Batch) -> BatchResult:
        """DIFFERENCE is the number of preparations so far."""
        a, b = batch.inputs["A"].numpy(), batch.inputs["B"].numpy()
        return BatchResult({"SUM": a + b, "DIFFERENCE": np.full_like(a, self._prepared)})

    _prepares_for_long = _prepares

    def _prepare_more(self) -> bool:
        self._prepared += 1
        return self._prepared < 3 or self._behaviour == "prepares_for_long"

    def _in_room(self, batch: Batch) -> BatchResult:
        """Use the batch's room if there is some; DIFFERENCE is as wide as B says, and of ones if SUM's room was
        used."""
        a, b = batch.arrays["A"], batch.arrays["B"]
        outputs = {}
        place = batch.room.get("SUM")
        outputs["SUM"] = a + b if place is None else np.add(a, b, out=place)
        difference = np.full((len(a), b.flat[0]), place is not None, np.int32)
        place = batch.room.get("DIFFERENCE")
        if place is not None and place.shape == difference.shape:
            place[...] = difference
            difference = place
        return BatchResult({**outputs, "DIFFERENCE": difference})

    def _crash_at_restart(self, batch: Batch) -> BatchResult:
        (self._source.model_folder / "crashed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def _identity(self, batch: Batch) -> BatchResult:
        return BatchResult({f"OUT_{name}": tensor.numpy() for name, tensor in batch.inputs.items()})

    def _identity_tensor(self, batch: Batch) -> BatchResult:
        return BatchResult({f"OUT_{name}": Tensor("", t.datatype, t.shape, t.data) for name, t in batch.inputs.items()})

    def _gated(self, batch: Batch) -> BatchResult:
        """Wait until the test opens the gate."""
        while not (self._source.model_folder / "open").exists():
            time.sleep(0.01)
        return self._add_sub(batch)

    def _four_at_once(self, batch: Batch) -> BatchResult:
        self._four.wait()
        return self._add_sub(batch)

    def _stuck(self, batch: Batch) -> BatchResult:
        note_stuck(self._source)
        time.sleep(600)
        return self._add_sub(batch)

    def _crash(self, batch: Batch) -> BatchResult:
        os.kill(os.getpid(), signal.SIGKILL)
        return self._add_sub(batch)

    def _crash_at_zeros(self, batch: Batch) -> BatchResult:
        if not batch.inputs["A"].numpy().any():
            os.kill(os.getpid(), signal.SIGKILL)
        return self._add_sub(batch)

    def _raise(self, batch: Batch) -> BatchResult:
        raise RuntimeError("the engine's own words")

    def _single(self, batch: Batch) -> BatchResult:
        """Take one request at a time, and no zeros."""
        assert len(batch.request_sizes) == 1, batch.request_sizes
        if not batch.inputs["A"].numpy().any():
            raise ValueError("nothing but zeros")
        return self._add_sub(batch)

    def _refuse(self, batch: Batch) -> BatchResult:
        raise invalid_argument("that will not do")

    def _sys_exit(self, batch: Batch) -> BatchResult:
        sys.exit("enough")

    def _bad_rows(self, batch: Batch) -> BatchResult:
        result = self._add_sub(batch)
        return BatchResult({"SUM": result.outputs["SUM"][1:], "DIFFERENCE": result.outputs["DIFFERENCE"]})

    def _missing(self, batch: Batch) -> BatchResult:
        return BatchResult({"OTHER": np.zeros(1)})

    def _failures(self, batch: Batch) -> BatchResult:
        """Requests whose first element is negative fail."""
        result = self._add_sub(batch)
        rows = batch.inputs["A"].numpy()
        failures, start = {}, 0
        for index, size in enumerate(batch.request_sizes):
            if (rows[start : start + size] < 0).any():
                failures[index] = invalid_argument(f"request {index} is negative " + "x" * 1000)
            start += size
        return BatchResult(result.outputs, failures)

    def _large(self, batch: Batch) -> BatchResult:
        """As many bytes as the first element says."""
        size = int(batch.inputs["A"].numpy().flat[0])
        return BatchResult({"SUM": np.full((1, size), 7, np.uint8), "DIFFERENCE": np.zeros((1, 1), np.uint8)})

    def _close_socket(self, batch: Batch) -> BatchResult:
        """Like a fault in the worker."""
        for descriptor in range(3, 64):
            try:
                if str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith("socket:"):
                    os.close(descriptor)
            except OSError:
                continue
        time.sleep(60)
        return self._add_sub(batch)

    def _facts(self, batch: Batch) -> BatchResult:
        """Facts about the worker itself, as strings."""
        facts = [
            f"pid={os.getpid()}",
            f"comm={Path('/proc/self/comm').read_text().strip()}",
            f"grpc={'grpc' in sys.modules or 'google.protobuf' in sys.modules}",
            f"engine_forked={'rocserve.workers.zygote' in sys.modules}",
            f"thread={threading.current_thread().name}",
            f"device={self._source.device}",
            f"hip={os.environ.get('HIP_VISIBLE_DEVICES')}",
            f"loaded_by={os.environ.get('LOADED_BY')}",
            f"cache={self._source.settings.cache_directory}",
            f"count={self._source.instance_count}",
            f"random={random.random()}",
            f"numpy_random={np.random.random()}",
            f"oom={Path('/proc/self/oom_score_adj').read_text().strip()}",
            f"rocserve_on_path={any((Path(p) / 'rocserve').exists() for p in sys.path if p)}",
            f"warm_ups={self._warm_ups}",
            f"cores={sorted(os.sched_getaffinity(0))}",
            f"file={self._source.model_file}",
        ]
        return BatchResult({"SUM": np.array(facts, dtype=object), "DIFFERENCE": np.zeros(1, np.int32)})

    def _print(self, batch: Batch) -> BatchResult:
        libc = ctypes.CDLL(None)
        print("from print")
        print("to stderr", file=sys.stderr)
        os.write(1, b"from C\n")
        libc.puts(b"from puts")
        libc.fflush(None)
        os.write(2, b"\xff\xfe\x00junk\x1b[2J\n")
        os.write(1, b"x" * 100_000 + b"\n")
        os.write(1, b"after the long line\n")
        return self._add_sub(batch)
