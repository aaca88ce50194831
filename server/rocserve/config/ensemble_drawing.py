"""Draws an ensemble's steps from the request to the answer, with the tensors between them. The page and `rocserve
inspect` show the same drawing, which is the page's message. It needs only configurations, so it works for ensembles
that cannot be served, too."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import chain

from rocserve.config.datatypes import datatype_of_number
from rocserve.core.model_names import ModelKey, qualified
from rocserve.protocol.model_config_pb2 import ModelConfig, ModelEnsembling, ModelInput, ModelOutput
from rocserve.protocol.page_pb2 import EnsembleGraphResponse, GraphBox

_LEAST_WIDTH, _MOST_WIDTH = 108.0, 260.0
"""Of a box."""
_LINE, _SPACE = 16.0, 22.0
"""Height of a line of text on an arrow, and of the space above and below these lines."""
_LETTER = 7.2
"""Width of a letter, about: fonts differ."""


class NodeKind(StrEnum):
    STEP = "step"
    REQUEST = "request"
    ANSWER = "answer"
    UNWRITTEN = "written by no step"
    """The origin of tensors that a step reads and no step writes."""


def member_of(step: ModelEnsembling.Step) -> ModelKey:
    return qualified(step.model_namespace, step.model_name)


def draw(config: ModelConfig, members: Mapping[ModelKey, ModelConfig], width: float) -> EnsembleGraphResponse:
    """Draw an ensemble in about this width. `members`: the known ones, for the types of their outputs."""
    return _Layout(*_plan(config, members), width).drawing()


_Arrow = tuple[int, int]
"""The numbers of the nodes from which and to which it leads."""


def _plan(
    config: ModelConfig, members: Mapping[ModelKey, ModelConfig]
) -> tuple[Mapping[int, tuple[NodeKind, str, str]], Sequence[Sequence[int]], Mapping[_Arrow, Mapping[str, None]]]:
    """Put each step one row below the last of the steps that it waits for. Returns the nodes (number -> kind, model and
    version), their rows, and the arrows with their tensors' names and types, each once."""
    steps = config.ensemble_scheduling.step
    answer, unwritten = len(steps) + 1, len(steps) + 2
    nodes = {0: (NodeKind.REQUEST, "", ""), answer: (NodeKind.ANSWER, "", "")}
    sources = {tensor.name: (0, _typed(config, tensor)) for tensor in config.input}
    for number, step in enumerate(steps, 1):
        nodes[number] = (NodeKind.STEP, step.model_name, "" if step.model_version < 0 else str(step.model_version))
        member = members.get(member_of(step), ModelConfig())
        types = {output.name: _typed(member, output) for output in member.output}
        for output, tensor in sorted(step.output_map.items()):
            sources[tensor] = (number, types.get(output, ""))
    arrows: dict[_Arrow, dict[str, None]] = {}
    reads = [(tensor, number) for number, step in enumerate(steps, 1) for _, tensor in sorted(step.input_map.items())]
    for tensor, end in (*reads, *((output.name, answer) for output in config.output)):
        start, typed = sources.get(tensor, (unwritten, ""))
        arrows.setdefault((start, end), {})[f"{tensor} {typed}".rstrip()] = None
        if start == unwritten:
            nodes[unwritten] = (NodeKind.UNWRITTEN, "", "")
    row_of = dict.fromkeys(nodes, 0)
    # As many rounds as nodes suffice; a bound also ends the loop for steps that wait for each other.
    for _ in nodes:
        for start, end in arrows:
            row_of[end] = max(row_of[end], min(row_of[start] + 1, answer))
    row_of[answer] = max(row for number, row in row_of.items() if number != answer) + 1
    rows = [[number for number in sorted(nodes) if row_of[number] == row] for row in range(row_of[answer] + 1)]
    return nodes, [row for row in rows if row], arrows


def _typed(config: ModelConfig, tensor: ModelInput | ModelOutput) -> str:
    if not tensor.data_type:
        return ""
    dims = chain([-1] if config.max_batch_size > 0 else [], tensor.dims)
    return f"{datatype_of_number(tensor.data_type).value} [{','.join(map(str, dims))}]"


def _cut(text: str, width: float) -> str:
    most = max(4, int(width / _LETTER))
    return text if len(text) <= most else f"{text[: most - 1]}…"


