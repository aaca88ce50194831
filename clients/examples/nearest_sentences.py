"""Finds the sentences whose meaning is nearest to that of a question. Needs a server with a model of text:

rocserve get minilm --model-repository texts
rocserve serve texts
python clients/examples/nearest_sentences.py "What does my computer need to stay cool?"
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rocserve_client import Client, RocserveError

SENTENCES = Path(__file__).with_name("sentences.txt")
QUESTIONS = (
    "Why does my loaf not rise?",
    "What does my computer need to stay cool?",
    "How do I become rich?",
    "Which animals are sad without company?",
    "What causes the tides?",
)

Array = np.ndarray[Any, Any]


class Neighbour(NamedTuple):
    sentence: str
    nearness: float
    """The cosine of the angle between the vectors: 1 = the same direction, 0 = nothing in common."""


def nearest(question: Array, vectors: Array, sentences: Sequence[str], count: int) -> list[Neighbour]:
    """Return the sentences whose vectors are nearest to the question's, the nearest first."""
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(question)
    nearness = vectors @ question / lengths
    return [Neighbour(sentences[place], float(nearness[place])) for place in np.argsort(-nearness)[:count]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, metavar="QUESTION")
    parser.add_argument("--sentences", type=Path, default=SENTENCES, help="a file, one sentence in each line")
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--url", default="localhost:8001", help="the server's gRPC port")
    parser.add_argument("--count", type=int, default=3, help="sentences for each question")
    arguments = parser.parse_args()
    sentences = [line for line in arguments.sentences.read_text().splitlines() if line.strip()]
    try:
        with Client(arguments.url) as client:
            vectors = client.embed(arguments.model, sentences)
            questions = client.embed(arguments.model, arguments.questions)
    except RocserveError as error:
        raise SystemExit(str(error)) from None
    for question, vector in zip(arguments.questions, questions, strict=True):
        print(question)
        for neighbour in nearest(vector, vectors, sentences, arguments.count):
            print(f"  {neighbour.nearness:5.2f}  {neighbour.sentence}")


if __name__ == "__main__":
    main()
