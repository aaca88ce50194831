"""The models that the examples of tritonclient ask for, as their authors describe them."""

from __future__ import annotations

from pathlib import Path

from onnx import TensorProto

from support.models import add_sub, answering, drop, identity


def _tensors(field: str, kind: str, dims: int, *names: str) -> str:
    return "".join(f'{field} {{ name: "{name}" data_type: {kind} dims: {dims} }}\n' for name in names)


def _pair(kind: str) -> str:
    inputs, outputs = ("INPUT0", "INPUT1"), ("OUTPUT0", "OUTPUT1")
    return _tensors("input", kind, 16, *inputs) + _tensors("output", kind, 16, *outputs)


_STRINGS = """
import numpy as np
import triton_python_backend_utils as pb_utils

def numbers(request, name):
    return np.array([int(text) for text in pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()])

def texts(name, values, shape):
    return pb_utils.Tensor(name, np.array([str(value).encode() for value in values], dtype=object).reshape(shape))

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            left, right = numbers(request, "INPUT0"), numbers(request, "INPUT1")
            shape = pb_utils.get_input_tensor_by_name(request, "INPUT0").shape()
            outputs = [texts("OUTPUT0", left + right, shape), texts("OUTPUT1", left - right, shape)]
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""

_IDENTITY = answering("INPUT0", "OUTPUT0")

_INT8 = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            left, right = (pb_utils.get_input_tensor_by_name(request, f"INPUT{n}").as_numpy() for n in (0, 1))
            outputs = [pb_utils.Tensor("OUTPUT0", left + right), pb_utils.Tensor("OUTPUT1", left - right)]
            answers.append(pb_utils.InferenceResponse(outputs))
        return answers
"""

_REPEAT = """
import time
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            values, delays, wait = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel() for name in ("IN", "DELAY", "WAIT")
            )
            for index, (value, delay) in enumerate(zip(values, delays)):
                time.sleep(delay / 1000 / 1000)
                outputs = [
                    pb_utils.Tensor("OUT", np.array([value], np.int32)),
                    pb_utils.Tensor("IDX", np.array([index], np.uint32)),
                ]
                sender.send(pb_utils.InferenceResponse(outputs))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
_REPEAT_CONFIG = """
backend: "python"
input { name: "IN" data_type: TYPE_INT32 dims: -1 }
input { name: "DELAY" data_type: TYPE_UINT32 dims: -1 }
input { name: "WAIT" data_type: TYPE_UINT32 dims: 1 }
output { name: "OUT" data_type: TYPE_INT32 dims: 1 }
output { name: "IDX" data_type: TYPE_UINT32 dims: 1 }
model_transaction_policy { decoupled: true }
"""

_SEQUENCE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''The first request of a sequence is answered by its value and one more, each other by its value.'''

    def execute(self, requests):
        answers = []
        for request in requests:
            value, start = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("INPUT", "START")
            )
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", value + start.reshape(value.shape))]))
        return answers
"""
_DYNA_SEQUENCE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    '''Where the sequence's number is a text: the sum so far; else the value, and one more with the first. With the last
    request that number comes to it.'''

    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        answers = []
        for request in requests:
            value, start, end, identity = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0]
                for name in ("INPUT", "START", "END", "CORRID")
            )
            is_text = isinstance(identity, bytes)
            number = int(identity.decode() if is_text else identity)
            total = value + (self.sums.get(number, 0) if is_text and not start else 0) + (start and not is_text)
            self.sums[number] = total
            if end:
                del self.sums[number]
                total += number
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array([[total]], np.int32))]))
        return answers
"""


def _control(name: str, kind: str) -> str:
    return f'control_input {{ name: "{name}" control {{ kind: {kind} int32_false_true: [0, 1] }} }}\n'


def _sequence_config(strategy: str, controls: str, instances: int = 1) -> str:
    tensors = _tensors("input", "TYPE_INT32", 1, "INPUT") + _tensors("output", "TYPE_INT32", 1, "OUTPUT")
    return f"""
backend: "python"
max_batch_size: 8
{tensors}
sequence_batching {{ {strategy} max_sequence_idle_microseconds: 5000000 {controls} }}
instance_group {{ count: {instances} kind: KIND_CPU }}
"""


def _identity_control(kind: str) -> str:
    return f'control_input {{ name: "CORRID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: {kind} }} }}'


def drop_simple_models(repository: Path) -> None:
    """Drop all these models into a repository."""
    drop(repository, "simple", add_sub(), "max_batch_size: 8\n" + _pair("TYPE_INT32"))
    drop(repository, "custom_identity_int32", identity(TensorProto.INT32, ["batch", "length"]))
    batched = 'backend: "python"\nmax_batch_size: 8\n'
    drop(repository, "simple_int8", _INT8, batched + _pair("TYPE_INT8"))
    drop(repository, "simple_string", _STRINGS, batched + _pair("TYPE_STRING"))
    texts = _tensors("input", "TYPE_STRING", -1, "INPUT0") + _tensors("output", "TYPE_STRING", -1, "OUTPUT0")
    drop(repository, "simple_identity", _IDENTITY, batched + texts)
    drop(repository, "repeat_int32", _REPEAT, _REPEAT_CONFIG)
    start, end = _control("START", "CONTROL_SEQUENCE_START"), _control("END", "CONTROL_SEQUENCE_END")
    ready = _control("READY", "CONTROL_SEQUENCE_READY")
    direct = _sequence_config("direct { }", start + ready)
    drop(repository, "simple_sequence", _SEQUENCE, direct)
    for name, kind in (("simple_dyna_sequence", "TYPE_UINT64"), ("simple_string_dyna_sequence", "TYPE_STRING")):
        controls = start + end + ready + _identity_control(kind)
        config = _sequence_config("oldest { max_candidate_sequences: 4 }", controls)
        drop(repository, name, _DYNA_SEQUENCE, config)
