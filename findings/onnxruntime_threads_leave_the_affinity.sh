#!/usr/bin/env bash
# onnxruntime 1.32.0: with the default number of threads, a session counts the machine's cores and binds each thread of its
# pool to a separate core, also where the process may only use one of them (taskset, a container's cpuset). The pool then
# runs on cores that belong to somebody else, and its threads do not run on the core that the process has.
# A number of threads that is set (intra_op_num_threads) binds nothing. Needs a machine with two cores or more.
# Seen on 2026-11-28:
#   default: some thread of the pool may run outside of the process's core: True
#   two threads: some thread of the pool may run outside of the process's core: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2
cat >"$folder/threads.py" <<'PYTHON'
import os

import onnxruntime
from onnx import TensorProto, helper

first = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {first})
x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "same", [x], [y])
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9).SerializeToString()
for name, threads in (("default", 0), ("two threads", 2)):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    before = set(os.listdir("/proc/self/task"))
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    pool = set(os.listdir("/proc/self/task")) - before
    assert pool, "the session has no pool: the machine has one core"
    outside = any(os.sched_getaffinity(int(thread)) != {first} for thread in pool)
    print(f"{name}: some thread of the pool may run outside of the process's core: {outside}")
    del session
PYTHON
diff <("$folder/venv/bin/python" "$folder/threads.py") - <<'SEEN'
default: some thread of the pool may run outside of the process's core: True
two threads: some thread of the pool may run outside of the process's core: False
SEEN
