"""Runs programs of torch.export on an AMD GPU after torch_migraphx has lowered them to MIGraphX within PyTorch: the
engine migraphx.

MIGraphX compiles each shape, so batches run at fixed sizes. A child process lowers the program for all sizes before the
model is READY. The files that torch_migraphx saves are kept in the cache.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rocserve.backends.base import LoadedModel, ModelSource
from rocserve.backends.batch_sizes import MOST_SIZES
from rocserve.backends.installed import is_installed
from rocserve.backends.pytorch.binding import BoundProgram, bind, no_trial
from rocserve.backends.pytorch.comparison import (
    COMPARISON_FILE,
    Comparison,
    EagerReference,
    compared,
    program_call,
)
from rocserve.backends.pytorch.datatypes import torch_dtype
from rocserve.backends.pytorch.eager import set_up
from rocserve.backends.pytorch.exported_file import read_exported
from rocserve.backends.pytorch.job_files import machine_parts
from rocserve.backends.pytorch.model import TorchModel, fixed_batch_sizes
from rocserve.backends.pytorch.model_check import ModelCheck
from rocserve.backends.pytorch.model_file import engine_in_errors, require_exported
from rocserve.backends.pytorch.program import DTYPES, Program, ProgramTensor, open_exported
from rocserve.backends.pytorch.results import outputs_of
from rocserve.cache.folders import cache_directory, make_private
from rocserve.core.errors import ServeError, unavailable
from rocserve.core.plain import to_json
from rocserve.jobs.messages import Report
from rocserve.settings import EngineSettings

_TOLERANCES = {"fp32": 0.02, "fp16": 0.02, "bf16": 0.15, "int8": 0.11}
"""The largest relative error that counts as rounding, by precision.

The limits are four times the largest measured error, rounded to two digits, so that deeper networks pass; mixed-up
tensors are about 1 apart. `python -m benchmarks.rounding` measures on the CPU, for the networks of the quantisation
page and an untrained ResNet-50:

          digits   text     shapes   lite0    ResNet-50
    fp32  0.0004   0.0001   0.0012   0.0050   0.0004      factors of products in ten bits, as on some GPUs
    fp16  0.0004   0.0003   0.0013   0.0049   0.0004
    bf16  0.0051   0.0025   0.012    0.037    0.0034
    int8  0.0010   0.0006   0.022    0.027    0.0028      quantised statically, by ONNX Runtime and by PyTorch
"""
_REVISION = "3"
"""Increase it when the files' content changes for a reason other than torch_migraphx."""

Shapes = tuple[tuple[int, ...], ...]
"""The shapes of all inputs, in the program's order."""
Compiler = Callable[[Any, Sequence[Any]], Any]
"""Compiles for torch.compile: takes a graph and its inputs, and returns the callable that replaces the graph."""


def load(model: ModelSource) -> LoadedModel:
    """Load a model; `parameters` describes its parameters. Raises ServeError (INVALID_ARGUMENT) if the file or the
    configuration is wrong, ServeError (UNAVAILABLE) if torch_migraphx or a GPU is missing, or torch_migraphx cannot
    lower the program."""
    require_exported(model, "migraphx")
    _, asks = engine_in_errors(model, "migraphx")
    if not is_installed("torch_migraphx"):
        raise unavailable(
            f"model '{model.name}': {asks} needs torch_migraphx, which is not installed; pip install torch_migraphx"
            ' beside PyTorch for ROCm, or use "migraphx-onnx"'
        )
    options, device = set_up(model)
    if device.type == "cpu":
        raise unavailable(
            f"model '{model.name}': {asks} runs programs on AMD GPUs only, but the instance is on the CPU; use KIND_GPU"
            ' instances, or "eager" or "migraphx-onnx"'
        )
    build_in_cache(model.settings)
    exported = read_exported(model.model_file, device)
    original = open_exported(exported)
    bound = bind(original, model.config, no_trial)
    check = ModelCheck(model, device, options.precision)
    if check.asks_for_rows(bound):
        check.check_rows_here(bound, original, program_call(original, device))
    shapes = shapes_to_lower(bound, fixed_batch_sizes(model.config, bound) if check.allows_padding else ())
    folder = lowered_folder(model, options.precision, device, shapes, check)
    # Import only after the child process: the first import builds the C++ part, and only there it has a time limit.
    import_lowering()
    lowered = {one: folder / _file(index) for index, one in enumerate(shapes)}
    program = open_lowered(exported, options.precision, lowered)
    properties = {"program": "lowered by torch_migraphx"}
    return TorchModel(model, program, options, device, properties, captures=False, check=lambda bound: check)


