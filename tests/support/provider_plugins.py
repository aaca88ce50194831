"""Packages of ONNX Runtime's execution providers, real ones and one that a test compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_CHECKOUT = Path(__file__).parents[2]
_FOLDER = _CHECKOUT / ".provider-plugins"
_STUB = """
#include <stddef.h>
int of_migraphx(void);
void *CreateEpFactories(const char *name, const void *api, const void *log, void **made, size_t most, size_t *count) {
    *count = of_migraphx();
    return NULL;
}
void *ReleaseEpFactory(void *factory) { return NULL; }
"""


def provider_packages(name: str) -> Path:
    """The folder of `make provider-plugins` with a package: openvino, or migraphx (ONNX Runtime with the provider)."""
    folder = _FOLDER / name
    if not folder.is_dir():
        pytest.skip(f"{folder.relative_to(_CHECKOUT)} is not there; make provider-plugins makes it")
    return folder


def stub_of_amds_plugin(folder: Path) -> tuple[Path, Path]:
    """Compile a plugin for MIGraphX that has no devices. As AMD's, it needs two libraries of which its package does not
    say where they are. Returns the folder of the package, and a root with MIGraphX's library."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    root, package = folder / "root", folder / "packages" / "onnxruntime_ep_migraphx"
    for made in (root / "lib", folder / "onnxruntime", package):
        made.mkdir(parents=True)
    needed = (root / "lib" / "libmigraphx_c.so.3", folder / "onnxruntime" / "libonnxruntime.so.1")
    for library, function in zip(needed, ("of_migraphx", "of_onnxruntime"), strict=True):
        _compile(compiler, library, f"int {function}(void) {{ return 0; }}", f"-Wl,-soname,{library.name}")
    _compile(compiler, package / "libmigraphx-ep.so", _STUB, "-Wl,--no-as-needed", *map(str, needed))
    (package / "__init__.py").write_text(
        "from pathlib import Path\n"
        "def get_ep_names(): return ['MIGraphXExecutionProvider']\n"
        "def get_library_path(): return str(Path(__file__).with_name('libmigraphx-ep.so'))\n"
    )
    return package.parent, root


def run_python(script: str, *path: Path, **variables: str) -> str:
    """Run a script with these folders on Python's path, and return its output. Plugins stay in their process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **variables}
    command = [sys.executable, "-c", script]
    return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=100).stdout


def _compile(compiler: str, library: Path, source: str, *words: str) -> None:
    file = library.with_suffix(".c")
    file.write_text(source)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, file, *words], check=True)
