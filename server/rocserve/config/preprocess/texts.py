"""Text models: generates the model folders that `preprocess: text` asks for.

An encoder that takes token ids gets three models: `<name>_tokenize`, from texts to its inputs; `<name>_postprocess`,
from its output to a vector, labels or a score; and `<name>_text`, the ensemble of all three.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rocserve.config.class_names import ClassNames, dims_of_one_row, wrong_number
from rocserve.config.model_folder import LABELS_FILENAME
from rocserve.config.preprocess.generated import (
    GeneratedModel,
    Postprocess,
    add_tensor,
    ensemble,
    generated,
    is_number,
    model_file,
    python_model,
    unfit,
)
from rocserve.config.preprocess.text_facts import EMBEDDING, LABEL, SCORE, TOKENS, TextFacts
from rocserve.config.preprocess.text_files import TOKENIZER, TextFiles
from rocserve.core.datatypes import DataType
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.model_config import ModelConfig as PlainConfig
from rocserve.presets import TEXT, TEXT_FACTS, ensemble_name
from rocserve.protocol.model_config_pb2 import ModelConfig

_TEXT, _QUERY, _IDS, _COUNT = "TEXT", "QUERY", "IDS", "TOKEN_COUNT"
_TOKEN_TENSORS = (
    ("TOKENS", DataType.BYTES, (-1,)),
    ("OFFSETS", DataType.INT32, (-1, 2)),
    ("SPECIAL", DataType.BOOL, (-1,)),
)
"""Inputs of the labels of tokens besides the encoder's output: the tokens, their places in the text, and which of them
the tokenizer has added."""
_ROLES = {
    "input_ids": "ids",
    "attention_mask": "mask",
    "input_mask": "mask",
    "token_type_ids": "types",
    "segment_ids": "types",
    "position_ids": "positions",
}
"""The names that exporters give to an encoder's inputs -> their roles."""
_POOLED, _UNPOOLED = ("sentence_embedding",), ("last_hidden_state", "token_embeddings")
"""The outputs that hold a text's vector, and its tokens' vectors, by the names that exporters give them."""


@dataclass(frozen=True, slots=True)
class _Encoder:
    """The inputs of a model that reads tokens."""

    inputs: Mapping[str, InputConfig]
    """Role -> the input."""
    length: int
    """The number of tokens that each text is padded to; -1 = any."""

    @property
    def joins_texts(self) -> bool:
        """Whether texts of different lengths can share a request: only a mask hides the padding."""
        return "mask" in self.inputs or self.length > 0


def text_models(config: PlainConfig, files: TextFiles, found: ClassNames | None) -> tuple[GeneratedModel, ...]:
    """Generate the text models of a complete configuration. `found`: class names from a file; they take precedence over
    those of config.json. Raises ServeError (INVALID_ARGUMENT) if the model is not a text encoder, or if its files or
    parameters do not fit it."""
    facts = TextFacts(config.name, config.parameters, files)
    encoder = _read_encoder(config)
    limit = _limit(facts, encoder)
    post = {EMBEDDING: _embedding, LABEL: _label, TOKENS: _tokens, SCORE: _score}[facts.output](config, facts, found)
    tokenizer = _tokenizer(config, facts, encoder, limit)
    for entry in (*tokenizer.input, *post.message.input):
        # These models see each request by itself, so texts of different lengths may share a batch.
        entry.allow_ragged_batch = -1 in entry.dims
    told = {"output": facts.output, "max_tokens": "as tokenizer.json says" if limit is None else str(limit)}
    told |= {key: entry.string_value for key, entry in post.message.parameters.items()}
    if prompt := facts.prompt:
        told["prompt"] = prompt
    if facts.output == EMBEDDING and (sizes := facts.matryoshka):
        told["matryoshka"] = sizes
    return (
        generated(
            tokenizer,
            {"1/model.py": model_file(config, "rocserve.presets.tokenizing"), f"1/{TOKENIZER}": files.tokenizer},
        ),
        post.model(config),
        generated(_ensemble(config, encoder, tokenizer, post, told), {"1/.gitkeep": ""}),
    )


def _read_encoder(config: PlainConfig) -> _Encoder:
    """Raises ServeError if the model takes anything but tokens."""
    roles: dict[str, InputConfig] = {}
    lengths: set[int] = set()
    expected = (
        "integer inputs [batch, sequence] (INT64 or INT32): token ids, and attention_mask, token_type_ids and"
        " position_ids if the model has them"
    )
    for entry in config.inputs:
        dims = dims_of_one_row(config, entry.dims)
        role = _ROLES.get(entry.name.partition(":")[0].lower(), "")
        if not role and len(config.inputs) == 1:
            role = "ids"
        if entry.optional and not role:
            continue
        is_integer = entry.datatype in (DataType.INT64, DataType.INT32)
        if not role or role in roles or len(dims) != 1 or not is_integer:
            reason = "" if role else f"'{entry.name}' is not a name of these"
            raise unfit(config, expected, reason)
        roles[role] = entry
        lengths.add(dims[0])
    if "ids" not in roles or len(lengths) != 1:
        raise unfit(config, expected, "" if "ids" not in roles else "they differ in the number of tokens")
    return _Encoder(roles, lengths.pop())


