"""Imports a model's model.py, so that what lies beside it can be imported too."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType

from rocserve.backends.python.pb_utils import MODULE_NAMES

_FOR_CHILDREN = Path(__file__).with_name("spawned")


class SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles anew on each import: nothing is written into the repository, and no old bytecode is taken for new.

    Python tells bytecode's age by whole seconds, which a swap of models may well be within.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


def import_model(model_file: Path, model_folder: Path, utilities: ModuleType) -> ModuleType:
    """The module `<version>.<file's name>`, as Triton calls it; `utilities` is its `triton_python_backend_utils`.

    The version's folder and the model's are appended to sys.path, and the version's folder is a package, so that a
    file beside model.py can be imported by its name or relatively. Children that multiprocessing spawns inherit the
    path and find their own `triton_python_backend_utils` there. For a process that has one model.

    Raises:
        Whatever the file raises.
    """
    version_folder = model_file.parent
    sys.modules.update(dict.fromkeys(MODULE_NAMES, utilities))
    # Triton has a model see no arguments; a model that parses a command line is not to find the worker's there.
    sys.argv = [""]
    _import_afresh_from(model_folder)
    for folder in (version_folder, model_folder, _FOR_CHILDREN):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    package = ModuleType(version_folder.name)
    package.__path__ = [str(version_folder)]
    sys.modules[package.__name__] = package
    name = f"{package.__name__}.{model_file.stem}"
    loader = SourceLoader(name, str(model_file))
    spec = importlib.util.spec_from_file_location(name, model_file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader.exec_module(module)
    return module


def _import_afresh_from(model_folder: Path) -> None:
    """Use SourceLoader for all sources of the model, but not for an environment that it may have brought along."""
    environment = Path(sys.prefix)
    details = (
        (importlib.machinery.ExtensionFileLoader, importlib.machinery.EXTENSION_SUFFIXES),
        (SourceLoader, importlib.machinery.SOURCE_SUFFIXES),
        (importlib.machinery.SourcelessFileLoader, importlib.machinery.BYTECODE_SUFFIXES),
    )

    def find_in(path: str | os.PathLike[str]) -> importlib.machinery.FileFinder:
        folder = Path(path)
        if not folder.is_relative_to(model_folder) or folder.is_relative_to(environment):
            raise ImportError("not a folder of the model", path=str(path))
        return importlib.machinery.FileFinder(str(path), *details)

    sys.path_hooks.insert(0, find_in)
