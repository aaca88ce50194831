"""Finds the models of text that /v1 serves, by their signatures: generated models, and others of the same form."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rocserve import presets
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, unavailable
from rocserve.core.model_config import ModelConfig, TensorConfig
from rocserve.frontends.http.inference import HttpParts
from rocserve.frontends.http.misdirected import tensors_text
from rocserve.frontends.http.openai.errors import FieldFault

TEXT, QUERY, IDS = "TEXT", "QUERY", "IDS"
TOKEN_COUNT = "TOKEN_COUNT"
_ASKED_TOGETHER = 64
"""Configurations that are asked for at once: each is a message to the server if this is a front end process."""


class TextOutput(enum.Enum):
    """The kind of a text model's output."""

    EMBEDDING = "EMBEDDING"
    SCORE = "SCORE"


@dataclass(frozen=True, slots=True)
class TextModel:
    """A model that OpenAI's API can serve."""

    config: ModelConfig
    output: TextOutput
    takes_ids: bool
    """The model takes token ids in place of a text."""
    counts_tokens: bool

    @property
    def width(self) -> int:
        """Return the length of the output for one text; -1 = it varies."""
        return next(entry.dims[0] for entry in self.config.outputs if entry.name == self.output.value)


def text_model(config: ModelConfig) -> TextModel | None:
    """Return the model of text with this configuration; None if it has no such signature."""
    if config.decoupled:
        return None
    inputs = {entry.name: entry for entry in config.inputs}
    outputs = {entry.name: entry for entry in config.outputs}
    required = {entry.name for entry in config.inputs if not entry.optional}
    for output, names in ((TextOutput.EMBEDDING, {TEXT}), (TextOutput.SCORE, {QUERY, TEXT})):
        found = outputs.get(output.value)
        if found is None or not required <= names or not names <= set(inputs):
            continue
        if not all(_is(inputs[name], DataType.BYTES) and inputs[name].dims == (1,) for name in names):
            continue
        if not _is(found, DataType.FP32) or len(found.dims) != 1 or (output is TextOutput.SCORE and found.dims != (1,)):
            continue
        ids, counts = inputs.get(IDS), outputs.get(TOKEN_COUNT)
        takes_ids = ids is not None and _is(ids, DataType.INT64) and ids.dims == (-1,) and TEXT not in required
        return TextModel(config, output, takes_ids, counts is not None and _is(counts, DataType.INT32))
    return None


def _is(entry: TensorConfig, datatype: DataType) -> bool:
    return entry.datatype is datatype


@dataclass(eq=False)
class TextModels:
    """Finds ready models, on the event loop."""

    _parts: HttpParts

    def __post_init__(self) -> None:
        self._since = int(time.time())

    async def find(self, name: str, output: TextOutput | None = None) -> TextModel:
        """Return the ready model of text that clients call `name`: the model itself, or the one that was generated for
        it. Raises FieldFault if there is none, or if its output is not `output` (None = any);
        ServeError (UNAVAILABLE) if it is being loaded."""
        config, missing = await self._config(name)
        found = None if config is None else text_model(config)
        if found is None:
            generated, _ = await self._config(presets.ensemble_name(name, presets.TEXT))
            found = None if generated is None else text_model(generated)
        if found is None:
            await self._check_not_loading(name)
            if missing is not None:
                kind = "model_not_found" if missing.code is StatusCode.NOT_FOUND else None
                raise FieldFault("model", missing.text, missing.code, kind)
            assert config is not None
            raise FieldFault("model", _unfit(config, output))
        if output is not None and found.output is not output:
            raise FieldFault("model", _other_output(found, output))
        return found

    async def names(self) -> Sequence[str]:
        """Return the names of all ready models."""
        return sorted({row.name for row in await self._parts.index(ready=True)})

    async def entries(self, names: Sequence[str]) -> Sequence[dict[str, Any]]:
        """Return the models of text among these, as entries of the list of models."""
        found: list[dict[str, Any]] = []
        for begin in range(0, len(names), _ASKED_TOGETHER):
            configs = await asyncio.gather(*map(self._config, names[begin : begin + _ASKED_TOGETHER]))
            models = [text_model(config) for config, _ in configs if config is not None]
            found += [self.entry(model.config.name) for model in models if model is not None]
            await asyncio.sleep(0)
        return found

    def entry(self, name: str) -> dict[str, Any]:
        # The server does not keep when a model was made; clients want a number.
        return {"id": name, "object": "model", "created": self._since, "owned_by": "rocserve"}

    async def _config(self, name: str) -> tuple[ModelConfig | None, ServeError | None]:
        """Return the configuration of the model's highest ready version, or the error that says why there is none."""
        try:
            return await self._parts.config(name, ""), None
        except ServeError as error:
            if error.code not in (StatusCode.NOT_FOUND, StatusCode.INVALID_ARGUMENT):
                raise
            return None, error

    async def _check_not_loading(self, name: str) -> None:
        names = (name, presets.ensemble_name(name, presets.TEXT))
        for row in await self._parts.index():
            if row.name in names and row.state in ("LOADING", "CHECKING"):
                error = unavailable(f"model '{row.name}' is being loaded; ask again in a second")
                error.retry_seconds = 1.0
                raise error


def _unfit(config: ModelConfig, output: TextOutput | None) -> str:
    signatures = {
        TextOutput.EMBEDDING: "input TEXT BYTES [1], output EMBEDDING FP32 [width]",
        TextOutput.SCORE: "inputs QUERY BYTES [1] and TEXT BYTES [1], output SCORE FP32 [1]",
    }
    expected = " or ".join(text for one, text in signatures.items() if output in (None, one))
    return (
        f"model '{config.name}': expected a model of text ({expected}), got inputs {tensors_text(config.inputs)},"
        f" outputs {tensors_text(config.outputs)}; beside a tokenizer.json the parameter `preprocess: text` makes such"
        " a model of an encoder"
    )


def _other_output(model: TextModel, wanted: TextOutput) -> str:
    urls = {TextOutput.EMBEDDING: "/v1/embeddings", TextOutput.SCORE: "/v1/rerank"}
    return (
        f"model '{model.config.name}' gives {model.output.value}, and {urls[wanted]} needs a model with the output"
        f" {wanted.value}; send it to {urls[model.output]}"
    )
