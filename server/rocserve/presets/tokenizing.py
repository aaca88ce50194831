"""Turns texts into an encoder's inputs, as a Python model: token ids, padded to the longest text of a request, with the
mask, types and positions that the encoder takes. config.pbtxt names the outputs: `ids_output`, `mask_output`,
`types_output`, `positions_output`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from rocserve.core.errors import invalid_argument
from rocserve.core.extras import install_command
from rocserve.presets.parameters import parameters_of

Array = np.ndarray[Any, Any]

_FILE = "tokenizer.json"


class TritonPythonModel:
    READS_INPUTS_IN_PLACE = True

    def initialize(self, args: dict[str, str]) -> None:
        """Raises ServeError if the library is missing, or if tokenizer.json is damaged or another encoder's."""
        parameters, config = parameters_of(args), json.loads(args["model_config"])
        datatypes = {one["name"]: pb_utils.triton_string_to_numpy(one["data_type"]) for one in config["output"]}
        self._roles = {
            role: (name, datatypes[name])
            for role in ("ids", "mask", "types", "positions")
            if (name := parameters.get(f"{role}_output"))
        }
        self._has_places = "OFFSETS" in datatypes
        self._tokenizer = _open(Path(args["model_repository"]) / args["model_version"] / _FILE)
        limit = parameters.get("max_tokens")
        self._limit = int(limit) if limit else (self._tokenizer.truncation or {}).get("max_length")
        self._truncate(is_pair=any(one["name"] == "QUERY" for one in config["input"]))
        self._padding = _padding(self._tokenizer, parameters.get("padding"))
        self._tokenizer.no_padding()
        highest = max(self._tokenizer.get_vocab().values(), default=0)
        self._vocabulary = _vocabulary(self._tokenizer, highest + 1, parameters.get("vocabulary"))
        self._may_exceed = highest >= self._vocabulary
        self._length = int(parameters.get("length", 0))
        self._begins, self._ends = _added(self._tokenizer)
        self._prompt = parameters.get("prompt", "")
        self._lowers = parameters.get("lower_case") == "true"
        # Without the tokens' places in the text the library takes less time.
        self._encode = self._tokenizer.encode_batch if self._has_places else self._tokenizer.encode_batch_fast

    def _truncate(self, is_pair: bool) -> None:
        """Raises ServeError if there is no room left for a text."""
        tokenizer = self._tokenizer
        direction = (tokenizer.truncation or {}).get("direction", "right")
        tokenizer.no_truncation()
        if self._limit is None:
            return
        added = tokenizer.num_special_tokens_to_add(is_pair)
        if self._limit <= added:
            raise invalid_argument(
                f"max_tokens is {self._limit}, but the tokenizer itself adds {added} tokens; expected more"
            )
        tokenizer.enable_truncation(self._limit, strategy="longest_first", direction=direction)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            outputs = self._tensors(request)
        except ValueError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])

    def _tensors(self, request: Any) -> dict[str, Array]:
        """Raises ValueError if the texts are invalid."""
        texts, ids = (pb_utils.get_input_tensor_by_name(request, name) for name in ("TEXT", "IDS"))
        if (texts is None) == (ids is None):
            got = "neither" if texts is None else "both"
            raise ValueError(f"expected TEXT, or IDS (the ids of its tokens) in its place; got {got}")
        if ids is not None:
            rows = self._given(ids.as_numpy())
            return self._inputs(rows, None, [rows.shape[1]] * len(rows))
        first = self._texts("TEXT", texts)
        query = pb_utils.get_input_tensor_by_name(request, "QUERY")
        pairs: list[Any] = first
        if query is not None:
            pairs = list(zip(self._texts("QUERY", query), first, strict=True))
        encodings = self._encode(pairs)
        counts = [*map(len, encodings)]
        for row, count in enumerate(counts):
            if not count:
                raise ValueError(f"row {row} of TEXT has no token; expected a text")
        width = self._length or max(counts)
        rows = _filled(list(map(attrgetter("ids"), encodings)), counts, width, self._padding)
        types = None
        if "types" in self._roles:
            types = _filled(list(map(attrgetter("type_ids"), encodings)), counts, width, 0)
        if self._may_exceed:
            self._check_ids("TEXT", rows)
        outputs = self._inputs(rows, types, counts)
        if self._has_places:
            outputs |= _places(encodings, width)
        return outputs

    def _texts(self, name: str, tensor: Any) -> list[str]:
        texts = []
        for row, value in enumerate(tensor.as_numpy().ravel().tolist()):
            try:
                text = value.decode()
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"row {row} of {name} is not UTF-8 text: {error.reason} at byte {error.start}"
                ) from None
            if self._prompt:
                text = self._prompt + text
            texts.append(text.lower() if self._lowers else text)
        return texts

    def _given(self, rows: Array) -> Array:
        """Return the ids of a client, one row for each text, as the encoder takes them."""
        count = rows.shape[1]
        most = self._length or self._limit
        if not count or (most is not None and count > most):
            expected = "at least 1" if most is None else f"1 to {most}"
            raise ValueError(f"IDS has {count} tokens for each text; expected {expected}")
        self._check_ids("IDS", rows)
        for row in rows.tolist():
            if row[: len(self._begins)] != self._begins or row[len(row) - len(self._ends) :] != self._ends:
                raise ValueError(
                    f"IDS: expected ids that begin with {self._begins} and end with {self._ends}, the tokens that this"
                    f" model's tokenizer adds to a text, got {_shortened(row)}; ids of another tokenizer, such as those"
                    " that clients of OpenAI make, mean other texts: send TEXT (LangChain's OpenAIEmbeddings does with"
                    " check_embedding_ctx_length=False)"
                )
        return rows

    def _check_ids(self, name: str, rows: Array) -> None:
        least, highest = int(rows.min()), int(rows.max())
        if least < 0 or highest >= self._vocabulary:
            raise ValueError(
                f"{name} has the token id {least if least < 0 else highest}, but the encoder knows 0 to"
                f" {self._vocabulary - 1}; expected ids from this model's tokenizer"
            )

    def _inputs(self, rows: Array, types: Array | None, counts: Sequence[int]) -> dict[str, Array]:
        """Return the outputs. `types`: None = all are 0."""
        width = self._length or rows.shape[1]
        if rows.shape[1] < width:
            padded = np.full((len(rows), width), self._padding, np.int64)
            padded[:, : rows.shape[1]] = rows
            rows = padded
        numbers = np.array(counts, np.int32)[:, np.newaxis]
        outputs: dict[str, Array] = {}
        for role, (name, datatype) in self._roles.items():
            if role == "ids":
                outputs[name] = rows.astype(datatype, copy=False)
            elif role == "types":
                outputs[name] = np.zeros(rows.shape, datatype) if types is None else types.astype(datatype, copy=False)
            elif role == "positions":
                outputs[name] = np.broadcast_to(np.arange(width, dtype=datatype), rows.shape)
            elif min(counts) == width:
                outputs[name] = np.ones(rows.shape, datatype)
            else:
                outputs[name] = (np.arange(width) < numbers).astype(datatype)
        outputs["TOKEN_COUNT"] = numbers
        return outputs


