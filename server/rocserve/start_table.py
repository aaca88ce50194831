"""Prints a table of the models and a sample request, after the models of the start have loaded or failed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from shlex import quote
from textwrap import wrap
from typing import TextIO
from unicodedata import east_asian_width
from urllib.parse import quote as quote_url

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.printable import listed, printable
from rocserve.core.serving import IndexEntry, ServedVersion, ServingTable
from rocserve.core.validation import format_shape
from rocserve.settings import RepositorySettings
from rocserve.settings.repository import ControlMode
from rocserve.settings.unix_place import SCHEME

_MOST_ROWS = 30
"""Rows that fit one screen. Of more models only those that are not ready have a row."""
_READY = "READY"
_HEADINGS = ("model", "version", "runs on", "inputs", "outputs", "state")


def print_table(entries: Iterable[IndexEntry], table: ServingTable, file: TextIO) -> None:
    """Print the rows of the repository index, without models that were never loaded; in one screen."""
    versions = {
        (model.name, str(number)): version for model in table.all_models for number, version in model.versions.items()
    }
    rows = loaded = [row for row in entries if row.state]
    if len(loaded) > _MOST_ROWS:
        rows = [row for row in loaded if row.state != _READY]
        print(
            f"{len(loaded)} versions of models, {len(loaded) - len(rows)} {_READY}; rocserve status lists them",
            file=file,
        )
        rows = rows[:_MOST_ROWS]
    if not rows:
        return
    # FORCE_COLOR asks for a terminal's table in a file.
    is_terminal = file.isatty() or bool(os.environ.get("FORCE_COLOR"))
    between = "\n" if is_terminal else ", "
    cells = [(row.name, *_cells(row, versions.get((row.name, row.version)), between)) for row in rows]
    if is_terminal:
        _print_folded(cells, file)
    else:
        _print_lines(cells, file)
    for row in rows:
        if row.reason:
            name = f"{row.name} {row.version}".rstrip()
            print(f"{name}: {printable(row.reason)}", file=file)
    print(file=file)


def _print_lines(rows: Sequence[Sequence[str]], file: TextIO) -> None:
    """Print one line for each row."""
    lines = [_HEADINGS, *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell + " " * (width - _width(cell)) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip(), file=file)


def _width(text: str) -> int:
    return len(text) if text.isascii() else sum(2 if east_asian_width(one) in "WF" else 1 for one in text)


def _print_folded(rows: Sequence[Sequence[str]], file: TextIO) -> None:
    """Print a table that is folded to the width of the terminal."""
    # Here: rich takes 50 ms, which services save, whose output is not a terminal.
    from rich.box import SIMPLE_HEAD
    from rich.table import Column

    from rocserve.verbs.printing import console_on, show, table

    console = console_on(file)
    columns = [Column(name, overflow="fold", no_wrap=name in ("model", "version", "state")) for name in _HEADINGS]
    # A longer name is folded, to leave room for the tensors.
    folded = [("\n".join(wrap(name, max(1, console.width // 4))), *others) for name, *others in rows]
    show(console, table("", columns, folded, box=SIMPLE_HEAD), is_folded=True)


def print_way_to_first_model(
    entries: Iterable[IndexEntry], settings: RepositorySettings, http: str, file: TextIO
) -> None:
    """Print how to get a first model if the start has loaded none, from repositories that hold none, or under explicit
    control. `http`: the address; "" = HTTP is not served."""
    rows = list(entries)
    is_explicit = settings.control_mode is ControlMode.EXPLICIT
    if settings.single is not None or any(row.state for row in rows) or (rows and not is_explicit):
        return
    # The first of `roots` may hold a remote repository's copy.
    first = settings.remotes[0].url if settings.remotes else settings.roots[0] if settings.roots else ""
    place = f"{first}/NAME/1/" if first else "NAME/1/ of the repository"
    drop = f"put one into {place}, for example as model.onnx"
    if not rows:
        then = {
            ControlMode.POLL: "it is served without a restart",
            ControlMode.NONE: "start the server again",
            ControlMode.EXPLICIT: "load it by its name",
        }[settings.control_mode]
        print(f"There is no model yet: {drop}, and {then}.\n", file=file)
        return
    call = f"curl -X POST {curl_url(http, '/v2/repository/models/NAME/load')}" if http else "a load request"
    names = listed(sorted({row.name for row in rows}))
    print(f"No model is loaded; load one with {call}, or at the start with --load-model=NAME: {names}.\n", file=file)


def print_sample(version: ServedVersion, table: ServingTable, http: str, grpc: str, file: TextIO) -> None:
    """Print how to send a request to a model, for each protocol that has an address."""
    config = version.config
    if config.decoupled or config.sequence_batching is not None:
        return  # A single request without parameters gets no response, or several.
    members = [table.models.get(step.member) for step in config.ensemble_steps]
    backends = (config.backend, *(member.latest.config.backend for member in members if member and member.latest))
    # Models of this backend take image files.
    takes_files = len(config.inputs) == 1 and "rocal" in backends
    line = shell_line(config, http, takes_files=takes_files) if http else ""
    lines = python_lines(config, grpc, takes_files=takes_files) if grpc else ()
    if line:
        print(f"Ask it from a shell:\n\n{line}\n", file=file)
    if lines:
        print("\n".join(("Ask it from Python:", "", *lines, "")), file=file)


def _cells(row: IndexEntry, version: ServedVersion | None, between: str) -> tuple[str, ...]:
    if version is None:
        return (row.version, "", "", "", row.state)
    config = version.config
    place = dict.fromkeys(version.properties.get(word, "") for word in ("engine", "devices"))
    runs_on = "the server" if config.is_ensemble else ", ".join(filter(None, place))
    lead = (-1,) if config.max_batch_size > 0 else ()
    inputs, outputs = (
        listed([f"{one.name} {one.datatype.value} {format_shape((*lead, *one.dims))}" for one in tensors], between)
        for tensors in (config.inputs, config.outputs)
    )
    return (row.version, runs_on, inputs, outputs, row.state)


_MOST_WRITTEN = 16
"""Elements of a tensor that the command contains; the shell generates larger tensors."""
_PHOTO = "photo.jpg"


def curl_url(address: str, target: str) -> str:
    """Return a URL for curl, and before it the flag for a Unix socket."""
    path = address.removeprefix(SCHEME)
    if path == address:
        return quote(address + target)
    return f"--unix-socket {quote(path)} {quote('http://localhost' + target)}"


def shell_line(config: ModelConfig, address: str, *, takes_files: bool) -> str:
    """Return a curl command; "" if JSON cannot express the tensors. `takes_files`: the only input is an image file."""
    url = curl_url(address, f"/v2/models/{quote_url(config.name, safe='')}/infer")
    inputs = _needed(config)
    if takes_files:
        return f"curl -s {url} -F {quote(inputs[0].name)}=@{_PHOTO}"
    datatypes = {one.datatype for one in (*inputs, *config.outputs)}
    if not datatypes.isdisjoint((DataType.FP16, DataType.BF16)):
        return ""  # JSON has no form for these.
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
    """Return the request as Python code; empty for datatypes that numpy lacks."""
    inputs = _needed(config)
    if any(entry.datatype is DataType.BF16 for entry in inputs):
        return ()
    arrays = ", ".join(f"{entry.name!r}: {_array(config, entry, takes_files)}" for entry in inputs)
    wanted = _wanted(config) if takes_files else ()
    shown = next((output for output in config.outputs if output.datatype is DataType.BYTES and takes_files), None)
    asked = f", {[output.name for output in wanted]}" if len(wanted) < len(config.outputs) and wanted else ""
    return (
        "import numpy as np",
        "from rocserve_client import Client",
        f"client = Client({address!r})",
        f"result = client.infer({config.name!r}, {{{arrays}}}{asked})",
        f"print(result[{(shown or config.outputs[0]).name!r}])",
    )


def _wanted(config: ModelConfig) -> tuple[OutputConfig, ...]:
    """Return the outputs of an image model for people: names, and outputs with few numbers."""
    return tuple(one for one in config.outputs if math.prod(max(1, size) for size in one.dims) <= _MOST_WRITTEN)


def _array(config: ModelConfig, entry: InputConfig, is_file: bool) -> str:
    shape = _shape(config, entry)
    if entry.datatype is not DataType.BYTES:
        return f"np.zeros({shape}, {entry.datatype.numpy_dtype.name!r})"
    element = f"open({_PHOTO!r}, 'rb').read()" if is_file else "b'text'"
    return f"np.full({shape}, {element}, 'object')"


def _needed(config: ModelConfig) -> tuple[InputConfig, ...]:
    """Return the inputs of a request; of a model that only has optional ones, the first."""
    return tuple(entry for entry in config.inputs if not entry.optional) or config.inputs[:1]


def _shape(config: ModelConfig, entry: InputConfig) -> tuple[int, ...]:
    """Return the shape of one row, with 1 for variable dimensions."""
    dims = (1, *entry.dims) if config.max_batch_size > 0 else entry.dims
    return tuple(max(1, size) for size in dims)
