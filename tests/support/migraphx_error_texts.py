"""The texts that the server must give for MIGraphX's failures. They say what to do, so that no page lists them."""

from __future__ import annotations

import re
from dataclasses import dataclass

INDEX_TEXTS = {
    "an operator that MIGraphX lacks": (
        "<task> failed <phase>: Unknown operator: MyFancyOp; this MIGraphX does not know the operator: <advice>"
    ),
    "strings within the graph": (
        "<task> failed <phase>: Prototensor data type 8 not supported; MIGraphX has no tensors of this "
        "datatype (8 is STRING): <advice>"
    ),
    "a graph that asks for more memory than there can be": (
        "<task> failed <phase>: std::bad_alloc; this machine's memory <advice>"
    ),
    "a graph that crashes MIGraphX": (
        "<task> failed <phase>: MIGraphX ended by signal 6 (SIGABRT): <last output>; MIGraphX crashes on this"
        " model: <advice>"
    ),
    "a dimension without a size": (
        "model '<model>': dimension 1 ('length') of input 'x' is left open by the model, <reason>; dimension "
        "'length' must not be padded: <difference>; <advice>"
    ),
    "another batch size than the file's, which a Reshape names": (
        "compiling batch size 2 <phase>: model '<model>' cannot run at batch size 2: <reason> Wrong number of"
        " elements for reshape: <advice>"
    ),
    "another batch size than the file's, whose rows depend on each other": (
        "compiling batch size 4 of model '<model>' failed while checking it <difference> (relative error "
        "<number>, rounding explains at most 0.01); <advice>"
    ),
    "an operator that MIGraphX lacks, in a TensorFlow graph": (
        "<task> failed <phase>: Operator not found: unknown:MyFancyOp; this MIGraphX does not know the "
        "TensorFlow operator: <advice>"
    ),
    "flipped bytes that crash MIGraphX": (
        "trying model.mxr of model '<model>' failed <phase>: MIGraphX ended by signal 6 (SIGABRT): <last "
        "output>; MIGraphX crashes on this model: <advice>"
    ),
    "the same, loaded again": (
        "model.mxr has crashed MIGraphX before, and is not tried again until it changes: <first error>"
    ),
    "another version of the format": (
        "trying model.mxr of model '<model>' failed <phase>: Program version mismatch. MXR file was created "
        "using program file version: 8, <versions>"
    ),
    "another GPU architecture": (
        "MIGraphX program model.mxr was compiled for GPU architecture gfx90a, and this GPU is gfx942; <rebuild>"
    ),
    "target gpu on a machine without one": (
        "model '<model>' needs MIGraphX's target gpu, because 'target' is \"gpu\", but it is not available here"
        " (targets here: ref); <advice>"
    ),
    "KIND_GPU on a machine without one": (
        "instance group <model>_0 of model <model> has kind KIND_GPU but no GPUs are available to the backend"
        " 'onnx' (<reason>); <advice>"
    ),
    "a GPU that MIGraphX does not find": (
        "<task> failed <phase>: get_device_id: No device; no AMD GPU can be used by this process: <advice>"
    ),
    "the library of target gpu is not installed": (
        "MIGraphX's target gpu cannot be used: <place>: Dynamic loading or symbol lookup failed with "
        "libmigraphx_gpu.so: <reason>; this installation of MIGraphX lacks the target: <advice>"
    ),
    "a compile that takes minutes or hours": "compiling batch size 1 of model '<model>': <phase> (<n> s so far)",
    "a compile that takes longer than it may": (
        "compiling batch size 1 of model '<model>' took longer than compile_timeout_secs (1 s) and was "
        "stopped while <phase>; <advice>"
    ),
    "a file of 0 bytes": "ONNX file model.onnx is empty; copy it again",
    "calibration samples for another name": (
        "<task> failed <phase>: calibration_data 'samples.npz' must have the model's inputs (x); "
        "it lacks 'x' and has 'picture'"
    ),
    "a program file cut behind its head": (
        "trying model.mxr of model '<model>' failed <phase>: insufficient bytes; <advice>"
    ),
    "flipped bytes": "trying model.mxr of model '<model>' failed <phase>: Operator not found: <operator>; <advice>",
}
"""Case -> the reason in the repository index; `<...>` is a part that varies."""
LOG_TEXTS = {
    "another version of MIGraphX, with the ONNX file beside it": (
        "model '<model>': model.onnx is compiled instead of model.mxr: <reason>"
    ),
    "a compile that takes minutes or hours": "model '<model>' version 1: compiling batch size 1 <phase>",
}
"""Case -> a line of the log."""
RESPONSE_TEXTS = {
    "a missing input": "INVALID_ARGUMENT expected 1 inputs but got 0 inputs for model '<model>'. <names>",
    "an input too many": (
        "INVALID_ARGUMENT expected 1 inputs but got 2 inputs for model '<model>'. <names> The "
        "model has no input 'z'; its inputs are: x"
    ),
    "an input of another shape": (
        "INVALID_ARGUMENT unexpected shape for input 'x' for model '<model>'. Expected [-1,16], got [1,15]. <note>"
    ),
    "an input of another datatype": (
        "INVALID_ARGUMENT inference input 'x' data-type is 'FP64', but model '<model>' expects 'FP32'; <advice>"
    ),
    "a batch above the range of a dynamic program": (
        "INVALID_ARGUMENT inference request batch-size must be <= 8 for '<model>'"
    ),
    "a batch of 0": "INVALID_ARGUMENT inference request batch-size must be >= 1 for '<model>'",
    "values that crash MIGraphX (an index that is out of range)": (
        "UNAVAILABLE worker of model '<model>' version 1 ended unexpectedly (killed by signal "
        "6); the request was in it; <reason>"
    ),
    "a model that cannot be served": "NOT_FOUND Request for unknown model: '<model>' has no available versions",
}
"""Case -> the status and the message of the response; `<...>` is a part that varies."""


_VARYING = re.compile(r"<[a-z ]+>")


@dataclass(frozen=True, slots=True)
class Text:
    """A message, with `<...>` for the parts that vary."""

    text: str

    @property
    def start(self) -> str:
        """The text before the first part that varies."""
        return _VARYING.split(self.text)[0]

    def fits(self, message: str) -> bool:
        pattern = ".+?".join(map(re.escape, _VARYING.split(self.text)))
        return re.fullmatch(pattern, message, re.DOTALL) is not None


def index_text(case: str) -> Text:
    return Text(INDEX_TEXTS[case])


def log_text(case: str) -> Text:
    return Text(LOG_TEXTS[case])


def response_text(case: str) -> Text:
    return Text(RESPONSE_TEXTS[case])