def build_in_cache(settings: EngineSettings) -> None:
    """Make this process and its children build torch_migraphx's C++ part in the cache. The first import builds it, and
    a worker may be unable to write anywhere else. Raises ServeError (UNAVAILABLE) if other users may have put files
    there, because the files are run; OSError if the folder cannot be made."""
    folder = cache_directory(settings) / "torch-extensions" / f"{torch.__version__}-{sys.implementation.cache_tag}"
    # PyTorch's variable for its build folder. If the server's environment sets it, it replaces the cache's folder.
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        make_private(folder)
        os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def import_lowering() -> None:
    """Import torch_migraphx, which registers its compiler. Raises ServeError (UNAVAILABLE) if it cannot be imported: it
    needs MIGraphX's module, and older parts of PyTorch."""
    try:
        importlib.import_module("torch_migraphx")
    except Exception as error:
        raise unavailable(f"torch_migraphx cannot be imported with PyTorch {torch.__version__}: {error}") from error


def shapes_to_lower(bound: BoundProgram, sizes: Sequence[int]) -> tuple[Shapes, ...]:
    """Return the shapes to lower before the first request: those of each batch size; without sizes, the samples."""
    return tuple((*((size, *shape[1:]) for shape in bound.samples),) for size in sizes) or (bound.samples,)


def lowered_folder(
    model: ModelSource, precision: str, device: torch.device, shapes: tuple[Shapes, ...], check: ModelCheck
) -> Path:
    """Return the folder with a lowered program for each of `shapes`, by position. Raises as
    `ModelCheck.compiled_folder`."""

    def job(folder: Path) -> LoweringJob:
        return LoweringJob(
            model.name, str(model.model_file), str(folder), str(device), precision, shapes, check.seconds
        )

    version = ""
    with suppress(ImportError):  # The child process reports a missing module.
        version = str(getattr(importlib.import_module("migraphx"), "__version__", ""))
    parts = (
        _REVISION,
        importlib.metadata.version("torch_migraphx"),
        version,
        precision,
        repr(shapes),
        *machine_parts(device),
    )
    return check.compiled_folder("torch-migraphx", "torch_migraphx", parts, job)


