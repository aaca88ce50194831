"""AMD Inference Server's config.toml: one model, or the stages of a chain as [[models]]."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rocserve.config.amd.model import AmdModel, AmdTensor, parse_datatype
from rocserve.core.errors import ServeError, invalid_argument

_POSITION = re.compile(r" \(at (?:line (?P<line>\d+), column (?P<column>\d+)|end of document)\)$")
_MODEL_KEYS = {"name", "platform", "id", "inputs", "outputs"}
_TENSOR_KEYS = {"name", "datatype", "shape", "id"}


def parse_toml(text: str, source: str) -> dict[str, Any]:
    """The document of a TOML file.

    Raises:
        ServeError: INVALID_ARGUMENT with file, line and column.
    """
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _POSITION.search(str(error))
        last_line = text.split("\n")
        line = int(match["line"]) if match and match["line"] else len(last_line)
        column = int(match["column"]) if match and match["column"] else len(last_line[-1]) + 1
        reason = _POSITION.sub("", str(error))
        raise invalid_argument(f"{source}:{line}:{column}: {reason[:1].lower()}{reason[1:]}") from None
    except RecursionError:
        raise invalid_argument(f"{source}: nested too deeply") from None


def is_amd_toml(document: Mapping[str, Any]) -> bool:
    """Whether a TOML document is a model's configuration, and not some other file that lies beside it."""
    return "models" in document or {"name", "platform"} <= document.keys()


def read_amd_toml(document: Mapping[str, Any], source: str) -> tuple[tuple[AmdModel, ...], tuple[str, ...]]:
    """The models of a document in their order, and warnings about keys without meaning.

    Raises:
        ServeError: INVALID_ARGUMENT that names the key that is missing or wrong.
    """
    warnings: list[str] = []
    top = _Table(document, source, "", warnings)
    if "models" in document:
        top.warn_of_unknown({"models"})
        return tuple(_model(stage, id_required=True) for stage in top.tables("models")), tuple(warnings)
    return (_model(top, id_required=False),), tuple(warnings)


@dataclass(frozen=True, slots=True)
class _Table:
    """A TOML table, and where it stands in the document, for errors."""

    values: Mapping[str, Any]
    source: str
    path: str
    warnings: list[str]

    def string(self, key: str, *, required: bool = True) -> str:
        value = self.values.get(key)
        if value is None and not required:
            return ""
        if not isinstance(value, str) or (required and not value):
            raise self.wrong(key, "a string that is not empty", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.values.get(key)
        # bool is an int to isinstance.
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self.wrong(key, "an array of integers", value)
        return tuple(value)

    def tables(self, key: str) -> list[_Table]:
        value = self.values.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, f"an array of tables ([[{key}]]) with at least one", value)
        prefix = f"{self.path}.{key}" if self.path else key
        return [_Table(item, self.source, f"{prefix}[{index}]", self.warnings) for index, item in enumerate(value)]

    def warn_of_unknown(self, known: set[str]) -> None:
        unknown = sorted(set(self.values) - known)
        if unknown:
            self.warnings.append(f"{self.where}: keys without effect: {', '.join(unknown)}")

    def wrong(self, key: str, expected: str, value: object) -> ServeError:
        if value is None:
            return invalid_argument(f"{self.where}: the configuration must have '{key}', {expected}")
        return invalid_argument(f"{self.where}: '{key}' must be {expected}, got {value!r}")

    @property
    def where(self) -> str:
        return f"{self.source}: {self.path}" if self.path else self.source


def _model(table: _Table, *, id_required: bool) -> AmdModel:
    table.warn_of_unknown(_MODEL_KEYS)
    return AmdModel(
        name=table.string("name"),
        platform=table.string("platform"),
        id=table.string("id", required=id_required),
        inputs=tuple(_tensor(tensor) for tensor in table.tables("inputs")),
        outputs=tuple(_tensor(tensor) for tensor in table.tables("outputs")),
    )


def _tensor(table: _Table) -> AmdTensor:
    table.warn_of_unknown(_TENSOR_KEYS)
    return AmdTensor(
        name=table.string("name"),
        datatype=parse_datatype(table.string("datatype"), table.where),
        shape=table.integers("shape"),
        id=table.string("id", required=False),
    )
