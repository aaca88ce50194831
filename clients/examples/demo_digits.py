"""Shows the demo's first part: digits that no training has seen, with tritonclient's own gRPC client."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from contact_sheet import Tile, write_contact_sheet
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

MODEL = "digits"
ENCODED, PROBABILITIES, LABEL = "ENCODED", "PROBABILITIES", "LABEL"

REQUIRED_ACCURACY = 0.97
REQUESTS_AT_ONCE = 8
ROWS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Answer:
    image: Path
    expected: str
    label: str
    """The ensemble's LABEL output."""
    best_class: str
    """The label of the highest probability, by the classification extension."""
    confidence: float

    @property
    def right(self) -> bool:
        return self.label == self.best_class == self.expected


def show_digits(address: str, images: Sequence[Path], output: Path, console: Console) -> bool:
    """Classify the images and write the contact sheet. Returns whether enough labels are right."""
    answers, rate = ask_all(address, images)
    console.print(answers_table(answers))
    right = sum(answer.right for answer in answers)
    summary = f"{right} of {len(answers)} right: {right / len(answers):.2%}"
    sheet = output / "demo-contact-sheet.png"
    tiles = [Tile(answer.image, f"{answer.label} {answer.confidence:.0%}", answer.right) for answer in answers]
    write_contact_sheet(tiles, f"rocserve, {summary}", sheet)
    console.print(f"{summary}; {rate:,.0f} images/s with {REQUESTS_AT_ONCE} requests at once", soft_wrap=True)
    console.print(f"contact sheet: {sheet}", soft_wrap=True)
    if right >= REQUIRED_ACCURACY * len(answers):
        return True
    console.print(f"the accuracy is below the {REQUIRED_ACCURACY:.0%} that it should have", style="bold red")
    return False


def ask(client: triton.InferenceServerClient, image: Path) -> Answer:
    """Return the server's answer for one image, whose file is named <index>_<label>.jpg."""
    encoded = triton.InferInput(ENCODED, [1, 1], "BYTES")
    encoded.set_data_from_numpy(np.array([[image.read_bytes()]], dtype=object))
    outputs = [triton.InferRequestedOutput(PROBABILITIES, class_count=1), triton.InferRequestedOutput(LABEL)]
    result = client.infer(MODEL, [encoded], outputs=outputs)
    score, _, best_class = result.as_numpy(PROBABILITIES).item().decode().split(":")
    label = result.as_numpy(LABEL).item().decode()
    return Answer(image, image.stem.rpartition("_")[2], label, best_class, float(score))


def ask_all(address: str, images: Sequence[Path]) -> tuple[list[Answer], float]:
    """Return the answers in the order of the images, and the images answered per second."""
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
    """Return a table of the first answers and all wrong ones."""
    shown = [answer for place, answer in enumerate(answers) if place < ROWS_SHOWN or not answer.right]
    table = Table(
        "image", "label", Column("confidence", justify="right"), "", title=f"{len(shown)} of {len(answers)} images"
    )
    for answer in shown:
        confidence = f"{answer.confidence:.1%}"
        verdict = Text("right", "green") if answer.right else Text(f"wrong, it is {answer.expected}", "bold red")
        table.add_row(answer.image.name, answer.label, confidence, verdict)
    return table