def open_lowered(exported: Any, precision: str, lowered: Mapping[Shapes, Path], saves: bool = False) -> Program:
    """Open a program that runs lowered, separately for each set of shapes. Shapes that are not in `lowered` are lowered
    when a request first has them; the `MOST_SIZES` most recently used of these are kept. `lowered`: the files by
    shapes. `saves`: whether the files are written instead of read. If the results for shapes not in `lowered` differ
    too much from PyTorch's, each call with them raises ServeError (UNAVAILABLE)."""
    options: Mapping[str, Any] = {precision: True} if precision in DTYPES else {}

    def compiled(module: Any) -> Callable[..., Any]:
        by_shapes: OrderedDict[Shapes, Callable[..., Any]] = OrderedDict()
        code_objects: dict[Shapes, CodeType] = {}
        """PyTorch keeps compiled code with the code object that it was compiled from, and runs a code object
        operator by operator from its ninth shape on. So each shape has a separate code object, which is dropped with
        the shape."""

        def compile_for(shapes: Shapes, values: Any) -> Callable[..., Any]:
            file = lowered.get(shapes)
            compiler = _lowering(options, file) if saves or file is None else _loaded(file)
            forward = module.forward.__func__
            code_objects[shapes] = forward.__code__.replace()
            function = FunctionType(code_objects[shapes], forward.__globals__, argdefs=forward.__defaults__)
            function.__kwdefaults__ = forward.__kwdefaults__
            # fullgraph, because a file holds one whole graph; it leaves out the module's own checks of inputs.
            run: Callable[..., Any] = torch.compile(
                MethodType(function, module), backend=compiler, fullgraph=True, dynamic=False
            )
            if file is None:
                (args, kwargs), (others, by_name) = (
                    pytree.tree_map_only(torch.Tensor, torch.clone, values) for _ in range(2)
                )
                found, expected = outputs_of(run(*args, **kwargs)), outputs_of(module(*others, **by_name))
                try:
                    _check(found, expected, {precision, *program.signature.precision.split(", ")})
                except ServeError as error:
                    return partial(_refuse, error.text)
            return run

        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = pytree.tree_leaves((args, kwargs))
            shapes = tuple(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
            if shapes not in by_shapes:
                by_shapes[shapes] = compile_for(shapes, (args, kwargs))
                unlisted = [one for one in by_shapes if one not in lowered]
                if len(unlisted) > MOST_SIZES:
                    del by_shapes[unlisted[0]]
                    torch._dynamo.reset_code(code_objects.pop(unlisted[0]))
            by_shapes.move_to_end(shapes)
            return by_shapes[shapes](*args, **kwargs)

        return call

    program = open_exported(exported, None, compiled)
    return replace(program, signature=replace(program.signature, precision=precision)) if options else program


def _refuse(text: str, *args: Any, **kwargs: Any) -> Any:
    raise unavailable(text)


def _lowering(options: Mapping[str, Any], saved: Path | None) -> Compiler:
    """Return torch_migraphx's compiler with these options. `saved`: the file to write; None = no file."""
    lower = torch._dynamo.lookup_backend("migraphx")

    def compile_graph(graph: Any, inputs: Sequence[Any]) -> Any:
        result = lower(graph, inputs, options=dict(options))
        for name, child in result.named_children():
            if hasattr(child, "input_mgx_shapes"):
                setattr(result, name, LaidOut(child))
        if saved is not None:
            # Like torch_migraphx's option save_compiled, but without the tracer. If there are no constants to fold,
            # PyTorch would trace the loaded module with that tracer, which looks into MIGraphX's programs.
            result._tracer_cls = None
            torch.save(result, saved, pickle_protocol=4)
        return result

    return compile_graph


class LaidOut(torch.nn.Module):  # type: ignore[misc]
    """Wraps a MIGraphX program, and gives inputs the memory layout that the program was compiled for. torch_migraphx
    passes only addresses and ignores strides, which differ if another program has made the inputs."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        self.program = program
        self._strides = tuple(tuple(shape.strides()) for shape in program.input_mgx_shapes)

    def forward(self, *inputs: Any) -> Any:
        return self.program(*map(_laid_out, inputs, self._strides))


def _laid_out(value: Any, strides: tuple[int, ...]) -> Any:
    if all(size == 1 or own == wanted for size, own, wanted in zip(value.shape, value.stride(), strides, strict=False)):
        return value
    copied = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    # A stride of 0 means equal values along the dimension, so one of them is copied.
    slices = tuple(slice(1) if stride == 0 else slice(None) for stride in strides)
    copied[slices].copy_(value[slices])
    return copied


def _loaded(file: Path) -> Compiler:
    """Return a compiler that loads a lowered program. torch_migraphx's option load_compiled reads the same file, but
    during PyTorch's compile: the weights of operators that MIGraphX lacks, which PyTorch runs, would then have no
    values."""
    result = torch.load(file, weights_only=False)
    return lambda graph, inputs: result


@dataclass(frozen=True, slots=True)
class LoweringJob:
    model_name: str
    model_file: str
    folder: str
    device: str
    """PyTorch's name, e.g. "cuda:0"."""
    precision: str
    shapes: tuple[Shapes, ...]
    check_seconds: float = 0.0
    """For the comparison with PyTorch; 0 = none."""

    @property
    def title(self) -> str:
        return f"lowering model '{self.model_name}' with torch_migraphx"

    def perform(self, report: Report) -> None:
        """Lower the program, and compare it with PyTorch. Raises ServeError if it cannot be lowered."""
        report("importing torch_migraphx")
        import_lowering()
        report("reading the program")
        device = torch.device(self.device)
        exported = read_exported(Path(self.model_file), device)
        lowered = {shapes: Path(self.folder) / _file(index) for index, shapes in enumerate(self.shapes)}
        program = open_lowered(exported, self.precision, lowered, saves=True)
        for shapes in self.shapes:
            report(f"lowering it for inputs of {', '.join('x'.join(map(str, shape)) for shape in shapes)}")
            inputs = trial_inputs(program.signature.inputs, shapes, device)
            try:
                with torch.no_grad():  # Weights become constants of the lowered program only without gradients.
                    program.call(inputs)
            except Exception as error:
                raise unavailable(f"torch_migraphx cannot lower it: {error}") from error
        if self.check_seconds:
            found = self._compared(program, device, report)
            (Path(self.folder) / COMPARISON_FILE).write_bytes(to_json(found))

    def _compared(self, program: Program, device: torch.device, report: Report) -> Comparison:
        """Compare the program of each size with PyTorch, on inputs of exactly its shapes."""
        reference = EagerReference(Path(self.model_file), self.check_seconds)
        names = [spec.name for spec in reference.bound.inputs]
        inner = [shape[1:] if reference.batches else shape for shape in self.shapes[0]]
        reference.with_sizes(dict(zip(names, inner, strict=True)), reference.batches)
        rows = [shapes[0][0] if reference.batches else 0 for shapes in self.shapes]
        candidates = [(own, lambda: program) for own in rows]
        return compared(reference, candidates, device, self.precision, report, checks_rows=False)


def trial_inputs(tensors: Sequence[ProgramTensor], shapes: Shapes, device: torch.device) -> list[Any]:
    """Make inputs: random floats, and zeros for all other datatypes, because integers may be indices."""
    chance = torch.Generator().manual_seed(1)
    values = []
    for tensor, shape in zip(tensors, shapes, strict=True):
        assert tensor.datatype is not None, "programs of torch.export say them"
        dtype = torch_dtype(tensor.datatype)
        value = torch.randn(shape, generator=chance) if dtype.is_floating_point else torch.zeros(shape)
        values.append(value.to(device=device, dtype=dtype))
    return values


def _check(found: Sequence[Any], expected: Sequence[Any], precisions: Collection[str]) -> None:
    """Compare outputs. Integers are not compared, because rounding may change labels; nor are outputs for which PyTorch
    gives infinities or NaN. Raises ServeError (UNAVAILABLE) if numbers differ by more than rounding explains."""
    limit = max(_TOLERANCES.get(precision, _TOLERANCES["fp32"]) for precision in precisions)
    for index, (lowered_values, original_values) in enumerate(zip(found, expected, strict=True)):
        if not original_values.is_floating_point() or not original_values.isfinite().all():
            continue
        distance = relative_error(lowered_values, original_values)
        if not distance <= limit:
            raise unavailable(
                f"the program that torch_migraphx compiled differs from PyTorch: the relative error of output {index}"
                f" is {distance:.3g}, rounding explains at most {limit:g}; set parameter 'engine' to \"eager\" or"
                ' "migraphx-onnx"'
            )


def relative_error(found: Any, expected: Any) -> float:
    """Return the distance between two tensors, relative to `expected`; NaN = one of them holds a NaN."""
    length = expected.double().norm()
    return float((found.double() - expected.double()).norm() / length.clamp(min=1e-6))


def _file(index: int) -> str:
    return f"{index}.pt"
