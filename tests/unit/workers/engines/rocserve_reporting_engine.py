"""An engine that reports its progress; the config's parameter `behaviour` says how it continues."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rocserve.backends.base import Batch, BatchResult, ModelSource
from rocserve.core.datatypes import DataType
from rocserve.core.errors import unavailable
from rocserve.core.load_check import REFERENCE, ROWS, LoadCheckFailed, LoadCheckReport
from rocserve.core.requests import Signature, TensorSpec

_COUPLES = "rows depend on each other: output 'OUT' of a row changes by 0.3 with its neighbours"


def load(model: ModelSource) -> Model:
    return Model(model)


class Model:
    signature = Signature(
        (TensorSpec("IN", DataType.FP32, (-1, 2)),), (TensorSpec("OUT", DataType.FP32, (-1, 2)),), True
    )

    load_check = LoadCheckReport()

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        self._sizes = ["1"]
        behaviour = source.config.parameters.get("behaviour", "")
        source.report("compiling batch size 1: parse, 0 s")
        if behaviour == "fails":
            raise unavailable("Unknown operator: MyFancyOp")
        if behaviour == "crashes":
            os.kill(os.getpid(), signal.SIGABRT)
        if behaviour == "compiles":
            self._compile()
        if behaviour == "dies":
            self._begin_again()
        if behaviour == "fails_its_check":
            raise LoadCheckFailed(REFERENCE, "output 'OUT' differs by 1.8 from the reference")
        if behaviour in ("checked", "couples_rows"):
            source.report("")
            source.report_check("running 3 inputs")
            source.report_check("")
        if behaviour == "checked":
            self.load_check = LoadCheckReport(("3 inputs, largest error 2e-6", "rows are independent"), seconds=0.42)
        if behaviour == "couples_rows":
            self.signature = replace(self.signature, dependent_rows=_COUPLES)
            self.load_check = LoadCheckReport((_COUPLES,), f"requests are joined although {_COUPLES}", (ROWS,), 0.5)
        if behaviour == "floods":
            for number in range(3000):
                source.report(f"compiling {number} {'x' * 400}")
        source.report("")
        if behaviour == "goes_on":
            threading.Thread(target=self._go_on, daemon=True).start()

    @property
    def properties(self) -> Mapping[str, str]:
        return {"target": "ref", "batch_sizes": ", ".join(self._sizes)}

    def warm_up(self, samples: Sequence[Batch]) -> None:
        if self._source.config.parameters.get("behaviour") == "warm_up_fails":
            raise RuntimeError("the program gives no numbers")

    def execute(self, batch: Batch) -> BatchResult:
        return BatchResult({"OUT": np.array(batch.inputs["IN"].numpy())})

    def close(self) -> None: ...

    def _compile(self) -> None:
        """Compile in a child, until the test ends it."""
        child = subprocess.Popen(["sleep", "600"])
        (self._source.model_folder / "child").write_text(str(child.pid))
        self._source.report("compiling batch size 1:\ncompile, 1 s")
        self._source.report("compiling batch size 1: compile, 2 s")
        self._wait_for("compiled")
        child.kill()
        child.wait()

    def _begin_again(self) -> None:
        """The first load ends when the test says so, the next one compiles."""
        marker = self._source.model_folder / "began"
        if marker.exists():
            self._source.report("compiling batch size 1: compile, 1 s")
            self._wait_for("compiled")
        else:
            marker.touch()
            threading.Thread(target=self._die, daemon=True).start()

    def _die(self) -> None:
        self._wait_for("die")
        os.kill(os.getpid(), signal.SIGKILL)

    def _go_on(self) -> None:
        self._source.report("compiling batch size 2: compile, 1 s")
        self._wait_for("second_compiled")
        self._sizes.append("2")
        self._source.report("")

    def _wait_for(self, name: str) -> None:
        """Wait for a file of the test, which ends the worker in any case."""
        while not Path(self._source.model_folder, name).exists():
            time.sleep(0.01)
