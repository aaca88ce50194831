"""A HIP library for machines without a GPU: its device memory is memory of the host."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#include <stdlib.h>
#include <string.h>

static int pending;  /* What has been given to the device, and not been waited for. */

int hipMalloc(void **address, size_t bytes) {
  if (bytes > ((size_t)1 << 40)) return 2;
  *address = calloc(1, bytes);
  return *address ? 0 : 2;
}
int hipFree(void *address) { free(address); return 0; }
int hipMemcpy(void *to, const void *from, size_t bytes, int kind) {
  if (kind != 1 && kind != 2) return 21;
  if (kind == 2 && pending) return 1;
  pending = kind == 1;
  memcpy(to, from, bytes);
  return 0;
}
int hipDeviceSynchronize(void) { pending = 0; return 0; }
const char *hipGetErrorString(int error) { return error == 2 ? "out of memory" : "invalid argument"; }
"""


def host_hip(folder: Path) -> Path:
    """Compile the library. The test skips if there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, library = folder / "hip.c", folder / "libamdhip64.so.7"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library
