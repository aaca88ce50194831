"""Reads the inputs that a model's folder has for its load check: warm-up samples, and recorded answers (check.npz)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rocserve.backends.base import Batch, ModelSource
from rocserve.backends.warmup import warm_up_samples
from rocserve.core.errors import ServeError
from rocserve.core.load_check import RECORDED_FILE
from rocserve.core.requests import Signature
from rocserve.load_check.recorded import read_recorded
from rocserve.load_check.tensors import Feed


def sample_feeds(model: ModelSource, signature: Signature) -> Sequence[Feed]:
    """Return the samples as batches of rows, as far as they fit the inputs. Unreadable samples are left out: the
    warm-up or the check of the recorded answers fails on them, and reports why."""
    ranks = {spec.name: len(spec.shape) for spec in signature.inputs}
    return [
        feed
        for feed in (*_warm_ups(model), *_recorded(model))
        if feed.keys() >= ranks.keys() and all(ranks[name] == feed[name].ndim for name in ranks)
    ]


def samples_digest(samples: Sequence[Feed]) -> str:
    """Return a digest of the samples, on which a verdict depends; "" = there are none."""
    contents = hashlib.sha256()
    for feed in samples:
        for name, values in sorted(feed.items()):
            contents.update(f"{name} {values.dtype} {values.shape}".encode())
            contents.update(repr(values.tolist()).encode() if values.dtype == object else values.tobytes())
    return contents.hexdigest() if samples else ""


def _warm_ups(model: ModelSource) -> Iterator[Feed]:
    config = replace(model.config, max_batch_size=max(model.config.max_batch_size, 1))
    # Dims that a user writes are without the rows, unless max_batch_size is 0.
    for one in (config, replace(config, max_batch_size=0)):
        try:
            yield from [_arrays(batch) for _, batch in warm_up_samples(one, model.model_folder)]
        except ServeError:
            return


def _recorded(model: ModelSource) -> Iterator[Feed]:
    for folder in (model.version_folder, model.model_folder):
        if (path := folder / RECORDED_FILE).is_file():
            try:
                yield read_recorded(path).inputs
            except ServeError:
                return
            return


def _arrays(batch: Batch) -> Feed:
    return {name: tensor.numpy() for name, tensor in batch.inputs.items()}
