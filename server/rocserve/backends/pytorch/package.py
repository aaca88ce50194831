"""Opens packages of AOTInductor, and compares their machine with this one.

PyTorch's own loader compares the machines, too, but it makes the C++ compiler test this processor's instruction sets in
every process that loads a package.
"""

from __future__ import annotations

import logging
import platform
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rocserve.backends.pytorch.exported_file import environment, import_classes, read_fault
from rocserve.backends.pytorch.package_source import package_name, read_metadata, read_source
from rocserve.backends.pytorch.program import Program, argument_paths, without_shapes
from rocserve.cache.temporary_folder import TemporaryFolder, remove_left
from rocserve.core.errors import ServeError, invalid_argument, unavailable


def unpacked(load: Callable[[], Any]) -> Any:
    """Call `load` with a separate folder for temporary files, which is deleted when nothing refers to the result any
    more; if the process was killed, by the next load. PyTorch itself deletes the files that it unpacks there only if
    the process ends normally."""
    remove_left("rocserve-package-")
    folder = TemporaryFolder("rocserve-package-")
    try:
        with environment("TMPDIR", str(folder.path)):
            package = load()
    except BaseException:
        folder.remove()
        raise
    weakref.finalize(package, folder.remove)
    return package


def open_package(path: Path, device: torch.device | None, checks: bool = True) -> Program:
    """Open a package of AOTInductor. `device`: None = the first device of the kind that the package was compiled for;
    inputs are moved there. `checks`: whether inputs are compared with the package's source. Raises ServeError
    (INVALID_ARGUMENT) if PyTorch cannot load the package, or if inputs shall be checked and the source is missing,
    ServeError (UNAVAILABLE) if the package is compiled for another kind of device."""
    index = -1 if device is None or device.index is None else device.index
    name = package_name(path)
    try:
        if (device is None or device.type != "cpu") and torch.cuda.is_available():
            torch.cuda.init()
        # Logged first, because such code may end the process as soon as it is loaded. The reason of the failed load
        # then has the worker's last line.
        if lacking := missing_features(read_metadata(path, name), index):
            logging.getLogger(__name__).warning(
                "%s is compiled for %s, which this machine lacks: its code may not run here, or end the worker; compile"
                " it on a machine like this one",
                path,
                ", ".join(lacking),
            )
        # torch._inductor.aoti_load_package would first import all of Inductor and run the C++ compiler. One call runs
        # at a time.
        loader = unpacked(lambda: torch._C._aoti.AOTIModelPackageLoader(str(path), name, False, 1, index))
        metadata = loader.get_metadata()
        compiled_for = metadata.get("AOTI_DEVICE_KEY", "cpu" if device is None else device.type)
        call_spec = loader.get_call_spec()
        import_classes(path.name, call_spec)
        in_spec, out_spec = map(pytree.treespec_loads, call_spec)
    except ServeError:
        raise
    except Exception as error:
        raise read_fault(path, error) from error
    if device is not None and compiled_for != device.type:
        raise unavailable(
            f"{path.name} is compiled for PyTorch's device '{compiled_for}', but the instance is on '{device.type}';"
            " change the kind of the instance group, or compile the program for this device"
        )
    paths = argument_paths(in_spec)
    source = read_source(path, name) if checks else None
    if source is not None and len(source.inputs) != len(paths):
        raise invalid_argument(f"{path.name} has inputs that are not tensors; compile the program without them")

    def call(values: Sequence[Any]) -> Any:
        if source is not None:
            source.check_sizes(paths, values)
        own = values if device is not None else [value.to(compiled_for) for value in values]
        return pytree.tree_unflatten(loader.boxed_run(list(own)), out_spec)

    signature = without_shapes([(f"INPUT__{position}", argument) for position, argument in enumerate(paths)])
    if source is None:
        return Program(call, signature, (compiled_for,))
    tensors = zip(signature.inputs, source.inputs, strict=True)
    inputs = tuple(replace(tensor, sample=own.sample, open_sizes=own.open_sizes) for tensor, own in tensors)
    signature = replace(signature, inputs=inputs, most_rows=source.most_rows)
    return Program(call, signature, (compiled_for,), source.check)


def missing_features(metadata: Mapping[str, str], gpu: int) -> list[str]:
    """Return a package's requirements that this machine lacks. `gpu`: the GPU's number; -1 = the first."""
    own = {"AOTI_PLATFORM": sys.platform, "AOTI_MACHINE": platform.machine()}
    found = [metadata[key] for key, here in own.items() if metadata.get(key, here) != here]
    if not found:
        # PyTorch's name of an instruction set -> the function of torch.cpu that tells whether this processor has it.
        functions = {
            "AVX2": "_is_avx2_supported",
            "AVX512": "_is_avx512_supported",
            "AVX512_VNNI": "_is_vnni_supported",
            "AMX_TILE": "_is_amx_tile_supported",
        }
        for name in metadata.get("AOTI_CPU_ISA", "").split():
            is_supported: Any = getattr(torch.cpu, functions.get(name, ""), None)
            if is_supported is not None and not is_supported():
                found.append(name)
    capability = metadata.get("AOTI_COMPUTE_CAPABILITY", "")
    if capability and torch.cuda.is_available():
        if torch.version.hip is not None:
            own_capability = str(torch.cuda.get_device_properties(max(gpu, 0)).gcnArchName).partition(":")[0]
        else:
            major, minor = torch.cuda.get_device_capability(max(gpu, 0))
            own_capability = str(10 * major + minor)
        if capability != own_capability:
            found.append(f"compute capability {capability}")
    return found
