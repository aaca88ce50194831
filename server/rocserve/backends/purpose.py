"""Reads an ONNX file's purpose: `task` and `names` of the metadata that Ultralytics' exporter writes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rocserve.core.model_config import Purpose


def read_purpose(metadata: Mapping[str, str]) -> Purpose:
    """Return the purpose; without names if they are not numbered from 0 on."""
    task, text = metadata.get("task", ""), metadata.get("names", "")
    # An entry of a dict from numbers to names, as Python prints it.
    entry = re.compile(r"""(\d{1,9})\s*:\s*(?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")""")
    names = {
        int(found[1]): re.sub(r"\\(.)", r"\1", found[2] or found[3] or "", flags=re.DOTALL)
        # A thousand names have 20,000 characters.
        for found in entry.finditer(text if len(text) <= 1 << 20 else "")
    }
    # A name on several lines would be several labels.
    is_usable = sorted(names) == list(range(len(names))) and not any("\n" in name for name in names.values())
    return Purpose(
        task if re.fullmatch(r"[a-z0-9_-]{1,32}", task) else "",
        tuple(names[number] for number in range(len(names))) if is_usable else (),
    )
