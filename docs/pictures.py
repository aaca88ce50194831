"""Draws the pictures of the pages into docs/pictures: each as SVG, for a light and for a dark page.

Run: make pictures, or .venv/bin/python docs/pictures.py [FOLDER]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

FOLDER = Path(__file__).parent / "pictures"
FONT = "-apple-system, 'Segoe UI', 'Noto Sans', 'DejaVu Sans', Helvetica, Arial, sans-serif"
RADIUS = 8
LINE = 18
"""From one line of a box's text to the next."""


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours, each readable on its page: text has a contrast of at least 4.5 to what is behind it."""

    text: str
    quiet: str
    border: str
    box: str
    inner: str
    accent: str
    accent_box: str
    on_accent: str
    good: str
    good_box: str


THEMES: Mapping[str, Palette] = {
    "light": Palette(
        "#1f2328", "#59636e", "#8c959f", "#f6f8fa", "#ffffff", "#bc4c00", "#fff1e5", "#ffffff", "#1a7f37", "#dafbe1"
    ),
    "dark": Palette(
        "#e6edf3", "#9da7b3", "#6e7681", "#161b22", "#21262d", "#ffa657", "#3d2410", "#0d1117", "#56d364", "#12321c"
    ),
}


class Drawing:
    """Collects the elements of one picture."""

    def __init__(self, width: int, height: int, title: str, colours: Palette) -> None:
        self.colours = colours
        self._size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        self._title = title
        self._elements: list[str] = []

    def svg(self) -> str:
        """Return the file's text."""
        heads = (("line", self.colours.border), ("accent", self.colours.accent), ("good", self.colours.good))
        markers = "".join(
            f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" fill="{colour}"/>'
            "</marker>"
            for name, colour in heads
        )
        body = "\n".join(self._elements)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" {self._size} role="img" aria-label={quoteattr(self._title)} '
            f'font-family="{FONT}" font-size="14">\n<title>{escape(self._title)}</title>\n'
            f"<defs>{markers}</defs>\n{body}\n</svg>\n"
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        *,
        colour: str = "",
        size: int = 14,
        anchor: str = "middle",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._elements.append(
            f'<text x="{x:g}" y="{y:g}" fill="{colour or self.colours.text}" font-size="{size}" '
            f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        title: str,
        lines: Sequence[str] = (),
        *,
        kind: str = "box",
    ) -> None:
        """A box with its text in the middle. `kind`: box, inner, accent or good; or frame, with the text on top."""
        colours = self.colours
        fill, stroke = {
            "box": (colours.box, colours.border),
            "frame": (colours.box, colours.border),
            "inner": (colours.inner, colours.border),
            "accent": (colours.accent_box, colours.accent),
            "good": (colours.good_box, colours.good),
        }[kind]
        self._elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{RADIUS}" '
            f'fill="{fill}" stroke="{stroke}"/>'
        )
        middle = x + width / 2
        first = y + 25 if kind == "frame" else y + height / 2 + 5 - LINE * len(lines) / 2
        self.text(middle, first, title, bold=True)
        for number, line in enumerate(lines, 1):
            self.text(middle, first + LINE * number, line, colour=colours.quiet, size=13)

    def route(self, *points: tuple[float, float], kind: str = "line", both: bool = False) -> None:
        """An arrow through the points, with round corners. `kind`: line, accent or good."""
        colours = self.colours
        colour = {"line": colours.border, "accent": colours.accent, "good": colours.good}[kind]
        start = f' marker-start="url(#{kind})"' if both else ""
        path = f"M{points[0][0]:g} {points[0][1]:g}"
        for before, corner, after in zip(points, points[1:], points[2:], strict=False):
            near, far = _towards(corner, before), _towards(corner, after)
            path += f"L{near[0]:g} {near[1]:g}Q{corner[0]:g} {corner[1]:g} {far[0]:g} {far[1]:g}"
        path += f"L{points[-1][0]:g} {points[-1][1]:g}"
        self._elements.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.5"{start} marker-end="url(#{kind})"/>'
        )

    def label(self, x: float, y: float, words: str, anchor: str = "middle") -> None:
        """What an arrow means."""
        self.text(x, y, words, colour=self.colours.quiet, size=13, anchor=anchor)

    def number(self, x: float, y: float, number: int) -> None:
        """A step's number, in a disc."""
        self._elements.append(f'<circle cx="{x:g}" cy="{y:g}" r="11" fill="{self.colours.accent}"/>')
        self.text(x, y + 4.5, str(number), colour=self.colours.on_accent, size=13, bold=True)


def _towards(corner: tuple[float, float], other: tuple[float, float]) -> tuple[float, float]:
    """The point at the corner's radius from it, on the straight line to the other."""
    across, down = other[0] - corner[0], other[1] - corner[1]
    share = RADIUS / (abs(across) + abs(down))
    return corner[0] + across * share, corner[1] + down * share


