"""What `rocserve serve WHAT` names: one model, by its file, the folder of its files or its model folder; or a
repository of models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rocserve.backends.registry import BackendRegistry
from rocserve.config.model_folder import ModelFolder, is_version_name
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.printable import printable_name
from rocserve.repository.scan import CONFIG_FILENAMES, is_temporary
from rocserve.settings.repository import SingleModel, WhatKind


def find_single_model(what: Path, name: str, registry: BackendRegistry) -> SingleModel | None:
    """The model at a path; None: it is a repository. `name`: the one that was given; "" = the configuration's, else the
    file's, else the folder's. Raises: OSError: the folder cannot be read."""
    what = what.absolute()
    if not what.is_dir():
        return SingleModel(WhatKind.FILE, what.parent, what.name, name or printable_name(what.stem), bool(name))
    try:
        file, is_flat = find_flat_file(what, registry), False
    except ServeError:
        # It may be one or the other; the scan says so.
        file, is_flat = "", True
    folders = [path.name for path in what.iterdir() if path.is_dir()]
    if not is_one_model(what, folders, is_flat or bool(file)):
        return None
    has_versions = any(map(is_version_name, folders))
    kind = WhatKind.FILES if not has_versions and (is_flat or file) else WhatKind.MODEL
    # Backends' own names for files say nothing of the model.
    is_telling = kind is WhatKind.FILES and file and file not in exact_filenames(registry)
    own = Path(file).stem if is_telling else what.name
    return SingleModel(kind, what, "", name or printable_name(own), bool(name))


def find_flat_file(folder: Path, registry: BackendRegistry) -> str:
    """The model's file among the files of a folder; "" = there is none.

    In this order: a backend's own name (model.onnx); the one file with an ending of models (resnet.onnx); the one file
    that fits a backend's pattern (*.json).

    Raises:
        ServeError: INVALID_ARGUMENT, it may be one or the other.
        OSError: the folder cannot be read.
    """
    names = sorted(path.name for path in folder.iterdir() if not is_temporary(path.name) and path.is_file())
    for known in exact_filenames(registry):
        if known in names:
            return known
    endings = tuple(ending for spec in registry.backends for ending in spec.file_endings)
    patterns = [name for spec in registry.backends for name in spec.model_filenames if "*" in name]
    for found in (
        [name for name in names if name.lower().endswith(endings)],
        [name for name in names if any(Path(name).match(pattern) for pattern in patterns)],
    ):
        if len(found) > 1:
            raise invalid_argument(
                f"'{folder}' holds several files that may be the model: {', '.join(found)}; name the one that is to be"
                f" served: rocserve serve {folder / found[0]}"
            )
        if found:
            return found[0]
    return ""


def exact_filenames(registry: BackendRegistry) -> tuple[str, ...]:
    """What the backends call their models' files."""
    return tuple(name for spec in registry.backends for name in spec.model_filenames if "*" not in name)


def model_endings(registry: BackendRegistry) -> tuple[str, ...]:
    """Of the files that may be served by their names."""
    return tuple(
        dict.fromkeys(
            ending
            for spec in registry.backends
            for ending in (*spec.file_endings, *(Path(name).suffix for name in spec.model_filenames))
        )
    )


def is_one_model(root: Path, folders: Sequence[str], is_flat: bool) -> bool:
    """Whether a folder is itself that of one model, `is_flat`: by its files, and not a repository of models.

    `folders`: the names of those in it.
    """
    has_config = _has_config(root)
    has_version = any(map(is_version_name, folders))
    if has_config and has_version:
        return True
    if any(is_model(root / name) for name in folders):
        return False
    return has_config or has_version or is_flat


def is_model(folder: Path) -> bool:
    """Whether a folder holds a configuration or a version."""
    return _has_config(folder) or bool(ModelFolder(folder).versions)


def _has_config(folder: Path) -> bool:
    return any((folder / name).is_file() for name in CONFIG_FILENAMES)
