"""What ONNX Runtime writes to the standard error stream, where its providers say why they do not start."""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_OPSET = re.compile(r"official support for domain (\S+) is till opset (\d+)")
_IR = re.compile(r"Unsupported model IR version: \d+, max supported IR version: (\d+)")
_LEVEL = re.compile(r"^.*?\[(?P<level>[EWIVF]):onnxruntime:[^\]]*\] *")
_PLACE = re.compile(r"^\S*/\S+\.(?:cc|h|cpp|hpp):\d+ .*?(?=\[ERROR\]|\[ONNXRuntimeError\]|$)")


def error_lines(written: str) -> list[str]:
    """The errors among ONNX Runtime's lines, without colours, times and the places in its source."""
    errors: list[str] = []
    is_error = False
    for line in _COLOURS.sub("", written).splitlines():
        head = _LEVEL.match(line)
        if head is not None:
            is_error = head["level"] in "EF"
            line = line[head.end() :]
        line = without_place(line)
        if is_error and line:
            errors.append(line)
    return errors


def remedy(text: str) -> str:
    """What to do about a refusal; "" where nothing is known."""
    if found := _OPSET.search(text):
        domain, newest = found.groups()
        which = "" if domain == "ai.onnx" else f" of {domain}"
        return f"; this ONNX Runtime reads opset <= {newest}{which}: export again with opset_version={newest}"
    if found := _IR.search(text):
        return (
            f"; this ONNX Runtime reads IR version <= {found[1]}: export again with an older onnx package, or set"
            f" ir_version = {found[1]} in the model"
        )
    return ""


def without_place(text: str) -> str:
    """A message without the place in ONNX Runtime's source that it may begin with."""
    return _PLACE.sub("", text, count=1).removeprefix("[ERROR]").strip()