def _filled(values: Sequence[Sequence[int]], counts: Sequence[int], width: int, padding: int) -> Array:
    """Return one row for each text, filled up with `padding`."""
    if min(counts) == width:
        return np.array(values, np.int64)
    rows = np.full((len(counts), width), padding, np.int64)
    for row, count, own in zip(rows, counts, values, strict=True):
        row[:count] = own
    return rows


def _open(path: Path) -> Any:
    """Return the tokenizer. Raises ServeError if it cannot be read."""
    # An encoder takes far longer than a tokenizer (a text of 40 tokens takes 0.1 ms), and its threads need the cores.
    # The library reads both variables once.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        import tokenizers
    except ImportError as error:
        raise invalid_argument(
            f"text needs the package tokenizers, which cannot be imported ({error}); run: {install_command('text')}"
        ).passing() from None
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        raise invalid_argument(
            f"{_FILE} cannot be read by tokenizers {tokenizers.__version__}: {error}; save it again with"
            " transformers (AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)), or upgrade the package"
        ) from None


def _added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the ids that the tokenizer puts before and after each text."""
    encoding = tokenizer.encode("a")
    own = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
    if not own:
        return [], []
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def _shortened(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 8 else f"[{ids[0]}, {ids[1]}, ..., {ids[-1]}]"


def _padding(tokenizer: Any, written: str | None) -> int:
    if written is not None:
        return int(written)
    if tokenizer.padding is not None:
        return int(tokenizer.padding["pad_id"])
    # No file names the padding token. The mask hides it.
    known = (tokenizer.token_to_id(token) for token in ("[PAD]", "<pad>", "<|endoftext|>"))
    return next((number for number in known if number is not None), 0)


def _vocabulary(tokenizer: Any, tokens: int, written: str | None) -> int:
    """Return the number of the encoder's ids: from its file, else that of the tokenizer (`tokens`). Raises
    ServeError if the tokenizer has more. Added tokens do not count: some files have unused ones."""
    if written is None:
        return tokens
    own = max(tokenizer.get_vocab(with_added_tokens=False).values(), default=0) + 1
    if own > int(written):
        raise invalid_argument(
            f"{_FILE} has {own} tokens, but the encoder knows {written} (config.json's vocab_size): it is the tokenizer"
            " of another model; take the files of one model"
        )
    return int(written)


def _places(encodings: Sequence[Any], width: int) -> dict[str, Array]:
    shape = (len(encodings), width)
    tokens, offsets = np.full(shape, b"", object), np.zeros((*shape, 2), np.int32)
    special = np.ones(shape, bool)
    for row, encoding in enumerate(encodings):
        count = len(encoding.ids)
        tokens[row, :count] = [token.encode() for token in encoding.tokens]
        offsets[row, :count] = encoding.offsets
        special[row, :count] = encoding.special_tokens_mask
    return {"TOKENS": tokens, "OFFSETS": offsets, "SPECIAL": special}
