"""Recognises files that are not models, and says what to do about them."""

from __future__ import annotations

from pathlib import Path

_EXPORT = 'export the model with torch.onnx.export(model, inputs, "model.onnx")'


def what_it_is(path: Path) -> str:
    """Return the end of a sentence about a file that is not a model; "" if its kind is not known."""
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError:
        return ""
    if start.lstrip().lower().startswith((b"<!doctype", b"<html", b"<?xml")):
        return "; it is a web page, as a failed download leaves one; download it again"
    # Offset, bytes at this offset, and their meaning.
    signatures = (
        (0, b"version https://git-lfs", "a git-LFS pointer, not the file itself; `git lfs pull` fetches that"),
        (0, b"PK\x03\x04", f"a zip archive, as PyTorch's files are; {_EXPORT}"),
        (0, b"\x80\x02", f"a Python pickle, as PyTorch's older files are; {_EXPORT}"),
        (0, b"\x89HDF", "an HDF5 file, as Keras writes; convert the model with tf2onnx"),
        (4, b"TFL3", "a TensorFlow Lite file; convert the model with tf2onnx --tflite"),
        (0, b"GGUF", "a GGUF file, which holds a language model for llama.cpp; export the model to ONNX"),
        (8, b'{"', f"a safetensors file, which holds weights alone; {_EXPORT}"),
        (0, b"\x1f\x8b", "compressed by gzip; unpack it"),
    )
    for place, mark, what in signatures:
        if start.startswith(mark, place):
            return f"; it is {what}"
    # An ONNX file begins with its IR version, field 1 of a ModelProto.
    if start.startswith(b"\x08"):
        return f"; it looks cut short, at {path.stat().st_size} bytes; copy it again"
    return ""