def processes(colours: Palette) -> Drawing:
    """The server's processes, and an image's way through an ensemble."""
    title = "Clients, the server process, the model repository and the worker processes; an image passes an ensemble"
    drawing = Drawing(960, 452, title, colours)
    drawing.box(310, 12, 300, 62, "Model repository", ["a folder, S3, GCS, Azure, Hugging Face"])
    drawing.route((460, 74), (460, 116))
    drawing.label(470, 100, "scan, load, check, swap", "start")

    clients = ("tritonclient", "perf_analyzer", "KServe", "OpenAI's clients", "curl, a browser")
    drawing.box(20, 148, 170, 200, "Clients", clients)
    drawing.box(330, 118, 260, 262, "Server process", ["runs no engine"], kind="frame")
    drawing.box(350, 178, 220, 46, "gRPC, HTTP, metrics", kind="inner")
    drawing.box(350, 236, 220, 64, "ensemble detect_shapes", ["a queue for each step"], kind="accent")
    drawing.box(350, 312, 220, 46, "load check, index, log", kind="inner")

    drawing.text(820, 106, "Worker processes", bold=True)
    drawing.box(700, 122, 240, 72, "detect_shapes_preprocess", ["rocAL, or its CPU engine"], kind="accent")
    drawing.box(700, 214, 240, 72, "detect_shapes_network", ["MIGraphX, or ONNX Runtime"], kind="accent")
    drawing.box(700, 306, 240, 72, "detect_shapes_postprocess", ["Python"], kind="accent")

    drawing.route((190, 202), (348, 202), kind="accent")
    drawing.route((350, 268), (192, 268), kind="accent")
    drawing.number(260, 202, 1)
    drawing.number(260, 268, 5)
    drawing.route((572, 250), (635, 250), (635, 158), (698, 158), kind="accent", both=True)
    drawing.route((572, 268), (698, 268), kind="accent", both=True)
    drawing.route((572, 286), (635, 286), (635, 342), (698, 342), kind="accent", both=True)
    drawing.number(635, 205, 2)
    drawing.number(667, 268, 3)
    drawing.number(635, 316, 4)
    drawing.label(645, 364, "shared")
    drawing.label(645, 380, "memory")

    steps = ("a JPEG arrives", "decode and scale", "run the network", "find the boxes", "the boxes go back")
    for number, step in enumerate(steps, 1):
        place = 40 + 186 * (number - 1)
        drawing.number(place, 425, number)
        drawing.text(place + 20, 430, step, anchor="start", colour=colours.quiet)
    return drawing


def version(colours: Palette) -> Drawing:
    """The states of a version."""
    title = "The states of a version: REGISTERED, LOADING, CHECKING, READY, DRAINING, GONE"
    drawing = Drawing(910, 304, title, colours)
    drawing.box(20, 70, 150, 64, "REGISTERED", ["not in memory"])
    drawing.box(250, 70, 150, 64, "LOADING", ["a worker loads it"])
    drawing.box(490, 70, 150, 64, "CHECKING", ["answers are tried"])
    drawing.box(740, 70, 150, 64, "READY", ["answers requests"], kind="good")
    drawing.box(490, 220, 150, 64, "DRAINING", ["ends its requests"])
    drawing.box(20, 220, 150, 64, "GONE", ["nothing is left"])

    drawing.route((170, 102), (248, 102))
    drawing.label(209, 94, "load")
    drawing.route((402, 102), (488, 102), both=True)
    drawing.route((640, 102), (738, 102), kind="good")
    drawing.label(689, 94, "passed")
    drawing.route((325, 70), (325, 38), (815, 38), (815, 68), kind="good")
    drawing.label(570, 30, "nothing to check")
    drawing.route((325, 134), (325, 166), (130, 166), (130, 136))
    drawing.route((565, 134), (565, 166), (130, 166), (130, 136))
    drawing.label(445, 159, "failed, or its files changed")
    drawing.route((815, 134), (815, 252), (642, 252))
    drawing.label(766, 272, "replaced, removed,")
    drawing.label(766, 290, "or unloaded for room")
    drawing.route((565, 220), (565, 198), (95, 198), (95, 136))
    drawing.label(330, 191, "unloaded for room: a request loads it again")
    drawing.route((490, 252), (172, 252))
    drawing.label(331, 244, "replaced or removed")
    drawing.route((50, 134), (50, 218))
    return drawing


def request(colours: Palette) -> Drawing:
    """The states of a request."""
    drawing = Drawing(910, 250, "The states of a request: RECEIVED, QUEUED, RUNNING, ANSWERED, ENDED", colours)
    drawing.box(20, 76, 130, 64, "RECEIVED", ["is validated"])
    drawing.box(200, 76, 130, 64, "QUEUED", ["waits for a batch"])
    drawing.box(380, 76, 150, 64, "RUNNING", ["an instance has it"])
    drawing.box(580, 76, 140, 64, "ANSWERED", ["answer is known"])
    drawing.box(770, 76, 120, 64, "ENDED", ["the client has it"], kind="good")
    for start, end in ((150, 198), (330, 378), (530, 578), (720, 768)):
        drawing.route((start, 108), (end, 108), kind="good" if end == 768 else "line")
    drawing.route((85, 76), (85, 42), (455, 42), (455, 74))
    drawing.label(270, 34, "an ensemble: its steps run")
    drawing.route((430, 140), (430, 170), (300, 170), (300, 142))
    drawing.label(365, 163, "batch not begun")
    drawing.route((230, 140), (230, 202), (630, 202), (630, 142))
    drawing.label(430, 195, "expired, cancelled or dropped")
    drawing.route((85, 140), (85, 234), (680, 234), (680, 142))
    drawing.label(382, 227, "refused, or answered from the cache")
    return drawing


PICTURES: Mapping[str, Callable[[Palette], Drawing]] = {"processes": processes, "version": version, "request": request}


def files() -> Iterator[tuple[str, str]]:
    """Return each file's name and text."""
    for name, draw in PICTURES.items():
        for theme, colours in THEMES.items():
            yield f"{name}-{theme}.svg", draw(colours).svg()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files():
        (folder / name).write_text(text)
        print(folder / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