def _limit(facts: TextFacts, encoder: _Encoder) -> int | None:
    """Return the most tokens of a text. Raises ServeError if the encoder takes fewer than are written."""
    limit = facts.max_tokens
    if encoder.length < 0 or (limit is not None and limit <= encoder.length):
        return limit
    if "max_tokens" in facts.parameters:
        raise facts.refused(f"parameter 'max_tokens' is {limit}, but the encoder takes {encoder.length} tokens")
    return encoder.length


def _tokenizer(config: PlainConfig, facts: TextFacts, encoder: _Encoder, limit: int | None) -> ModelConfig:
    message = _python_model(config, "tokenize")
    if facts.output == SCORE:
        add_tensor(message.input, _QUERY, DataType.BYTES, [1])
        add_tensor(message.input, _TEXT, DataType.BYTES, [1])
    elif facts.output == TOKENS:
        add_tensor(message.input, _TEXT, DataType.BYTES, [1])
    else:
        add_tensor(message.input, _TEXT, DataType.BYTES, [1]).optional = True
        add_tensor(message.input, _IDS, DataType.INT64, [-1]).optional = True
    for entry in encoder.inputs.values():
        add_tensor(message.output, entry.name, entry.datatype, [encoder.length])
    add_tensor(message.output, _COUNT, DataType.INT32, [1])
    if facts.output == TOKENS:
        for name, datatype, dims in _TOKEN_TENSORS:
            add_tensor(message.output, name, datatype, dims)
    numbers = {
        "max_tokens": limit,
        "length": encoder.length if encoder.length > 0 else None,
        "vocabulary": facts.vocabulary,
        "padding": facts.padding,
    }
    written = {f"{role}_output": entry.name for role, entry in encoder.inputs.items()}
    written |= {key: str(number) for key, number in numbers.items() if number is not None}
    if facts.prompt:
        written["prompt"] = facts.prompt
    if facts.lowers:
        written["lower_case"] = "true"
    return _with_parameters(message, written)


def _embedding(config: PlainConfig, facts: TextFacts, found: ClassNames | None) -> Postprocess:
    outputs = {output.name.partition(":")[0]: output for output in config.outputs if is_number(output)}
    ranks = {name: len(dims_of_one_row(config, output.dims)) for name, output in outputs.items()}
    pooled = [name for name, rank in ranks.items() if rank == 1]
    unpooled = [name for name, rank in ranks.items() if rank == 2]
    chosen = (
        [name for name in pooled if name in _POOLED]
        or [name for name in unpooled if name in _UNPOOLED]
        or (unpooled if len(unpooled) == 1 else [])
        or (pooled if len(pooled) == 1 and not unpooled else [])
    )
    if not chosen:
        raise unfit(
            config,
            "an output of vectors: last_hidden_state or token_embeddings, one for each token, or sentence_embedding,"
            " one for each text",
        )
    output = outputs[chosen[0]]
    is_pooled = ranks[chosen[0]] == 1
    message = _python_model(config, "postprocess")
    dims = dims_of_one_row(config, output.dims)
    name = "POOLED" if is_pooled else "HIDDEN"
    add_tensor(message.input, name, output.datatype, dims if is_pooled else (-1, dims[1]))
    parameters = {"normalise": str(facts.normalises).lower()}
    if is_pooled:
        if "pooling" in facts.parameters:
            raise facts.refused(
                f"parameter 'pooling' has no effect: output '{output.name}' already has one vector for each text"
            )
        parameters["pooling"] = "by the encoder"
    else:
        facts.check_modules()
        parameters["pooling"] = facts.pooling
        add_tensor(message.input, _COUNT, DataType.INT32, [1])
    width = dims[-1] if dims[-1] > 0 else facts.width
    add_tensor(message.output, "EMBEDDING", DataType.FP32, [width])
    _with_parameters(message, parameters)
    return Postprocess(message, "rocserve.presets.pooling", {output.name: name})


def _label(config: PlainConfig, facts: TextFacts, found: ClassNames | None) -> Postprocess:
    output, dims = _only_output(config, "one output of scores, one for each class", 1)
    names = _labels(config, facts, found, output, dims[-1])
    message = _python_model(config, "postprocess")
    add_tensor(message.input, "SCORES", output.datatype, dims)
    add_tensor(message.output, "LABEL", DataType.BYTES, [1])
    add_tensor(message.output, "PROBABILITY", DataType.FP32, [1])
    add_tensor(message.output, "PROBABILITIES", DataType.FP32, dims).label_filename = LABELS_FILENAME
    _with_parameters(message, {"activation": facts.activation})
    return Postprocess(message, "rocserve.presets.classification", {output.name: "SCORES"}, names)


