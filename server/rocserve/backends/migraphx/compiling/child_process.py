"""Runs a job in a child process that has loaded MIGraphX, and adds remedies to MIGraphX's errors."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from rocserve.backends.migraphx.binding import MigraphxError, ModelRefused
from rocserve.backends.migraphx.installation import MigraphxInstallation, python_command
from rocserve.backends.migraphx.python_module import open_binding
from rocserve.core.errors import unavailable
from rocserve.core.plain import from_json, to_json
from rocserve.jobs.child import main
from rocserve.jobs.hints import MACHINE_HINTS, add_hint, read_hints
from rocserve.jobs.messages import Report
from rocserve.jobs.runner import JobEngine


def with_hint(message: str, compiles: bool = False) -> str:
    """Append a remedy to the message, if one is known. `compiles`: MIGraphX read a model, not a compiled program."""
    of_mxr = read_hints(_OF_MXR) if compiles else {}
    return add_hint(message, {pattern: remedy for pattern, remedy in HINTS.items() if pattern not in of_mxr})


_OF_MODEL = r"""
# The model
Unknown operator
    this MIGraphX does not know the operator: export the model without it or with another opset, use a newer MIGraphX,
    or OTHER_ENGINE
# MIGraphX reports unknown TensorFlow operators only when the program runs.
Operator not found: unknown:
    this MIGraphX does not know the TensorFlow operator: write the graph without it, use a newer MIGraphX, or convert
    the graph to ONNX
cannot load what it has saved
    MIGraphX lacks a part of the program when it loads it: use another version of MIGraphX, or, for an ONNX model,
    OTHER_ENGINE
Prototensor data type \S+ not supported
    MIGraphX has no tensors of this datatype (8 is STRING): take them out of the graph, or OTHER_ENGINE
Failed reading onnx file
    the file is damaged, incomplete or not an ONNX model; check it with onnx.checker.check_model and copy it again
invalid onnx file
    the graph is inconsistent: the file is damaged, or its exporter is faulty; check it with onnx.checker.check_model
    and export it again
Wrong number of elements for reshape|COMPUTE_BROADCASTLEN|[Dd]imensions do not match|Inconsistent \w+ size
    shapes do not match: the file may be damaged, or the graph may need other sizes than those of batch_sizes,
    input_shapes and the configuration's dims
Failure opening file|Invalid size for
    the file is missing or empty; copy it again
[Dd]ynamic.*not (?:yet )?supported|not support.*dynamic|called on a dynamic shape
    MIGraphX does not support a varying dimension here: give every symbolic dimension a size in input_shapes
"""
_OF_MXR = r"""
# The .mxr
Program version mismatch
    it was written by another version of MIGraphX: compile it again with the one that is installed, or serve the ONNX
    file
Not an object for field|insufficient bytes|bad_cast|Key not found|Incompatible values|Operator not found|map::at
No key '
    the .mxr is damaged or not a compiled program: copy it or compile it again
"""
_OF_GPU = r"""
# The GPU and the access to it
\bNo device\b|no ROCm-capable device|hipErrorNoDevice|Failed to get device properties|hipErrorInvalidDevice
    no AMD GPU can be used by this process: check `rocminfo`, that /dev/kfd and /dev/dri are there and readable (groups
    render and video; in a container --device=/dev/kfd --device=/dev/dri), HIP_VISIBLE_DEVICES and instance_group gpus;
    without a GPU set parameter 'target' to "ref" or "cpu"
Dynamic loading or symbol lookup failed with libmigraphx_(?P<target>gpu|cpu|ref)\.so
    this installation of MIGraphX lacks the target: install the package that has the library, or set parameter 'target'
    to another (gpu, cpu, ref)
NoBinaryForGpu|no kernel image is available|code object is not supported|Missing CO for these ISAs
hipErrorInvalidKernelFile|invalid device image
    the program, or a ROCm library, was built for another GPU architecture: compile it on this GPU; if ROCm does not
    support the architecture, set HSA_OVERRIDE_GFX_VERSION to a close one
