"""`rocserve get minilm`, a real encoder with its real tokenizer: texts get the vectors that a bare loop makes, and
the example finds sentences by them."""

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

EXAMPLE = Path(__file__).parents[2] / "clients" / "examples" / "nearest_sentences.py"
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


@pytest.fixture(scope="module")
def address(start: Start, repository: Path) -> str:
    return f"127.0.0.1:{start(repository).port}"


def test_texts_get_the_vectors_of_a_bare_loop(address: str, repository: Path) -> None:
    folder = repository / "minilm"
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    bare = BareEncoder(tokenizer, (folder / "1" / "model.onnx").read_bytes(), 256)
    means = np.stack([bare(text).mean(axis=0) for text in TEXTS])
    expected = means / np.linalg.norm(means, axis=1, keepdims=True)
    texts = np.array([[text.encode()] for text in TEXTS], object)
    with Client(address) as client:
        together = client.infer("minilm_text", {"TEXT": texts})
        alone = np.concatenate([client.infer("minilm_text", {"TEXT": text[np.newaxis]})["EMBEDDING"] for text in texts])
    np.testing.assert_allclose(together["EMBEDDING"], expected, atol=1e-5)
    np.testing.assert_allclose(alone, expected, atol=1e-5)
    assert together["TOKEN_COUNT"].ravel().tolist() == [len(bare(text)) for text in TEXTS]
    # all-MiniLM-L6-v2's model card: like meanings are near.
    likeness = expected @ expected.T
    assert likeness[0, 1] > 0.4 > likeness[0, 2]


def test_the_example_finds_sentences_by_their_meaning(address: str, tmp_path: Path) -> None:
    def found(*arguments: str) -> dict[str, list[str]]:
        """Question -> the sentences, the nearest first."""
        command = [sys.executable, EXAMPLE, f"--url={address}", *arguments]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        answers: dict[str, list[str]] = {}
        for line in printed.splitlines():
            if line.startswith("  "):
                answers[next(reversed(answers))].append(line.split(maxsplit=1)[1])
            else:
                answers[line] = []
        return answers

    # The questions have no word in common with what they ask for.
    assert {question: sentences[0] for question, sentences in found().items()} == {
        "Why does my loaf not rise?": "Bread stays flat if the yeast is too old.",
        "What does my computer need to stay cool?": "A laptop runs hot if dust blocks its fan.",
        "How do I become rich?": "Pay off the most expensive loan first.",
        "Which animals are sad without company?": "Parrots that live alone become bored and pull out their feathers.",
        "What causes the tides?": "The moon pulls the sea up twice a day.",
    }
    own = tmp_path / "own.txt"
    own.write_text("The river froze.\n\nShe sings well.\n")
    assert found("--model=minilm_text", f"--sentences={own}", "ice on the water") == {
        "ice on the water": ["The river froze.", "She sings well."]
    }
    failed = subprocess.run(
        [sys.executable, EXAMPLE, f"--url={address}", "--model=minilm_postprocess"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert failed.returncode == 1
    assert "INVALID_ARGUMENT: model 'minilm_postprocess' does not turn texts into vectors" in failed.stderr
