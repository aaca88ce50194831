"""MIGraphX without a server, as a process: `python -m benchmarks.bare_programs LIBRARY`, started by MIGraphX's loader.

Each line on standard input is JSON: the ONNX file of a model with one input and one output, a batch size, the input's
name, an .npy with one row of it, and a time in seconds. The program of that batch size, compiled for the reference
target when it is first asked for, then runs on copies of the row for that time, through rocserve's own binding. The
answer is a line of JSON: runs and seconds. The first row of the last run's output is written into the .npy that the
line names.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy

from rocserve.backends.migraphx.binding import Program
from rocserve.backends.migraphx.installation import MigraphxInstallation
from rocserve.backends.migraphx.python_module import open_binding


def main() -> None:
    (library,) = sys.argv[1:]
    binding = open_binding(MigraphxInstallation(library))
    programs: dict[tuple[str, int], Program] = {}
    for line in sys.stdin:
        order = json.loads(line)
        model, rows = order["model"], order["rows"]
        inputs = {order["name"]: numpy.repeat(numpy.load(order["input"]), rows, axis=0)}
        if (model, rows) not in programs:
            program = binding.parse_onnx(Path(model), {order["name"]: inputs[order["name"]].shape})
            program.compile("ref")
            programs[model, rows] = program
        program = programs[model, rows]
        count = 0
        begin = now = time.perf_counter()
        while now - begin < order["seconds"]:
            (output,) = program.run(inputs)
            count += 1
            now = time.perf_counter()
        numpy.save(order["output"], output[:1])
        print(json.dumps({"runs": count, "seconds": now - begin}), flush=True)


if __name__ == "__main__":
    main()
