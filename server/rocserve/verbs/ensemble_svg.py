"""Draws an ensemble's steps into a file of SVG, as the page of a server shows them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from rocserve.backends.registry import BackendRegistry, discover_backends
from rocserve.config.ensemble_drawing import NodeKind, draw, member_of
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.model_names import ModelKey
from rocserve.protocol.model_config_pb2 import ModelConfig
from rocserve.protocol.page_pb2 import EnsembleGraphResponse
from rocserve.verbs.model_choice import advised, read_folder
from rocserve.verbs.printing import console_on, counted, say

_STYLE = """
svg { --back: #fff; --card: #fff; --text: #1c1e21; --soft: #5d646e; --line: #c3c8ce; --end: #e9ebee; --bad: #fde3e0;
  background: var(--back); font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --back: #15171a; --card: #1d2024; --text: #e8eaed; --soft: #a0a7b1;
  --line: #4a5058; --end: #2c3036; --bad: #4a1b17; } }
text { fill: var(--text); font-weight: 600; }
.tensor { fill: var(--soft); font-weight: 400; font-size: 12px; }
.tensor { paint-order: stroke; stroke: var(--back); stroke-width: 7px; }
.arrow { fill: none; stroke: var(--soft); stroke-width: 1.3; }
marker path { fill: var(--soft); }
.step { fill: var(--card); stroke: var(--line); }
.end { fill: var(--end); }
.bad { fill: var(--bad); }
"""


def draw_ensemble(folder: Path, config_name: str, file: Path) -> None:
    """Write the file, and print what a server would refuse. Raises ServeError if the folder's model is not an ensemble,
    or its configuration cannot be read; OSError if the file cannot be written."""
    if not folder.is_dir():
        raise invalid_argument("is not a folder; --graph expects the folder of an ensemble")
    registry, fault = discover_backends(), ""
    reading = read_folder(folder, registry, config_name)
    with advised(reading):
        config, *others = reading.written().models
    if not config.ensemble_scheduling.step:
        raise invalid_argument("is not an ensemble, so it has no steps to draw; remove --graph")
    try:
        reading.definitions()
    except ServeError as error:
        fault = error.text
    members = dict(_members(config, others, reading.folder.parent, registry))
    # Pixels: what a page of text shows without scrolling.
    drawing = draw(config, members, 900.0)
    file.write_text(svg(drawing, f"steps of {config.name or reading.folder.name}"), encoding="utf-8")
    out = console_on()
    say(out, f"{file}: {counted(len(config.ensemble_scheduling.step), 'step')}")
    missing = sorted({member_of(step) for step in config.ensemble_scheduling.step} - members.keys())
    if missing:
        say(out, f"not in the repository, so the types of their outputs are unknown: {', '.join(missing)}")
    if fault:
        say(out, f"a server would not serve it: {fault}")


def _members(
    config: ModelConfig, others: Iterable[ModelConfig], repository: Path, registry: BackendRegistry
) -> Iterator[tuple[ModelKey, ModelConfig]]:
    """Yield the configurations of the steps' models: in the ensemble's own file, or in the folders beside it."""
    own = {model.name: model for model in others}
    for step in config.ensemble_scheduling.step:
        key = member_of(step)
        if step.model_name in own:
            yield key, own[step.model_name]
            continue
        # A member's fault is shown where the member is inspected.
        with suppress(ServeError, OSError):
            yield key, read_folder(repository / step.model_name, registry, "").written().models[0]


def svg(drawing: EnsembleGraphResponse, title: str) -> str:
    """Return the drawing as a document that needs no other file. Colours follow the reader's theme."""
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0L8 4L0 8z"/></marker>'
    )
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{drawing.width:.0f}" height="{drawing.height:.0f}"'
            f' viewBox="0 0 {drawing.width:.1f} {drawing.height:.1f}" role="img">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style><defs>{head}</defs>",
            *_elements(drawing),
            "</svg>\n",
        )
    )


def _elements(drawing: EnsembleGraphResponse) -> Iterator[str]:
    for path in drawing.arrows:
        yield f'<path class="arrow" marker-end="url(#head)" d={quoteattr(path)}/>'
    for label in drawing.labels:
        yield (
            f'<text class="tensor" text-anchor="middle" x="{label.x:.1f}" y="{label.y:.1f}">{escape(label.text)}'
            f"<title>{escape(label.title)}</title></text>"
        )
    for box in drawing.boxes:
        kind = {NodeKind.STEP.value: "step", NodeKind.UNWRITTEN.value: "bad"}.get(box.kind, "end")
        # Without a line about the last minute and a bar, the name is in the middle.
        yield (
            f'<rect class="{kind}" x="{box.x + 0.5:.1f}" y="{box.y:.1f}" width="{box.width - 1:.1f}"'
            f' height="{box.height:.1f}" rx="{6 if box.kind == NodeKind.STEP else box.height / 2:.1f}"/>'
            f'<text text-anchor="middle" x="{box.x + box.width / 2:.1f}" y="{box.y + box.height / 2 + 4.5:.1f}">'
            f"{escape(box.text)}<title>{escape(box.title)}</title></text>"
        )
