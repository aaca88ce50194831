#!/usr/bin/env bash
# onnxslim 0.1.98, onnxsim 0.8.1, onnxoptimizer 0.4.2 and openvino 2026.4.1, each with its defaults: two nodes that draw noise from
# one tensor become one node, without a warning. Their elimination of common subexpressions takes a random operator for a
# function of its input. Independent draws, such as real and imaginary parts or two samples of one model, are then equal,
# and their difference is always 0. onnxruntime 1.32.0 knows the operators Random... as random, and not Bernoulli: it merges
# these nodes too, and only graph_optimization_level ORT_DISABLE_ALL keeps both.
# Seen on 2026-11-30, share of 10,000 numbers that differ between two draws:
#   no optimisation: RandomNormalLike 1.0, Bernoulli 0.5
#   onnxruntime: RandomNormalLike 1.0, Bernoulli 0.0
#   onnxslim: RandomNormalLike 0.0, Bernoulli 0.0
#   onnxsim: RandomNormalLike 0.0, Bernoulli 0.0
#   onnxoptimizer: RandomNormalLike 0.0, Bernoulli 0.0
#   openvino: RandomNormalLike 0.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxslim==0.1.98 onnxsim==0.8.1 onnxoptimizer==0.4.2 \
    openvino==2026.4.1 onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat >"$folder/draws.py" <<'PYTHON'
import sys

import numpy
import onnxoptimizer
import onnxruntime
import onnxsim
import onnxslim
import openvino
from onnx import TensorProto, checker, helper

SIZE = 10000
x = numpy.full((1, SIZE), 0.5, numpy.float32)


def two_draws(operator):
    nodes = [helper.make_node(operator, ["x"], [draw]) for draw in ("first", "second")]
    nodes.append(helper.make_node("Sub", ["first", "second"], ["y"]))
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["rows", SIZE]) for name in "xy"]
    graph = helper.make_graph(nodes, "draws", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    checker.check_model(model)
    return model


def by_onnxruntime(model, level=onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = level
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


def by_openvino(model):
    core = openvino.Core()
    return core.compile_model(core.read_model(model.SerializeToString()), "CPU")({"x": x})[0]


optimised = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
tools = {
    "no optimisation": by_onnxruntime,
    "onnxruntime": lambda model: by_onnxruntime(model, optimised),
    "onnxslim": lambda model: by_onnxruntime(onnxslim.slim(model)),
    "onnxsim": lambda model: by_onnxruntime(onnxsim.simplify(model)[0]),
    "onnxoptimizer": lambda model: by_onnxruntime(onnxoptimizer.optimize(model)),
    "openvino": by_openvino,
}
for name, difference in tools.items():
    # OpenVINO has no Bernoulli.
    operators = ("RandomNormalLike",) if name == "openvino" else ("RandomNormalLike", "Bernoulli")
    shares = (f"{operator} {numpy.mean(difference(two_draws(operator)) != 0):.1f}" for operator in operators)
    print(f"{name}: {', '.join(shares)}", file=sys.stderr)
PYTHON
diff <("$folder/venv/bin/python" "$folder/draws.py" 2>&1 >/dev/null | grep -E '^[a-z ]+: RandomNormalLike') - <<'SEEN'
no optimisation: RandomNormalLike 1.0, Bernoulli 0.5
onnxruntime: RandomNormalLike 1.0, Bernoulli 0.0
onnxslim: RandomNormalLike 0.0, Bernoulli 0.0
onnxsim: RandomNormalLike 0.0, Bernoulli 0.0
onnxoptimizer: RandomNormalLike 0.0, Bernoulli 0.0
openvino: RandomNormalLike 0.0
SEEN
