"""Texts of MIGraphX's failures that say what to do, so that docs/reference/migraphx-errors.md does not list them."""

from __future__ import annotations

INDEX_TEXTS = {
    "no file": "unable to find the model file of '<model>' in version folder 1: expected model.onnx, <advice>",
    "a file of 0 bytes": "ONNX file model.onnx is empty; copy it again",
    "a file without outputs": "ONNX file model.onnx <reason>: it has no outputs; copy or export it again",
    "a file that is something else": (
        "ONNX file model.onnx is damaged or <reason> (17 bytes: <why>); copy or export it again"
    ),
    "a truncated file": (
        "ONNX file model.onnx is damaged or <reason>; it looks cut short, at <n> bytes; copy it again"
    ),
    "weights that are too short": (
        "ONNX file model.onnx is damaged: tensor '<name>' has 8 bytes, expected 2048; copy or export it again"
    ),
    "a shape for an input that the model lacks": (
        "model '<model>': 'input_shapes' names 'picture', but the model's inputs are x"
    ),
    "another shape than the file's": (
        "model '<model>': 'input_shapes' gives input 'x' [15], but the model has [16] <advice>"
    ),
    "calibration data that are not there": "calibration_data 'samples.npz' is not in the model's folder; <advice>",
    "calibration samples of another shape": (
        "<task> failed <phase>: calibration_data 'samples.npz' has shape [4, 15] for input 'x' "
        "(samples.npz), expected [16] <or>"
    ),
    "calibration samples of another datatype": (
        "<task> failed <phase>: calibration_data 'samples.npz' has float64 for input 'x' "
        "(samples.npz), expected float32"
    ),
    "calibration samples for another name": (
        "<task> failed <phase>: calibration_data 'samples.npz' must have the model's inputs (x); "
        "it lacks 'x' and has 'picture'"
    ),
    "no program file": "unable to find the model file of '<model>' in version folder 1: expected model.mxr, <advice>",
    "a program file of 0 bytes": "MIGraphX program model.mxr is empty; copy it again",
    "a program file that is something else": (
        "MIGraphX program model.mxr is damaged or <reason> (it begins with byte 0x67, <why>); copy or compile it again"
    ),
    "a program file cut within its head": (
        "MIGraphX program model.mxr is damaged or <reason> (it ends within a value of 7 bytes at "
        "byte 35); copy or compile it again"
    ),
    "a program file cut behind its head": (
        "trying model.mxr of model '<model>' failed <phase>: insufficient bytes; <advice>"
    ),
    "flipped bytes": "trying model.mxr of model '<model>' failed <phase>: Operator not found: <operator>; <advice>",
    "a TensorFlow graph that is something else": (
        "TensorFlow graph model.graphdef is damaged or <reason> (17 bytes: <why>); copy or export it again"
    ),
    "a TensorFlow graph of 0 bytes": "TensorFlow graph model.graphdef is empty; copy it again",
    "MIGraphX's Python module is not installed": "MIGraphX cannot be loaded: binding module <reason>; <advice>",
}
"""Case -> the reason in the repository index; `<...>` is a part that varies."""
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
