"""Errors of MIGraphX that no server here can run into."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import migraphx_models
from support.migraphx import run_with_migraphx
from support.migraphx_error_texts import index_text
from support.migraphx_serving import compiled

from rocserve.backends.migraphx.compiling.child_process import with_hint
from rocserve.backends.migraphx.compiling.recipe import ProgramEnvironment
from rocserve.backends.migraphx.mxr_file import check_mxr
from rocserve.backends.migraphx.options import Target
from rocserve.core.errors import ServeError


def test_another_gpu_architecture(migraphx_root: Path, tmp_path: Path) -> None:
    program = compiled(migraphx_root, migraphx_models.mlp(), tmp_path).replace(b"\xa3ref", b"\xa3gpu")
    file = tmp_path / "model.mxr"
    file.write_bytes(program + b"amdgcn-amd-amdhsa--gfx90a\0")
    here = ProgramEnvironment("2.14.0", gpu_architecture="gfx942:sramecc+:xnack-")
    with pytest.raises(ServeError) as refused:
        check_mxr(file, here, Target.GPU)
    assert index_text("another GPU architecture").fits(refused.value.text), refused.value.text


def test_a_gpu_that_migraphx_does_not_find() -> None:
    """The words of MIGraphX's source, after the server's words for a failed compile."""
    message = with_hint("src/targets/gpu/device_name.cpp:60: get_device_id: No device")
    reason = f"compiling batch size 1 of model 'x' failed while compiling: MIGraphX says: {message}"
    assert index_text("a GPU that MIGraphX does not find").fits(reason), reason


_IMPORTS = """
import sys
import rocserve.backends.migraphx.engine
import rocserve.jobs.child, rocserve.backends.migraphx.compiling.probe_jobs
from rocserve.backends.migraphx.python_module import open_binding
from rocserve.backends.migraphx.installation import find_installation
from rocserve.settings import EngineSettings
open_binding(find_installation(EngineSettings()))
print([name for name in sys.modules if name.partition(".")[0] == "torch"])
"""


def test_torch_is_not_imported_beside_migraphx(migraphx_root: Path) -> None:
    assert run_with_migraphx(migraphx_root, _IMPORTS).stdout == "[]\n"
