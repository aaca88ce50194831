"""Reads the files of a text encoder, with the names of Hugging Face's and sentence-transformers' exports: in the
version folder, else beside config.pbtxt."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from rocserve.config.model_folder import Listing, ModelFolder, is_true
from rocserve.core.errors import ServeError, invalid_argument, unreadable

TOKENIZER = "tokenizer.json"

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TextFiles:
    """The files beside a text encoder. A missing file counts as empty."""

    tokenizer: bytes
    config: Json
    tokenizer_config: Json
    sentence: Json
    """sentence_bert_config.json."""
    prompts: Json
    """config_sentence_transformers.json."""
    modules: tuple[str, ...]
    """The modules of modules.json by their kinds, such as Transformer, Pooling, Normalize."""
    pooling: Json


def has_tokenizers() -> bool:
    """Whether the package that reads tokenizer.json is installed. It is not imported: only workers use it."""
    return importlib.util.find_spec("tokenizers") is not None


def has_tokenizer(folder: ModelFolder) -> bool:
    """Whether tokenizer.json lies beside the model's configuration or file."""
    return any(place.has_file(TOKENIZER) for place in (*folder.places, folder.listing))


def read_text_files(model: str, folder: ModelFolder, version_folder: Path) -> TextFiles:
    """Read the files of a version. Blocks on the disk. Raises ServeError (INVALID_ARGUMENT) if tokenizer.json is
    missing or a file is damaged."""
    reader = _Reader(model, folder, dict.fromkeys((_below(folder, version_folder), "")))
    # The largest vocabularies, of a million pieces, take a quarter of this.
    tokenizer = reader.read(TOKENIZER, 256 << 20)
    if tokenizer is None:
        raise invalid_argument(
            f"model '{model}': text needs the tokenizer's file {TOKENIZER}, in the version folder or beside"
            " config.pbtxt; transformers writes it: AutoTokenizer.from_pretrained(NAME).save_pretrained(FOLDER)"
        )
    modules = reader.modules("modules.json")
    place = next((place for kind, place in modules if kind == "Pooling"), "1_Pooling")
    return TextFiles(
        tokenizer,
        config=reader.table("config.json"),
        tokenizer_config=reader.table("tokenizer_config.json"),
        # Older exports name their architecture in place of "bert".
        sentence=reader.table(reader.only("sentence_*_config.json")),
        prompts=reader.table("config_sentence_transformers.json"),
        modules=tuple(kind for kind, _ in modules),
        pooling=reader.table(f"{place}/config.json"),
    )


def _below(folder: ModelFolder, version_folder: Path) -> str:
    return version_folder.name if version_folder != folder.path else ""


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads files of a model from the folders where they may lie."""

    model: str
    folder: ModelFolder
    places: Mapping[str, None]
    """The folders to look in, relative to the model's, best first."""

    def read(self, name: str, most_bytes: int = 16 << 20) -> bytes | None:
        # The names of a hundred thousand classes take a quarter of 16 MiB.
        for place in self.places:
            path = self.folder.resolve(name, f"file of model '{self.model}'", place)
            if not is_true(path.is_file):
                continue
            try:
                with path.open("rb") as file:
                    content = file.read(most_bytes + 1)
            except OSError as error:
                raise unreadable(f"model '{self.model}': {name} cannot be read: {error.strerror}", error) from None
            if len(content) > most_bytes:
                raise self.damaged(name, f"at most {most_bytes} bytes", "more")
            return content
        return None

    def only(self, pattern: str) -> str:
        """Return the first file of a pattern; without one, the pattern, which does not name a file."""
        for place in self.places:
            listing = Listing(self.folder.path / place)
            names = sorted(name for name in listing.entries if fnmatchcase(name, pattern))
            if names:
                return names[0]
        return pattern

    def table(self, name: str) -> Json:
        value = self._json(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.damaged(name, "a JSON object", type(value).__name__)
        return value

    def modules(self, name: str) -> Sequence[tuple[str, str]]:
        """Return the kind and the folder of each module."""
        value = self._json(name)
        entries = [] if value is None else value
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict) and isinstance(entry.get("type"), str) and isinstance(entry.get("path", ""), str)
            for entry in entries
        ):
            raise self.damaged(name, 'a JSON list of modules with "type" and "path"', "something else")
        return [(entry["type"].rpartition(".")[2], entry.get("path", "")) for entry in entries]

    def _json(self, name: str) -> Any:
        content = self.read(name)
        if content is None:
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise self.damaged(name, "JSON", str(error)) from None

    def damaged(self, name: str, expected: str, got: str) -> ServeError:
        return invalid_argument(
            f"model '{self.model}': {PurePosixPath(name)} is damaged: expected {expected}, got {got}; export the model"
            " again, or remove the file"
        )
