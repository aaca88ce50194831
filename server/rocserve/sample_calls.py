"""What somebody may paste to ask a model for the first time: a line for the shell, and five of Python."""

from __future__ import annotations

import json
import math
from shlex import quote
from urllib.parse import quote as quote_url

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, ModelConfig

_MOST_WRITTEN = 16
"""Elements of a tensor that stand in the line itself; more are made by the shell."""
_WITHOUT_JSON = frozenset({DataType.FP16, DataType.BF16})
_PHOTO = "photo.jpg"


def can_be_sampled(config: ModelConfig) -> bool:
    """Whether one request without further words gets one answer."""
    return not config.decoupled and config.sequence_batching is None


def shell_line(config: ModelConfig, address: str, *, takes_files: bool) -> str:
    """A request by curl; "" where JSON has no form of the model's tensors. `takes_files`: its one input is images."""
    url = quote(f"{address}/v2/models/{quote_url(config.name, safe='')}/infer")
    inputs = _needed(config)
    if takes_files:
        return f"curl -s {url} -F {quote(inputs[0].name)}=@{_PHOTO}"
    if _WITHOUT_JSON & {*(each.datatype for each in inputs), *(each.datatype for each in config.outputs)}:
        return ""
    written: list[str] = []
    made: list[str] = []
    for entry in inputs:
        shape = _shape(config, entry)
        count = math.prod(shape)
        element = {DataType.BOOL: "false", DataType.BYTES: '"text"'}.get(entry.datatype, "0")
        head = json.dumps({"name": entry.name, "datatype": entry.datatype.value, "shape": shape}).replace("%", "%%")
        if count > _MOST_WRITTEN:
            made.append(f'"$(yes {quote(element)} | head -n {count} | paste -sd,)"')
        data = "%s" if count > _MOST_WRITTEN else ",".join([element] * count)
        written.append(f'{head[:-1]}, "data": [{data}]}}')
    body = f'{{"inputs": [{", ".join(written)}]}}'
    if not made:
        return f"curl -s {url} -d {quote(body.replace('%%', '%'))}"
    return f"printf {quote(body)} {' '.join(made)} | curl -s {url} -d @-"


def python_lines(config: ModelConfig, address: str, *, takes_files: bool) -> tuple[str, ...]:
    """The same by the Python client; none for tensors that numpy has not."""
    inputs = _needed(config)
    if any(entry.datatype is DataType.BF16 for entry in inputs):
        return ()
    arrays = ", ".join(f"{entry.name!r}: {_array(config, entry, takes_files)}" for entry in inputs)
    return (
        "import numpy as np",
        "from rocserve_client import Client",
        f"client = Client({address!r})",
        f"result = client.infer({config.name!r}, {{{arrays}}})",
        f"print(result[{config.outputs[0].name!r}])",
    )


def _array(config: ModelConfig, entry: InputConfig, is_file: bool) -> str:
    shape = _shape(config, entry)
    if entry.datatype is not DataType.BYTES:
        return f"np.zeros({shape}, {entry.datatype.numpy_dtype.name!r})"
    element = f"open({_PHOTO!r}, 'rb').read()" if is_file else "b'text'"
    return f"np.full({shape}, {element}, 'object')"


def _needed(config: ModelConfig) -> tuple[InputConfig, ...]:
    return tuple(entry for entry in config.inputs if not entry.optional)


def _shape(config: ModelConfig, entry: InputConfig) -> tuple[int, ...]:
    """One row; 1 for each dimension that varies."""
    dims = (1, *entry.dims) if config.max_batch_size > 0 else entry.dims
    return tuple(max(1, size) for size in dims)
