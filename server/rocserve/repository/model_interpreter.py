"""The Python that runs a model's workers: the server's own, or one that the model brings.

Triton's parameter EXECUTION_ENV_PATH names it; `$$TRITON_MODEL_DIRECTORY` in it is the model's folder. There it is an
archive that conda-pack made; here a virtual environment, or its interpreter.
"""

from __future__ import annotations

import os
from pathlib import Path

from rocserve.config.definition import ModelDefinition
from rocserve.core.errors import ServeError, invalid_argument

PARAMETER = "EXECUTION_ENV_PATH"

_MODEL_FOLDER = "$$TRITON_MODEL_DIRECTORY"
_ARCHIVES = (".tar.gz", ".tgz", ".tar", ".tar.bz2", ".tar.xz", ".zip")


def model_interpreter(definition: ModelDefinition) -> str:
    """The interpreter's path; empty for the server's own.

    Raises:
        ServeError: INVALID_ARGUMENT, what the parameter names is no Python.
    """
    written = definition.config.parameters.get(PARAMETER, "")
    if not written or definition.backend is None or not definition.backend.answers_requests:
        return ""
    path = Path(definition.folder, written.replace(_MODEL_FOLDER, str(definition.folder)))
    if path.name.lower().endswith(_ARCHIVES):
        raise _refusal(
            definition,
            f"'{written}' is an archive; unpack it, and name the folder of the environment or its interpreter",
        )
    interpreter = path / "bin" / "python" if path.is_dir() else path
    if not interpreter.is_file():
        raise _refusal(definition, f"there is no Python at {interpreter}; make it with: python3 -m venv {path}")
    if not os.access(interpreter, os.X_OK):
        raise _refusal(definition, f"{interpreter} cannot be executed")
    # Not resolved: the interpreter of a virtual environment is a link, and its place says which environment it is.
    return str(interpreter.absolute())


def _refusal(definition: ModelDefinition, reason: str) -> ServeError:
    return invalid_argument(f"model '{definition.name}': parameter {PARAMETER}: {reason}")
