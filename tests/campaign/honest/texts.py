"""A client of a model that turns texts into vectors, while its encoder is swapped."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.load import RETURNS_SOON
from support.text_encoders import SENTENCES, BareEncoder, write_tokenizer

import rocserve_client
from campaign import models
from campaign.honest.client import ANSWER_SECONDS, WrongAnswer
from campaign.truth import Constants

TEXTS = (*SENTENCES, "Cat", "unknown words: zebra!", " ".join(SENTENCES * 3))
MOST_TEXTS = 3
TOLERANCE = 1e-4
"""The batch size and the padding may change a vector's last bits."""


class TextVectors:
    """Sends one to three texts; each vector is what the tokenizer and one of the allowed encoders give alone."""

    def __init__(self, address: str, folder: Path, encoders: Constants) -> None:
        self._client = rocserve_client.Client(address, channel_options=tuple(RETURNS_SOON))
        self._encoders = encoders
        tokenizer = write_tokenizer(folder)
        bare = [BareEncoder(tokenizer, content, models.MOST_TOKENS) for content in models.ENCODERS]
        means = np.array([[encode(text).mean(axis=0) for text in TEXTS] for encode in bare])
        self._expected = means / np.linalg.norm(means, axis=2, keepdims=True)
        """[encoder, text, width]"""

    def ask(self, random: random.Random) -> None:
        chosen = [random.randrange(len(TEXTS)) for _ in range(random.randint(1, MOST_TEXTS))]
        begun = time.monotonic()
        found = self.encoders_of(chosen)
        allowed = self._encoders.allowed(begun, time.monotonic())
        if not found & allowed:
            raise WrongAnswer(f"{models.TEXTS_ENSEMBLE} answered as encoders {found}, expected one of {allowed}")

    def encoders_of(self, chosen: Sequence[int]) -> set[float]:
        """Ask for the vectors of texts, and return the encoders that give them."""
        rows = np.array([[TEXTS[number].encode()] for number in chosen], object)
        vectors = self._client.infer(models.TEXTS_ENSEMBLE, {"TEXT": rows}, timeout=ANSWER_SECONDS)["EMBEDDING"]
        return {
            float(number)
            for number, expected in enumerate(self._expected[:, chosen])
            if vectors.shape == expected.shape and np.allclose(vectors, expected, atol=TOLERANCE, rtol=0)
        }

    def reopen(self) -> None: ...

    def close(self) -> None:
        self._client.close()
