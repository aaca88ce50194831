"""Starts a module of rocserve in any Python: `python bootstrap.py MODULE ARGUMENT...` calls its `main(arguments)`. A
model's own interpreter gets rocserve by its path, and none of the server's other packages (no PYTHONPATH, no
site-packages). This file runs before rocserve can be imported; a Python that is too old can parse it and says so."""

import gc
import importlib
import importlib.util
import sys
from pathlib import Path


def _import_rocserve_from(folder: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "rocserve", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["rocserve"] = package
    spec.loader.exec_module(package)


if __name__ == "__mp_main__":
    # A child that a model spawns by multiprocessing runs this file under this name, and may import rocserve.
    _import_rocserve_from(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    # Python puts a script's folder first in the path, but the modules here are not top-level modules.
    sys.path[:] = [entry for entry in sys.path if entry != str(here)]
    # Checked first, because otherwise an import would fail inside some module.
    if sys.version_info < (3, 11):  # noqa: UP036, any Python may have been named.
        sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, a worker needs at least 3.11")
    if importlib.util.find_spec("numpy") is None:
        sys.exit(
            f"{sys.executable} has no numpy, which a worker needs; install it: {sys.executable} -m pip install numpy"
        )
    _import_rocserve_from(here.parent)
    # Imported objects stay, so garbage collections during the imports would waste an eighth of the time.
    gc.disable()
    module = importlib.import_module(sys.argv[1])
    gc.enable()
    sys.exit(module.main(sys.argv[2:]))