class _Layout:
    def __init__(
        self,
        nodes: Mapping[int, tuple[NodeKind, str, str]],
        rows: Sequence[Sequence[int]],
        arrows: Mapping[_Arrow, Mapping[str, None]],
        available: float,
    ) -> None:
        """`nodes`, `rows`, `arrows`: as `_plan` returns them. `available`: the width."""
        self._nodes, self._arrows = nodes, arrows
        self._row_count = len(rows)
        self._row_of = {node: index for index, row in enumerate(rows) for node in row}
        most = max(map(len, rows))
        # The width for arrows that pass rows, at the right edge.
        lane = 26.0 if any(map(self._passes_rows, arrows)) else 0.0
        gap = 16.0  # Between boxes of a row.
        # Texts on arrows that are longer than the boxes take 180 pixels beside them.
        width = min(available, most * (_MOST_WIDTH + gap) + 180.0)
        self._box_width = max(_LEAST_WIDTH, min(_MOST_WIDTH, (width - lane - gap * (most - 1)) / most))
        self._width = max(width, most * (self._box_width + gap) - gap + lane)
        self._boxes: dict[int, GraphBox] = {}
        y = 1.0
        for index, row in enumerate(rows):
            if index:
                y += 2 * _SPACE + self._lines(index) * _LINE
            left = (self._width - lane - len(row) * self._box_width - (len(row) - 1) * gap) / 2
            for place, node in enumerate(row):
                self._boxes[node] = self._box(node, left + place * (self._box_width + gap), y)
            y += max(self._boxes[node].height for node in row)
        self._height = y + 1

    def drawing(self) -> EnsembleGraphResponse:
        boxes = [self._boxes[node] for node in sorted(self._boxes)]
        found = EnsembleGraphResponse(width=self._width, height=self._height, boxes=boxes)
        for row in range(self._row_count):
            # Each text has a separate line, so that none covers another.
            line = 0
            for arrow in self._arrivals(row):
                path, middle = self._path(arrow)
                found.arrows.append(path)
                top = self._boxes[arrow[1]].y - _SPACE - self._lines(row) * _LINE
                for tensor in self._arrows[arrow]:
                    line += 1
                    text = _cut(tensor, self._width - 20)
                    half = len(text) * _LETTER / 2
                    x = max(half, min(middle, self._width - half))
                    found.labels.add(x=x, y=top + line * _LINE - 4, text=text, title=tensor)
        return found

    def _arrivals(self, row: int) -> Iterable[_Arrow]:
        return [arrow for arrow in self._arrows if self._row_of[arrow[1]] == row]

    def _lines(self, row: int) -> int:
        return sum(len(self._arrows[arrow]) for arrow in self._arrivals(row))

    def _passes_rows(self, arrow: _Arrow) -> bool:
        start, end = arrow
        return self._row_of[end] - self._row_of[start] != 1

    def _comes_from(self, arrow: _Arrow) -> tuple[bool, float]:
        return self._passes_rows(arrow), self._boxes[arrow[0]].x

    def _box(self, node: int, x: float, y: float) -> GraphBox:
        kind, model, version = self._nodes[node]
        # Room for a name, a line about the last minute, and a bar.
        height, margin, title = 58.0, 28, f"{model} version {version}" if version else model
        if kind is not NodeKind.STEP:
            height, margin, title = 30.0, 16, kind
        width = self._box_width
        text = _cut(title, width - margin)
        return GraphBox(
            kind=kind, x=x, y=y, width=width, height=height, text=text, title=title, model=model, version=version
        )

    def _path(self, arrow: _Arrow) -> tuple[str, float]:
        """Return the path and the x of its texts' middle."""
        start, end = self._boxes[arrow[0]], self._boxes[arrow[1]]
        others = [other for other in self._arrows if other[1] == arrow[1]]
        # In the order of their arrival, so that they do not cross: those that pass rows arrive from the right.
        arrivals = sorted(others, key=self._comes_from)
        x1, y1, y2 = start.x + start.width / 2, start.y + start.height, end.y
        x2 = end.x + end.width * (arrivals.index(arrow) + 1) / (len(arrivals) + 1)
        if self._passes_rows(arrow):
            side = self._width - 8
            bends = (
                f"C{x1:.1f} {y1 + 30:.1f} {side:.1f} {y1:.1f} {side:.1f} {y1 + 44:.1f}V{y2 - 44:.1f}"
                f"C{side:.1f} {y2 - 4:.1f} {x2:.1f} {y2 - 40:.1f}"
            )
            return f"M{x1:.1f} {y1:.1f}{bends} {x2:.1f} {y2:.1f}", (x2 + side) / 2
        middle = (y1 + y2) / 2
        return f"M{x1:.1f} {y1:.1f}C{x1:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {y2:.1f}", (x1 + x2) / 2
