"""What is printed once, when the models that were there at the start have been loaded or have failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TextIO

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from rocserve.config.datatypes import format_shape
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.core.printable import printable
from rocserve.core.serving import IndexEntry, ServedVersion, ServingTable
from rocserve.sample_calls import can_be_sampled, python_lines, shell_line
from rocserve.tools.printing import console_on, say, show_folded

_COLUMNS = ("model", "version", "runs on", "inputs", "outputs", "state")
_MOST_ROWS = 200
"""More are no help to whoever starts a server."""
_IMAGES = "rocal"
"""The backend whose models take files of images."""


def print_table(rows: Iterable[IndexEntry], table: ServingTable, file: TextIO) -> None:
    """`rows`: those of the repository index. Models that nobody has asked for are passed over."""
    versions = {
        (model.name, str(number)): version for model in table.all_models for number, version in model.versions.items()
    }
    console = console_on(file)
    made = Table(box=SIMPLE_HEAD if console.is_terminal else None, pad_edge=False)
    for name in _COLUMNS:
        made.add_column(name, overflow="fold")
    between = "\n" if console.is_terminal else ", "
    loaded = [row for row in rows if row.state]
    if len(loaded) > _MOST_ROWS:
        say(console, f"{len(loaded)} versions of models; rocserve status lists them")
        return
    for row in loaded:
        made.add_row(*map(Text, _cells(row, versions.get((row.name, row.version)), between)))
    show_folded(console, made)
    for row in loaded:
        if row.reason:
            say(console, f"{row.name} {row.version}: {printable(row.reason)}")
    say(console)


def print_sample(version: ServedVersion, table: ServingTable, http: str, grpc: str, file: TextIO) -> None:
    """How to ask a model, by the protocols that have an address."""
    config = version.config
    if not can_be_sampled(config):
        return
    takes_files = _takes_images(config, table)
    line = shell_line(config, http, takes_files=takes_files) if http else ""
    lines = python_lines(config, grpc, takes_files=takes_files) if grpc else ()
    if line:
        print(f"Ask it from a shell:\n\n{line}\n", file=file)
    if lines:
        print("\n".join(("Ask it from Python:", "", *lines, "")), file=file)


def _takes_images(config: ModelConfig, table: ServingTable) -> bool:
    if len(config.inputs) != 1:
        return False
    members = [table.models.get(step.member) for step in config.ensemble_steps]
    return _IMAGES in (config.backend, *(each.latest.config.backend for each in members if each and each.latest))


def _cells(row: IndexEntry, version: ServedVersion | None, between: str) -> tuple[str, ...]:
    if version is None:
        return (row.name, row.version, "", "", "", row.state)
    config = version.config
    place = dict.fromkeys(version.properties.get(word, "") for word in ("engine", "devices"))
    runs_on = "the server" if config.is_ensemble else ", ".join(filter(None, place))
    inputs, outputs = (between.join(_tensors(config, tensors)) for tensors in (config.inputs, config.outputs))
    return (row.name, row.version, runs_on, inputs, outputs, row.state)


def _tensors(config: ModelConfig, tensors: Iterable[InputConfig | OutputConfig]) -> Iterator[str]:
    lead = (-1,) if config.max_batch_size > 0 else ()
    return (f"{one.name} {one.datatype.value} {format_shape((*lead, *one.dims))}" for one in tensors)
