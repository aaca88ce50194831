"""The parameters of a load request: a configuration and files that take the place of those in the repository."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from rocserve.core.errors import ServeError, internal, invalid_argument

_FILE_PREFIX = "file:"


@dataclass(frozen=True, slots=True)
class LoadParameters:
    config: str | None = None
    """A ModelConfig as JSON; None = the one in the repository."""
    files: Mapping[PurePosixPath, bytes] = field(default_factory=dict)
    """By the path in the model's folder; when there are any, no file of the repository is used."""


def parse_load_parameters(name: str, parameters: Mapping[str, bool | int | str | bytes]) -> LoadParameters:
    """Raises: ServeError INVALID_ARGUMENT for an unknown parameter, a wrong type or a path that is not allowed;
    INTERNAL for files without a configuration."""
    config: str | None = None
    files: dict[PurePosixPath, bytes] = {}
    for key, value in parameters.items():
        if key == "config":
            if not isinstance(value, str):
                raise wrong_type(key, "string_param")
            config = value
        elif key.startswith(_FILE_PREFIX):
            if not isinstance(value, bytes):
                raise wrong_type(key, "bytes_param")
            files[_file_path(name, key)] = value
        else:
            raise invalid_argument(f"unrecognized load parameter '{key}'.")
    if files and not config:
        raise internal(
            f"failed to load '{name}', failed to poll from model repository: files are given"
            f" ({', '.join(map(str, files))}) but no 'config'; give the configuration that goes with them too"
        )
    return LoadParameters(config, files)


def _file_path(name: str, key: str) -> PurePosixPath:
    text = key.removeprefix(_FILE_PREFIX)
    parts = text.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in text or "\\" in text:
        raise invalid_argument(
            f"failed to load '{name}', load parameter '{key}' must be 'file:<version>/<path>', or another path that"
            " stays in the model's folder"
        )
    return PurePosixPath(text)


def wrong_type(key: str, expected: str) -> ServeError:
    return invalid_argument(f"invalid value type for load parameter '{key}', expected {expected}.")
