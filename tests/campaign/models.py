"""The models that a campaign's servers serve, laid out as users would."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from support.models import ADD_CONSTANT_CONFIG, add_constant, drop
from support.paced_models import drop_paced
from support.sequences import drop_accumulator
from support.text_encoders import SENTENCE_FILES, VOCABULARY, encoder, write_encoder, write_tokenizer
from support.waiting import PATIENCE_SECONDS

SAMPLES = Path(__file__).parents[2] / "model_repository"
PYTHON_MODELS = Path(__file__).parents[1] / "data" / "python-models"

STEADY, CACHED, CALLED, VERSIONED = "steady", "cached", "called", "versioned"
VERSIONS = (1, 2, 3)
"""Of the model of several versions, each of which adds the first constant as often as its number says."""
TEXTS = "texts"
TEXTS_ENSEMBLE, TOKENIZER = f"{TEXTS}_text", f"{TEXTS}_tokenize"
"""Models that `preprocess` generates."""
MOST_TOKENS = 32
PYTHON, DECOUPLED, SUMS, DIGITS = "add_sub", "repeat", "sums", "digits"
FUZZED, PACED, LARGE = "fuzzed", "paced", "large"
COPIED = ("first", "second")
"""Models that are swapped by copies, renames and rsync."""
MOUNTED, CHECKED_OUT = "mounted", "checked_out"
"""Models that are swapped through a ConfigMap's link, and by git."""
SWAPPED = (*COPIED, MOUNTED, CHECKED_OUT)
FIRST = 7.0
"""The constant that each model adds at first."""

CONSTANT_CONFIG = ADD_CONSTANT_CONFIG + 'parameters { key: "intra_op_thread_count" value { string_value: "1" } }\n'
LARGE_CONFIG = """
platform: "onnx_onnxv1"
input { name: "X" data_type: TYPE_FP32 dims: [ -1, 2 ] }
output { name: "Y" data_type: TYPE_FP32 dims: [ -1, 2 ] }
"""
ENCODERS = (encoder(), encoder(vocabulary=VOCABULARY + 1))
"""Encoders of texts, with the same inputs and other weights."""
CACHE = "response_cache { enable: true }\n"
BATCHES = "oldest { max_candidate_sequences: 16 } max_sequence_idle_microseconds: 20000000"

GIT = ("git", "-c", "user.name=campaign", "-c", "user.email=campaign@localhost", "-c", "gc.auto=0")

PROCESS_NAME_BYTES = 15
"""The length at which the kernel cuts process names."""


def process_name(model: str) -> str:
    """The name of the model's workers. Models whose names begin alike may share it."""
    return f"rocserve:{model}"[:PROCESS_NAME_BYTES]


def git(folder: Path, *words: str) -> None:
    subprocess.run([*GIT, *words], cwd=folder, check=True, capture_output=True, timeout=PATIENCE_SECONDS)


def drop_constant(repository: Path, name: str, constant: float = FIRST, more: str = "") -> Path:
    return drop(repository, name, add_constant(constant), CONSTANT_CONFIG + more)


def fill_copied(repository: Path) -> None:
    """Fill the repository into which files are copied."""
    for name in (STEADY, FUZZED, *COPIED):
        drop_constant(repository, name)
    drop_constant(repository, CACHED, more=CACHE)
    drop(repository, LARGE, add_constant(FIRST), LARGE_CONFIG)
    drop_accumulator(repository, SUMS, BATCHES)
    drop_paced(repository, PACED)
    for name in (PYTHON, DECOUPLED):
        shutil.copytree(PYTHON_MODELS / name, repository / name)
    for name in (DIGITS, "digits_classifier", "digits_preprocess"):
        shutil.copytree(SAMPLES / name, repository / name)
    write_tokenizer(write_encoder(repository, TEXTS, ENCODERS[0], SENTENCE_FILES, {}))


def fill_mounted(repository: Path) -> None:
    """Fill a volume of Kubernetes: everything lies behind the link `..data`."""
    drop_constant(repository / "..first", MOUNTED)
    (repository / "..data").symlink_to("..first")
    (repository / MOUNTED).symlink_to(f"..data/{MOUNTED}")


def fill_checked_out(repository: Path) -> None:
    """Fill the work tree of a git repository."""
    drop_constant(repository, CHECKED_OUT)
    git(repository, "init", "--quiet", "--initial-branch=main")
    git(repository, "add", "--all")
    git(repository, "commit", "--quiet", "--message=first")


def fill_explicit(repository: Path) -> None:
    """Fill the repository of the server in explicit mode."""
    for name in (STEADY, FUZZED, CALLED):
        drop_constant(repository, name)
    shutil.copytree(PYTHON_MODELS / PYTHON, repository / PYTHON)
    for version in VERSIONS:
        config = CONSTANT_CONFIG + "version_policy { all { } }\n"
        drop(repository, VERSIONED, add_constant(FIRST * version), config, version=version)
