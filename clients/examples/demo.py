"""The whole of rocserve on real input: start the server, classify the held-out digits, show how well, stop.

It asks with tritonclient's own gRPC client: JPEG bytes go in, the label and its probability come out. The exit status
is 0 when at least 97 % of the labels are right.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from contact_sheet import Tile, write_contact_sheet
from demo_server import running_server
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
MODEL = "digits"
ENCODED, PROBABILITIES, LABEL = "ENCODED", "PROBABILITIES", "LABEL"

REQUIRED_ACCURACY = 0.97
REQUESTS_AT_ONCE = 8
ROWS_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Answer:
    image: Path
    expected: str
    label: str
    """What the ensemble's LABEL output says."""
    best_class: str
    """The label of the highest probability, by the classification extension."""
    confidence: float

    @property
    def right(self) -> bool:
        return self.label == self.best_class == self.expected


def ask(client: triton.InferenceServerClient, image: Path) -> Answer:
    """The server's answer for one image, whose file is named <index>_<label>.jpg."""
    encoded = triton.InferInput(ENCODED, [1, 1], "BYTES")
    encoded.set_data_from_numpy(np.array([[image.read_bytes()]], dtype=object))
    outputs = [triton.InferRequestedOutput(PROBABILITIES, class_count=1), triton.InferRequestedOutput(LABEL)]
    result = client.infer(MODEL, [encoded], outputs=outputs)
    score, _, best_class = result.as_numpy(PROBABILITIES).item().decode().split(":")
    label = result.as_numpy(LABEL).item().decode()
    return Answer(image, image.stem.rpartition("_")[2], label, best_class, float(score))


def ask_all(address: str, images: Sequence[Path]) -> tuple[list[Answer], float]:
    """The answers in the order of the images, and the images answered in a second."""
    local = threading.local()

    def ask_from_thread(image: Path) -> Answer:
        if not hasattr(local, "client"):
            local.client = triton.InferenceServerClient(address)
        return ask(local.client, image)

    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as threads:
        started = time.perf_counter()
        answers = list(threads.map(ask_from_thread, images))
        return answers, len(images) / (time.perf_counter() - started)


def answers_table(answers: Sequence[Answer]) -> Table:
    """The first answers, and all wrong ones."""
    shown = [answer for place, answer in enumerate(answers) if place < ROWS_SHOWN or not answer.right]
    table = Table(
        "image", "label", Column("confidence", justify="right"), "", title=f"{len(shown)} of {len(answers)} images"
    )
    for answer in shown:
        confidence = f"{answer.confidence:.1%}"
        verdict = Text("right", "green") if answer.right else Text(f"wrong, it is {answer.expected}", "bold red")
        table.add_row(answer.image.name, answer.label, confidence, verdict)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description="Serve the sample repository and classify its held-out images.")
    parser.add_argument("--model-repository", type=Path, default=ROOT / "model_repository")
    parser.add_argument("--images", type=Path, default=ROOT / "tests" / "data" / "digits", help="a folder of JPEGs")
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="the folder for the sheet and the log")
    options = parser.parse_args()
    console = Console()
    images = sorted(options.images.glob("*.jpg"))
    if not images:
        print(f"there are no JPEGs in {options.images}", file=sys.stderr)
        return 1

    with running_server(options.model_repository, MODEL, options.output / "demo-server.log") as address:
        console.print(f"rocserve serves '{MODEL}' at {address}")
        answers, rate = ask_all(address, images)

    console.print(answers_table(answers))
    right = sum(answer.right for answer in answers)
    summary = f"{right} of {len(answers)} right: {right / len(answers):.2%}"
    sheet = options.output / "demo-contact-sheet.png"
    tiles = [Tile(answer.image, f"{answer.label} {answer.confidence:.0%}", answer.right) for answer in answers]
    write_contact_sheet(tiles, f"rocserve, {summary}", sheet)
    console.print(f"{summary}; {rate:,.0f} images/s with {REQUESTS_AT_ONCE} requests at once", soft_wrap=True)
    console.print(f"contact sheet: {sheet}", soft_wrap=True)
    if right < REQUIRED_ACCURACY * len(answers):
        print(f"the accuracy is below the {REQUIRED_ACCURACY:.0%} that it should have", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
