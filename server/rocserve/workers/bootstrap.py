"""Starts a module of rocserve in any Python: `python bootstrap.py MODULE ARGUMENT...` calls its `main(arguments)`.

A model may bring an interpreter with packages of its own. It gets rocserve from here, by its place, and nothing else of
the server's packages: no PYTHONPATH, no site-packages of the server's. Runs before rocserve can be imported, and is
written so that Pythons of long ago can read it: one that is too old is to say so.
"""

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
    # A child that a model has spawned by multiprocessing runs the parent's main file under this name. It needs rocserve
    # for what the model's file imports.
    _import_rocserve_from(Path(__file__).resolve().parent.parent)

if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    # Python puts a script's own folder first; its modules' names are no top-level names.
    sys.path[:] = [entry for entry in sys.path if entry != str(here)]
    # What an interpreter that a model brings lacks is said before an import fails in some module of ours.
    if sys.version_info < (3, 11):  # noqa: UP036, any Python may have been named.
        sys.exit(f"{sys.executable} is Python {sys.version.split()[0]}, a worker needs at least 3.11")
    if importlib.util.find_spec("numpy") is None:
        sys.exit(
            f"{sys.executable} has no numpy, which a worker needs; install it: {sys.executable} -m pip install numpy"
        )
    _import_rocserve_from(here.parent)
    # What is imported stays: the collector would look at all of it again and again, an eighth of the time.
    gc.disable()
    module = importlib.import_module(sys.argv[1])
    gc.enable()
    sys.exit(module.main(sys.argv[2:]))
