"""The benchmark of texts, without a server and without the internet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.text_encoders import SENTENCES, encoder, write_tokenizer

from benchmarks.texts import batched, draw_texts, open_tokenizer, requests_of_ids, shown, write_light_encoder

pytest.importorskip("tokenizers", reason="needs the package tokenizers")


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path)
    return tmp_path / "tokenizer.json"


def test_texts_are_drawn_once_from_a_law_with_a_long_tail(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOKENIZERS_PARALLELISM", "RAYON_NUM_THREADS"):
        monkeypatch.setenv(name, "set by the benchmark, and restored for other tests")
    tokenizer = open_tokenizer(tokenizer_file)
    drawn = draw_texts(tokenizer)
    assert draw_texts(tokenizer).texts == drawn.texts
    assert [row.tolist() for row in drawn.ids] == [[tokenizer.encode(text).ids] for text in drawn.texts]
    lengths = sorted(row.size for row in drawn.ids)
    assert lengths[0] >= 3
    assert lengths[-1] <= 512
    assert lengths[-1] > 4 * np.median(lengths)


def test_texts_of_like_length_share_a_request() -> None:
    batches = batched(SENTENCES, 4)
    assert sorted(map(len, batches)) == [2, 4]
    by_length = sorted(batches, key=lambda batch: len(batch[0]))
    assert [text for batch in by_length for text in batch] == sorted(SENTENCES, key=len)
    assert sorted(text for (text,) in batched(SENTENCES, 1)) == sorted(SENTENCES)


def test_an_encoder_gets_the_inputs_that_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(encoder())
    (request,) = requests_of_ids(file, [np.array([[2, 9, 3]])])
    assert {name: row.tolist() for name, row in request.items()} == {
        "input_ids": [[2, 9, 3]],
        "attention_mask": [[1, 1, 1]],
        "token_type_ids": [[0, 0, 0]],
    }
    write_light_encoder(tmp_path / "light", tmp_path / "model.onnx")
    (request,) = requests_of_ids(tmp_path / "light" / "1" / "model.onnx", [np.array([[2]])])
    assert list(request) == ["input_ids", "attention_mask"]


def test_a_cell_has_the_median_and_the_extremes_of_the_rounds() -> None:
    assert shown([3, 1, 2.5], 1) == "2.5 (1.0 to 3.0)"
