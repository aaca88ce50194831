"""The layouts of batches for engines that are given inputs made by the server (batch_input)."""

from __future__ import annotations

from collections.abc import Sequence

from rocserve.core.model_config import ModelConfig
from rocserve.core.ragged import Shape, made_data, made_shape, ragged_batching
from rocserve.core.tensors import Buffer
from rocserve.scheduling.batch import BatchLayouts, FormedBatch
from rocserve.workers.batch_inputs import InputLayout
from rocserve.workers.channel import Channel
from rocserve.workers.messages import TensorHead


class MadeInputLayouts(BatchLayouts):
    """With the inputs that tell of the shapes of a batch's requests."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self._made = ragged_batching(config).made
        self._blanks = (b"",) * sum(len(entry.target_names) for entry in self._made)

    def of(self, batch: FormedBatch, channel: Channel) -> tuple[InputLayout, Sequence[Sequence[Buffer]]]:
        """See BatchLayouts; what is made for the whole batch stands with its first request."""
        layout, (first, *others) = super().of(batch, channel)
        made: list[Buffer] = []
        for entry in self._made:
            made.extend([made_data(entry, _shapes(batch, entry.source_inputs[0]))] * len(entry.target_names))
        return layout, [[*first, *made], *([*data, *self._blanks] for data in others)]

    def heads(self, batch: FormedBatch) -> tuple[TensorHead, ...]:
        made = tuple(
            TensorHead(name, entry.datatype, made_shape(entry, _shapes(batch, entry.source_inputs[0])))
            for entry in self._made
            for name in entry.target_names
        )
        return (*super().heads(batch), *made)


def batch_layouts(config: ModelConfig) -> BatchLayouts:
    """The layouts of a model's batches."""
    return MadeInputLayouts(config) if config.batch_inputs else BatchLayouts(config)


def _shapes(batch: FormedBatch, source: str) -> list[Shape]:
    """Of an input in each request."""
    return [entry.plan.input_shape(source) for entry in batch.entries]
