"""Compares the written configuration with the completed one, line by line, in protobuf's text format."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from rocserve.config.pbtxt import format_model_config
from rocserve.protocol.model_config_pb2 import ModelConfig


def config_lines(message: ModelConfig) -> Sequence[str]:
    """Return a configuration in protobuf's text format."""
    return format_model_config(message).splitlines()


def compared(written: ModelConfig, completed: ModelConfig) -> Sequence[tuple[str, str]] | None:
    """Return the lines of both, each with "+" if it was completed, "-" if it was written and replaced, "" if it is in
    both; None if they are too long to compare. Order, comments and brackets of the file do not count."""
    before, after = config_lines(written), config_lines(completed)
    # In the worst case the time grows with the square of the lines.
    if len(before) + len(after) > 3000:
        return None
    lines: list[tuple[str, str]] = []
    for what, first, end, other_first, other_end in difflib.SequenceMatcher(
        None, before, after, autojunk=False
    ).get_opcodes():
        if what == "equal":
            lines += [("", line) for line in before[first:end]]
        else:
            lines += [("-", line) for line in before[first:end]]
            lines += [("+", line) for line in after[other_first:other_end]]
    return lines