def _tokens(config: PlainConfig, facts: TextFacts, found: ClassNames | None) -> Postprocess:
    output, dims = _only_output(config, "one output of scores, one for each token and class", 2)
    names = _labels(config, facts, found, output, dims[-1])
    message = _python_model(config, "postprocess")
    add_tensor(message.input, "SCORES", output.datatype, (-1, dims[1]))
    for name, datatype, of_each in _TOKEN_TENSORS:
        add_tensor(message.input, name, datatype, of_each)
    # Tokenizer and post-processing have both TOKENS and OFFSETS: with the tokens that the tokenizer adds, and without.
    add_tensor(message.output, "TOKENS", DataType.BYTES, [-1])
    add_tensor(message.output, "LABELS", DataType.BYTES, [-1]).label_filename = LABELS_FILENAME
    add_tensor(message.output, "PROBABILITIES", DataType.FP32, [-1])
    add_tensor(message.output, "OFFSETS", DataType.INT32, [-1, 2])
    _with_parameters(message, {"activation": facts.activation})
    return Postprocess(message, "rocserve.presets.token_labels", {output.name: "SCORES"}, names)


def _score(config: PlainConfig, facts: TextFacts, found: ClassNames | None) -> Postprocess:
    expected = "one output of one score for each pair of texts"
    output, dims = _only_output(config, expected, 1)
    if dims[-1] not in (1, -1):
        raise unfit(config, expected, f"output '{output.name}' has {dims[-1]}")
    message = _python_model(config, "postprocess")
    add_tensor(message.input, "SCORES", output.datatype, dims)
    add_tensor(message.output, "SCORE", DataType.FP32, [1])
    _with_parameters(message, {"activation": facts.activation})
    return Postprocess(message, "rocserve.presets.scoring", {output.name: "SCORES"})


def _only_output(config: PlainConfig, expected: str, rank: int) -> tuple[OutputConfig, tuple[int, ...]]:
    """Return the only output of scores (of several, the one named logits) and its dims for one text."""
    fitting = [
        (output, dims)
        for output in config.outputs
        if is_number(output) and len(dims := dims_of_one_row(config, output.dims)) == rank
    ]
    named = [one for one in fitting if one[0].name.partition(":")[0] == "logits"]
    if len(named or fitting) != 1:
        raise unfit(config, expected)
    return (named or fitting)[0]


def _labels(
    config: PlainConfig, facts: TextFacts, found: ClassNames | None, output: OutputConfig, classes: int
) -> Sequence[str]:
    if output.labels:
        return output.labels
    if found is not None:
        if len(found.names) != classes:
            raise wrong_number(config, found, output.name, classes)
        return found.names
    names = facts.labels
    if not facts.names_labels and classes > 0:
        return tuple(f"LABEL_{number}" for number in range(classes))
    if classes not in (-1, len(names)):
        raise facts.refused(
            f"config.json's id2label names {len(names)} classes, but output '{output.name}' has {classes}; use the"
            " config.json that was exported with the model"
        )
    return names


def _ensemble(
    config: PlainConfig, encoder: _Encoder, tokenizer: ModelConfig, post: Postprocess, told: Mapping[str, str]
) -> ModelConfig:
    # The tensors between the steps have names that differ from all outputs'.
    between = {output.name: f"tokenize.{output.name}" for output in tokenizer.output if output.name != _COUNT}
    between[_COUNT] = _COUNT
    scores = {output: f"encoder.{output}" for output in post.inputs}
    given = {name.name: name.name for name in tokenizer.input}
    encoded = {entry.name: between[entry.name] for entry in encoder.inputs.values()}
    from_encoder = {taken: scores[output] for output, taken in post.inputs.items()}
    taken = {entry.name: from_encoder.get(entry.name) or between[entry.name] for entry in post.message.input}
    own = {output.name: output.name for output in post.message.output}
    read = {*encoded.values(), *taken.values(), _COUNT}
    made = {name: tensor for name, tensor in between.items() if tensor in read}
    steps = ((tokenizer.name, given, made), (config.name, encoded, scores), (post.message.name, taken, own))
    message = ensemble(ensemble_name(config.name, TEXT), post.message, steps)
    # Texts differ in their number of tokens, so labels of tokens do not batch.
    if encoder.joins_texts and told["output"] != TOKENS:
        message.max_batch_size = config.max_batch_size
    message.input.extend(tokenizer.input)
    add_tensor(message.output, _COUNT, DataType.INT32, [1])
    return _with_parameters(message, {key: told[key] for key in TEXT_FACTS if key in told})


def _python_model(config: PlainConfig, what: str) -> ModelConfig:
    # The tokenizer and the post-processing take together as many texts as the server's default for a batch.
    message = python_model(f"{config.name}_{what}", max(config.max_batch_size, 64))
    message.dynamic_batching.SetInParent()
    return message


def _with_parameters(message: ModelConfig, parameters: Mapping[str, str]) -> ModelConfig:
    for key, value in parameters.items():
        message.parameters[key].string_value = value
    return message
