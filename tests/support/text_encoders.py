"""Small encoders of texts with seeded weights, and their tokenizer, in files as Hugging Face's exports have them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH = 8
VOCABULARY = 80
BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
SENTENCES = (
    "the cat sat on the mat",
    "a dog lay under the table",
    "rain fell on the roof all night",
    "the sun shone over the hills",
    "stocks rose on monday morning",
    "the bank lent money to the farm",
)
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def write_tokenizer(folder: Path) -> Any:
    """Write tokenizer.json, a WordPiece tokenizer of lower case that adds [CLS] and [SEP], and return it. As in many
    public files, it cuts texts to 6 tokens and pads them to 6, which the encoder has nothing to do with."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    # Not trained: the library's trainers take equal counts in another order each time.
    pieces = sorted({letter for sentence in SENTENCES for letter in sentence if letter.isalpha()})
    words = sorted({word for sentence in SENTENCES[:4] for word in sentence.split()})
    known = dict.fromkeys((*_SPECIAL, *words, *pieces, *(f"##{letter}" for letter in pieces), ":"))
    vocabulary = {token: number for number, token in enumerate(known)}
    assert len(vocabulary) <= VOCABULARY
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    cls, sep = (tokenizer.token_to_id(token) for token in ("[CLS]", "[SEP]"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", cls), ("[SEP]", sep)]
    )
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def write_json(folder: Path, files: Mapping[str, Any]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))


SENTENCE_FILES: Mapping[str, Any] = {
    "config.json": {"model_type": "bert", "max_position_embeddings": 64, "pad_token_id": 0},
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True},
    "sentence_bert_config.json": {"max_seq_length": 32, "do_lower_case": False},
}
"""The files of a sentence-transformers model."""


def encoder(
    output: str = "last_hidden_state",
    classes: int = 0,
    *,
    inputs: Sequence[str] = BERT_INPUTS,
    datatype: int = TensorProto.INT64,
    shape: tuple[int | str, int | str] = ("batch", "sequence"),
    vocabulary: int = VOCABULARY,
) -> bytes:
    """Return an ONNX encoder: embeddings of ids and types, one layer of attention that a mask bounds. `output`:
    last_hidden_state, sentence_embedding (of the first token), logits (of the first token), token_logits."""
    rng = np.random.default_rng(7)
    graph = _Graph()
    weights = {
        "words": rng.standard_normal((vocabulary, WIDTH)),
        "types": rng.standard_normal((2, WIDTH)),
        "mix": rng.standard_normal((WIDTH, WIDTH)),
        "one": np.float32(1),
        "far": np.float32(-1e9),
        "root": np.float32(WIDTH**-0.5),
    }
    if classes:
        weights["head"] = rng.standard_normal((WIDTH, classes))
    graph.constants = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in weights.items()]
    hidden = graph.node("Gather", "words", inputs[0])
    if "token_type_ids" in inputs:
        hidden = graph.node("Add", hidden, graph.node("Gather", "types", "token_type_ids"))
    scores = graph.node("MatMul", hidden, graph.node("Transpose", hidden, perm=[0, 2, 1]))
    scores = graph.node("Mul", scores, "root")
    if "attention_mask" in inputs:
        mask = graph.node("Cast", "attention_mask", to=TensorProto.FLOAT)
        hides = graph.node("Mul", graph.node("Sub", "one", mask), "far")
        scores = graph.node("Add", scores, graph.node("Unsqueeze", hides, graph.integers(1)))
    mixed = graph.node("MatMul", graph.node("Softmax", scores, axis=-1), hidden)
    hidden = graph.node("Tanh", graph.node("MatMul", graph.node("Add", mixed, hidden), "mix"))
    batch, sequence = shape
    dims: tuple[int | str, ...] = (batch, sequence, WIDTH)
    if output in ("logits", "token_logits"):
        hidden, dims = graph.node("MatMul", hidden, "head"), (batch, sequence, classes)
    if output in ("logits", "sentence_embedding"):
        hidden, dims = graph.node("Gather", hidden, graph.integer(0), axis=1), (batch, dims[2])
    graph.nodes.append(helper.make_node("Identity", [hidden], [output]))
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "encoder",
            [helper.make_tensor_value_info(name, datatype, shape) for name in inputs],
            [helper.make_tensor_value_info(output, TensorProto.FLOAT, dims)],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )
    onnx.checker.check_model(model)
    return model.SerializeToString()


def lookup_encoder(table: np.ndarray) -> bytes:
    """Return an ONNX encoder whose vector of a token is the row of the table."""
    takes = [helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", "sequence"]) for name in BERT_INPUTS[:2]]
    gives = helper.make_tensor_value_info("last_hidden_state", TensorProto.FLOAT, ["batch", "sequence", table.shape[1]])
    node = helper.make_node("Gather", ["table", "input_ids"], ["last_hidden_state"])
    graph = helper.make_graph([node], "lookup", takes, [gives], [numpy_helper.from_array(table, "table")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model)
    return model.SerializeToString()


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"made_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], **attributes))
        return name

    def integers(self, *values: int) -> str:
        return self._keep(np.array(values, np.int64))

    def integer(self, value: int) -> str:
        return self._keep(np.array(value, np.int64))

    def _keep(self, values: np.ndarray) -> str:
        name = f"kept_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(values, name))
        return name


def write_encoder(
    repository: Path, name: str, model: bytes, files: Mapping[str, Any], parameters: Mapping[str, str]
) -> Path:
    """Write a model's folder, without a tokenizer, and return it. `files`: JSON files beside config.pbtxt."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(model)
    write_json(folder, files)
    lines = {"preprocess": "text", **parameters}
    written = [f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}' for key, value in lines.items()]
    (folder / "config.pbtxt").write_text("\n".join(written) + "\n")
    return folder


class BareEncoder:
    """The work of a separate program: the tokenizer, then ONNX Runtime, one text after the other."""

    def __init__(self, tokenizer: Any, model: bytes, most: int) -> None:
        import onnxruntime

        self._tokenizer = tokenizer
        self._most = most
        self._session = onnxruntime.InferenceSession(model)

    def __call__(self, *text: str) -> np.ndarray:
        """Return the first output's row for a text or a pair of texts."""
        self._tokenizer.enable_truncation(self._most)
        encoding = self._tokenizer.encode(*text)
        values = {
            "input_ids": encoding.ids,
            "attention_mask": encoding.attention_mask,
            "token_type_ids": encoding.type_ids,
        }
        feed = {}
        for entry in self._session.get_inputs():
            datatype = np.int32 if entry.type == "tensor(int32)" else np.int64
            feed[entry.name] = np.array([values[entry.name]], datatype)
        return self._session.run(None, feed)[0][0]