Memory not available to allocate|Gpu allocation failed|hipErrorOutOfMemory|HIP out of memory|out of memory
OUT_OF_RESOURCES|hipErrorMemoryAllocation
    the GPU's memory does not suffice: use a smaller max_batch_size or batch_sizes, precision fp16, or a GPU with more
    free memory (`rocm-smi --showmeminfo vram`)
"""
_AFTER_MACHINE = r"""
Failed to allocate stream|Failed getting available memory|Error setting device|hipErrorNotInitialized
    the GPU cannot be used: check `rocminfo` and the kernel's log; the versions of the amdgpu driver, ROCm and MIGraphX
    must fit each other
Memory access fault by GPU|HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION|Page not present
    the program read or wrote outside its memory on the GPU: it may have been compiled for another GPU or with another
    offload_copy; compile it again (`rocserve cache prune` empties the cache), or use another version of MIGraphX
# The compilers for the GPU
HIPRTC_ERROR|hiprtc|Unknown hip compiler|Code object build failed|comgr
    ROCm's compiler failed: the versions of ROCm and MIGraphX must fit each other, the temporary folder must have room,
    and torch must not be imported in the same process
No configs to tune|No valid tuned compilation|problem_cache|Benchmarking failed
    MIGraphX has no kernel for this GPU: remove exhaustive_tune, or use a newer MIGraphX
[Ii]nvalid MLIR|rocMLIR|run_high_level_pipeline|run_backend_pipeline|tosa\.|rock\.
    MIGraphX's kernel generator failed on this graph and GPU: set MIGRAPHX_DISABLE_MLIR=1 in the server's environment,
    use a newer MIGraphX, or OTHER_ENGINE
MIOpen|miopen
    MIOpen failed: its database may be damaged (the folder `miopen` in the cache directory may be removed) or of another
    version of ROCm
cannot open shared object file|undefined symbol|version `\S+' not found
    a library that MIGraphX needs is missing or of another version; `rocserve doctor` says which are found
# General
^MIGraphX ended by signal
    MIGraphX crashes on this model: if the file is damaged, copy or export it again; else use another version of
    MIGraphX, or, for an ONNX model, OTHER_ENGINE
"""

HINTS = {
    pattern: remedy.replace("OTHER_ENGINE", "parameter 'engine' \"onnxruntime\" serves it with ONNX Runtime")
    for hints in (*map(read_hints, (_OF_MODEL, _OF_MXR, _OF_GPU)), MACHINE_HINTS, read_hints(_AFTER_MACHINE))
    for pattern, remedy in hints.items()
}
"""Patterns -> remedies. The first pattern that matches is used: specific patterns come before general ones."""


@dataclass(frozen=True, slots=True)
class _Library:
    installation: MigraphxInstallation
    binding: str


def migraphx_jobs(installation: MigraphxInstallation, binding: str = "auto") -> JobEngine:
    context = to_json(_Library(installation, binding)).decode()
    return JobEngine("MIGraphX", __name__, tuple(python_command(installation)), context, with_hint)


def perform(job: Any, context: str, report: Report) -> Any:
    """Run the job. Raises ServeError if MIGraphX refuses the job, or cannot be loaded."""
    library = from_json(_Library, context.encode())
    try:
        binding = open_binding(library.installation, library.binding)
    except MigraphxError as error:
        raise unavailable(f"MIGraphX cannot be loaded: {with_hint(str(error))}") from None
    try:
        return job.perform(binding, report)
    except MigraphxError as error:
        compiles = getattr(job, "recipe", None) is not None
        failure = unavailable(f"MIGraphX says: {with_hint(str(error), compiles)}")
        raise failure.lasting() if isinstance(error, ModelRefused) else failure from None


if __name__ == "__main__":
    main(sys.argv[1:], perform)
