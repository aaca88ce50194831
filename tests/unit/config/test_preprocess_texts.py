"""The models that `preprocess: text` stands for, by the configuration of their encoder and its files; tests/e2e has the
encoders."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from rocserve.backends.registry import discover_backends
from rocserve.config import definition
from rocserve.config.class_names import ClassNames
from rocserve.config.model_folder import FlatModel, ModelFolder
from rocserve.config.pbtxt import parse_model_config
from rocserve.config.preprocess.generated import GeneratedModel
from rocserve.config.preprocess.text_files import TextFiles, has_tokenizer, read_text_files
from rocserve.config.preprocess.texts import text_models
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, ModelConfig, OutputConfig
from rocserve.presets import TEXT_FACTS

BERT = ("input_ids", "attention_mask", "token_type_ids")
MODULES = ("Transformer", "Pooling", "Normalize")


def config(
    outputs: Mapping[str, Sequence[int]] | None = None,
    inputs: Sequence[str] = BERT,
    *,
    batch: int = 16,
    length: int = -1,
    datatype: DataType = DataType.INT64,
    gives: DataType = DataType.FP32,
    **parameters: str,
) -> ModelConfig:
    lead = () if batch else (-1,)
    named = outputs or {"last_hidden_state": (-1, 384)}
    return ModelConfig(
        "net",
        max_batch_size=batch,
        inputs=tuple(InputConfig(name, datatype, (*lead, length)) for name in inputs),
        outputs=tuple(OutputConfig(name, gives, (*lead, *dims)) for name, dims in named.items()),
        parameters={"preprocess": "text", **parameters},
    )


def files(**given: Any) -> TextFiles:
    empty: dict[str, Any] = {key: {} for key in ("config", "tokenizer_config", "sentence", "prompts", "pooling")}
    return TextFiles(**{"tokenizer": b"{}", **empty, "modules": (), **given})


def parsed(made: GeneratedModel) -> Any:
    return parse_model_config(made.files[PurePosixPath("config.pbtxt")].decode(), "config.pbtxt")


def told(given: ModelConfig, of: TextFiles) -> dict[str, str]:
    """What the ensemble says of itself."""
    message = parsed(text_models(given, of, None)[2])
    return {key: entry.string_value for key, entry in message.parameters.items()}


def refusal(given: ModelConfig, of: TextFiles) -> str:
    with pytest.raises(ServeError) as caught:
        text_models(given, of, None)
    assert caught.value.code is StatusCode.INVALID_ARGUMENT
    return caught.value.text


def test_three_models_are_made_and_the_tokenizer_goes_with_the_first() -> None:
    made = text_models(config(), files(tokenizer=b"words"), None)
    assert [one.name for one in made] == ["net_tokenize", "net_postprocess", "net_text"]
    assert made[0].files[PurePosixPath("1/tokenizer.json")] == b"words"
    tokenizer, _, ensemble = map(parsed, made)
    assert [one.name for one in ensemble.input] == ["TEXT", "IDS"]
    assert [one.name for one in ensemble.output] == ["EMBEDDING", "TOKEN_COUNT"]
    assert ensemble.max_batch_size == 16
    assert [one.name for one in tokenizer.output] == [*BERT, "TOKEN_COUNT"]
    assert {key: tokenizer.parameters[f"{key}_output"].string_value for key in ("ids", "mask", "types")} == dict(
        zip(("ids", "mask", "types"), BERT, strict=True)
    )


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        (config(), 16),
        (config(batch=0), 0),
        (config(inputs=BERT[:1]), 0),
        (config(inputs=BERT[:1], length=128), 16),
        (config({"logits": (-1, 3)}, output="tokens"), 0),
        (config({"logits": (3,)}, output="label"), 16),
    ],
)
def test_texts_share_a_request_where_padding_changes_nothing(given: ModelConfig, batch: int) -> None:
    assert parsed(text_models(given, files(), None)[2]).max_batch_size == batch


@pytest.mark.parametrize("name", ["input_ids", "input_ids:0", "tokens"])
def test_a_single_input_is_the_ids_and_has_the_encoder_s_datatype(name: str) -> None:
    tokenizer = parsed(text_models(config(inputs=(name,), datatype=DataType.INT32), files(), None)[0])
    assert (tokenizer.output[0].name, tokenizer.output[0].data_type) == (name, 8)
    assert tokenizer.parameters["ids_output"].string_value == name


@pytest.mark.parametrize(
    ("given", "of", "expected"),
    [
        (config(), files(), "embedding"),
        (config(), files(modules=MODULES, config={"architectures": ["XForTokenClassification"]}), "embedding"),
        (config({"logits": (2,)}), files(config={"architectures": ["BertForSequenceClassification"]}), "label"),
        (
            config({"logits": (1,)}),
            files(config={"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}),
            "score",
        ),
        (
            config({"logits": (1,)}),
            files(config={"architectures": ["BertForSequenceClassification"], "num_labels": 1}),
            "score",
        ),
        (config({"logits": (-1, 2)}), files(config={"architectures": ["BertForTokenClassification"]}), "tokens"),
        (config({"logits": (-1, 2)}, output="tokens"), files(modules=MODULES), "tokens"),
    ],
)
def test_the_files_say_what_comes_out_and_a_parameter_goes_before_them(given, of, expected: str) -> None:
    assert told(given, of)["output"] == expected


@pytest.mark.parametrize(
    ("given", "of", "pooling", "normalise"),
    [
        (config(), files(), "mean", "false"),
        (config(), files(modules=MODULES, pooling={"pooling_mode_cls_token": True}), "cls", "true"),
        (config(), files(pooling={"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}), "last", "false"),
        (config(), files(pooling={"pooling_mode": "lasttoken"}), "last", "false"),
        (config(pooling="mean"), files(pooling={"pooling_mode_cls_token": True}), "mean", "false"),
        (config(normalise="False"), files(modules=MODULES), "mean", "false"),
        (config({"sentence_embedding": (8,)}), files(modules=(*MODULES, "Dense")), "by the encoder", "true"),
        (config({"last_hidden_state": (-1, 8), "pooler_output": (8,)}), files(), "mean", "false"),
        (config({"token_embeddings": (-1, 8), "sentence_embedding": (8,)}), files(), "by the encoder", "false"),
        (config({"vectors": (8,)}), files(), "by the encoder", "false"),
    ],
)
def test_the_files_say_how_a_vector_is_made(given, of, pooling: str, normalise: str) -> None:
    found = told(given, of)
    assert (found["pooling"], found["normalise"]) == (pooling, normalise)


@pytest.mark.parametrize(
    ("given", "of", "expected"),
    [
        (config(), files(), "as tokenizer.json says"),
        (config(), files(config={"max_position_embeddings": 512}), "512"),
        (config(), files(tokenizer_config={"model_max_length": 10**30}), "as tokenizer.json says"),
        (
            config(),
            files(
                config={"max_position_embeddings": 512},
                tokenizer_config={"model_max_length": 384},
                sentence={"max_seq_length": 256},
            ),
            "256",
        ),
        (config(), files(config={"max_position_embeddings": 512}, tokenizer_config={"model_max_length": 1024}), "512"),
        (
            config(),
            files(config={"max_position_embeddings": 514, "model_type": "xlm-roberta", "pad_token_id": 1}),
            "512",
        ),
        (config(length=64), files(sentence={"max_seq_length": 256}), "64"),
        (config(length=64, max_tokens="32"), files(), "32"),
        (config(max_tokens="512"), files(sentence={"max_seq_length": 256}), "512"),
    ],
)
def test_the_most_tokens_are_the_model_s_own(given: ModelConfig, of: TextFiles, expected: str) -> None:
    assert told(given, of)["max_tokens"] == expected


@pytest.mark.parametrize(
    ("given", "of", "expected"),
    [
        (config({"logits": (3,)}, output="label"), files(), "softmax"),
        (
            config({"logits": (3,)}, output="label"),
            files(config={"problem_type": "multi_label_classification"}),
            "sigmoid",
        ),
        (config({"logits": (1,)}, output="score"), files(), "sigmoid"),
        (
            config({"logits": (1,)}, output="score"),
            files(config={"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
            "none",
        ),
        (
            config({"logits": (1,)}, output="score"),
            files(config={"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}),
            "sigmoid",
        ),
        (config({"logits": (1,)}, output="score", activation="none"), files(), "none"),
    ],
)
def test_the_files_say_what_makes_a_score(given: ModelConfig, of: TextFiles, expected: str) -> None:
    assert told(given, of)["activation"] == expected


def test_all_that_an_ensemble_tells_becomes_a_property() -> None:
    prompts = {"default_prompt_name": "query", "prompts": {"query": "query: ", "other": "x"}}
    found = told(config(), files(prompts=prompts, config={"matryoshka_dimensions": [64, 128]}))
    assert found["prompt"] == "query: "
    assert found["matryoshka"] == "64,128"
    assert found.keys() <= set(TEXT_FACTS)


def test_labels_are_those_of_a_file_else_of_the_configuration_else_numbered() -> None:
    given = config({"logits": (2,)}, output="label")
    named = files(config={"id2label": {"1": "loud", "0": "calm"}})

    def labels(of: TextFiles, found: ClassNames | None) -> list[str]:
        return text_models(given, of, found)[1].files[PurePosixPath("labels.txt")].decode().splitlines()

    assert labels(named, None) == ["calm", "loud"]
    assert labels(named, ClassNames("net/labels.txt", "labels.txt", ("a", "b"))) == ["a", "b"]
    assert labels(files(), None) == ["LABEL_0", "LABEL_1"]


@pytest.mark.parametrize(
    ("given", "of", "wording"),
    [
        (config(inputs=("images",), datatype=DataType.FP32), files(), "takes images FP32"),
        (config(inputs=("input_ids", "pixels")), files(), "'pixels' is not a name of these"),
        (config(inputs=("attention_mask", "token_type_ids")), files(), "is for a model with integer inputs"),
        (config(gives=DataType.BF16), files(), "is for a model with an output of vectors"),
        (config({"a": (-1, 8), "b": (-1, 8)}), files(), "is for a model with an output of vectors"),
        (config({"logits": (2,)}, output="score"), files(), "output 'logits' has 2"),
        (config({"logits": (2,)}, output="tokens"), files(), "one output of scores, one for each token and class"),
        (config(output="labels"), files(), "must be one of embedding, label, tokens, score, not 'labels'"),
        (config(pooling="max"), files(), "must be one of mean, cls, last, not 'max'"),
        (config(), files(pooling={"pooling_mode_max_tokens": True}), "asks for pooling_mode_max_tokens; expected"),
        (
            config(),
            files(pooling={"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}),
            "asks for pooling_mode_cls_token, pooling_mode_mean_tokens; expected one",
        ),
        (config(), files(modules=(*MODULES, "Dense")), "the module Dense, whose weights are not in the encoder's file"),
        (config({"vectors": (8,)}, pooling="mean"), files(), "already has one vector for each text"),
        (config(max_tokens="none"), files(), "whole number of at least 1, not 'none'"),
        (config(max_tokens="600"), files(config={"max_position_embeddings": 512}), "has positions for 512"),
        (config(max_tokens="600", length=64), files(), "the encoder takes 64 tokens"),
        (
            config({"logits": (3,)}, output="label"),
            files(config={"id2label": {"0": "a", "1": "b"}}),
            "names 2 classes, but output 'logits' has 3",
        ),
        (config({"logits": (2,)}, output="label"), files(config={"id2label": {"0": "a", "2": "b"}}), "0, 1, 2"),
        (
            config({"logits": (1,)}, output="score"),
            files(config={"sbert_ce_default_activation_function": "torch.nn.Tanh"}),
            "asks for the activation torch.nn.Tanh",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given: ModelConfig, of: TextFiles, wording: str) -> None:
    assert wording in refusal(given, of)


@pytest.mark.parametrize(
    ("contents", "guesses", "installed", "preset"),
    [
        (("tokenizer.json",), True, True, "text"),
        (("tokenizer.json", "config.pbtxt"), True, True, None),
        ((), True, True, None),
        (("tokenizer.json",), False, True, None),
        (("tokenizer.json",), True, False, None),
    ],
)
def test_a_folder_without_a_configuration_and_with_a_tokenizer_is_of_text(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    contents: Sequence[str],
    guesses: bool,
    installed: bool,
    preset: str | None,
) -> None:
    monkeypatch.setattr(definition, "has_tokenizers", lambda: installed)
    for name in ("model.onnx", *contents):
        (tmp_path / name).touch()
    reading = definition.FolderReading(
        tmp_path, discover_backends(), flat=FlatModel("model.onnx"), guesses_preset=guesses
    )
    (found,) = reading.definitions()
    assert found.config.parameters.get("preprocess") == preset
    assert found.is_preset_guessed == (preset is not None)
    assert any("pip install" in text for text in found.warnings) == (not installed)


def write(folder: Path, **contents: str) -> ModelFolder:
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_json", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return ModelFolder(folder)


def test_a_version_s_own_files_go_before_those_beside_it(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        tokenizer_json="of all",
        config_json='{"vocab_size": 7}',
        sentence_roberta_config_json='{"max_seq_length": 9}',
        modules_json=json.dumps([{"type": "a.Transformer", "path": ""}, {"type": "a.Pooling", "path": "pool"}]),
        pool__config_json='{"pooling_mode_cls_token": true}',
        **{"2__tokenizer_json": "of the second"},
    )
    first, second = (read_text_files("net", folder, tmp_path / version) for version in ("1", "2"))
    assert (first.tokenizer, second.tokenizer) == (b"of all", b"of the second")
    assert (first.config, first.sentence) == ({"vocab_size": 7}, {"max_seq_length": 9})
    assert (first.modules, first.pooling) == (("Transformer", "Pooling"), {"pooling_mode_cls_token": True})
    assert has_tokenizer(folder)


@pytest.mark.parametrize(
    ("contents", "wording"),
    [
        ({}, "text needs the tokenizer's file tokenizer.json"),
        ({"tokenizer_json": "", "config_json": "{"}, "config.json is damaged: expected JSON, got"),
        ({"tokenizer_json": "", "config_json": "[]"}, "config.json is damaged: expected a JSON object, got list"),
        ({"tokenizer_json": "", "modules_json": "[{}]"}, "modules.json is damaged: expected a JSON list of modules"),
        (
            {"tokenizer_json": "", "modules_json": '[{"type": "Pooling", "path": "../../other"}]'},
            "must be a path within the folder",
        ),
    ],
)
def test_files_that_cannot_be_read_are_named(tmp_path: Path, contents: dict[str, str], wording: str) -> None:
    folder = write(tmp_path / "net", **contents) if contents else ModelFolder(tmp_path)
    with pytest.raises(ServeError, match=wording.replace(".", r"\.")):
        read_text_files("net", folder, folder.path)
