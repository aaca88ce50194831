"""Swaps and broken drops of a model that `preprocess` makes of an encoder and its tokenizer."""

from __future__ import annotations

import random
import time

from support.repository_index import reason_of
from support.waiting import PATIENCE_SECONDS, wait_until
from tritonclient.utils import InferenceServerException

import rocserve_client
from campaign import models
from campaign.action import Kind
from campaign.actions.drops import wait_until_well
from campaign.honest.texts import TextVectors
from campaign.stage import Stage


def encoder(stage: Stage, random: random.Random) -> None:
    """Rename the file of the other encoder over the served one."""
    with stage.locks[models.TEXTS]:
        file = stage.copied / models.TEXTS / "1" / "model.onnx"
        now = models.ENCODERS.index(file.read_bytes())
        new = random.choice([number for number in range(len(models.ENCODERS)) if number != now])
        stage.encoders.offer(new)
        draft = file.with_name("model.onnx.tmp")
        draft.write_bytes(models.ENCODERS[new])
        draft.rename(file)
        wait_until_encoded(stage, new)
        stage.encoders.settle(new)


def wait_until_encoded(stage: Stage, number: int) -> None:
    asker = TextVectors(stage.poll.address, stage.folder, stage.encoders)
    end = time.monotonic() + PATIENCE_SECONDS
    found: object = None
    try:
        while found != {number}:
            assert time.monotonic() < end, f"{models.TEXTS} is encoder {found} and not {number} after the swap"
            try:
                found = asker.encoders_of([0])
            except (InferenceServerException, rocserve_client.RocserveError) as error:
                found = error  # A worker may have been killed meanwhile.
            time.sleep(0.02)
    finally:
        asker.close()


def tokenizer(stage: Stage, random: random.Random) -> None:
    """Cut the tokenizer's file, and restore it: the vectors stay right."""
    with stage.locks[models.TEXTS]:
        file = stage.copied / models.TEXTS / "tokenizer.json"
        content = file.read_bytes()
        file.write_bytes(content[: random.randrange(1, len(content) - 20)])
        try:
            wait_until(lambda: reason_of(stage.poll, models.TOKENIZER), "the reason of a cut tokenizer")
        finally:
            file.write_bytes(content)
        for model in (models.TEXTS, models.TOKENIZER, models.TEXTS_ENSEMBLE):
            wait_until_well(stage, model)


def rewritten(stage: Stage, random: random.Random) -> None:
    """Write the same files again."""
    with stage.locks[models.TEXTS]:
        folder = stage.copied / models.TEXTS
        file = random.choice([path for path in folder.rglob("*") if path.is_file()])
        file.write_bytes(file.read_bytes())
        time.sleep(random.uniform(0.5, 2.0))
        for model in (models.TEXTS, models.TOKENIZER, models.TEXTS_ENSEMBLE):
            wait_until_well(stage, model)


KINDS = (Kind("text.encoder", encoder, 3), Kind("text.tokenizer", tokenizer, 3), Kind("text.rewritten", rewritten, 2))
