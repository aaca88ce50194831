"""`rocserve get minilm`, a real encoder with its real tokenizer: texts get the vectors that a bare loop makes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.server import Start
from support.text_encoders import BareEncoder

from rocserve_client import Client

tokenizers = pytest.importorskip("tokenizers", reason="needs the package tokenizers")

TEXTS = (
    "The cat sat on the mat.",
    "A kitten lay on the rug.",
    "Stocks fell sharply on Monday.",
    "Ünïcode — naïve café 日本語 🙂",
    "",
    "several words " * 300,
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder") / "models"
    command = [sys.executable, "-m", "rocserve.cli", "get", "minilm", f"--model-repository={folder}"]
    got = subprocess.run(command, capture_output=True, text=True, check=False)
    if "could not be downloaded" in got.stderr:
        pytest.skip("no network here")
    assert got.returncode == 0, got.stderr
    return folder


def test_texts_get_the_vectors_of_a_bare_loop(start: Start, repository: Path) -> None:
    folder = repository / "minilm"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    bare = BareEncoder(tokenizer, (folder / "1" / "model.onnx").read_bytes(), 256)
    means = np.stack([bare(text).mean(axis=0) for text in TEXTS])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    texts = np.array([[text.encode()] for text in TEXTS], object)
    with Client(f"127.0.0.1:{start(repository).port}") as client:
        together = client.infer("minilm_text", {"TEXT": texts})
        alone = np.concatenate([client.infer("minilm_text", {"TEXT": text[np.newaxis]})["EMBEDDING"] for text in texts])
    np.testing.assert_allclose(together["EMBEDDING"], expected, atol=1e-5)
    np.testing.assert_allclose(alone, expected, atol=1e-5)
    assert together["TOKEN_COUNT"].ravel().tolist() == [len(bare(text)) for text in TEXTS]
    # all-MiniLM-L6-v2's model card: like meanings are near.
    likeness = expected @ expected.T
    assert likeness[0, 1] > 0.4 > likeness[0, 2]
