"""Opens programs of torch.export, and reads what the file says of their inputs and outputs."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, TensorArgument
from torch.utils import _pytree as pytree

from rocserve.backends.pytorch.datatypes import datatype_of, torch_dtype
from rocserve.backends.pytorch.exported_file import devices_of, read_exported
from rocserve.backends.pytorch.graph_facts import graph_facts
from rocserve.backends.pytorch.index_limits import Limits, index_limits
from rocserve.backends.pytorch.open_sizes import LEAST_TRIED, UNBOUNDED, OpenSize, SizeCondition, open_size
from rocserve.backends.pytorch.results import output_names, outputs_of, path_text
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode, invalid_argument
from rocserve.core.requests import TensorSpec
from rocserve.load_check.facts import NO_FACTS, GraphFacts

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Parameter `precision` -> datatype of the weights. fp32 is missing because it keeps the file's precision."""


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """An input or an output as the program's file describes it."""

    names: tuple[str, ...]
    """The names that a configuration may use; the first is the default."""
    datatype: DataType | None = None
    """None = the file does not say."""
    shape: tuple[int, ...] | None = None
    """-1 = the size varies; None = the file does not say."""
    sample: tuple[int, ...] = ()
    """A shape that the program takes; empty = a scalar, or the file does not say the shape."""
    open_sizes: tuple[OpenSize | None, ...] = ()
    """How each dimension of an input varies; None = the size is fixed, or not a linear function of one number."""
    limits: Limits = ()
    """The limits of an input that the program uses as an index."""
    strides: tuple[int, ...] = ()
    """The memory layout of an input's `sample` during the export; empty = contiguous, like a request's tensors."""


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """The part of a program's inputs and outputs that its file describes."""

    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...] | None
    """None = only a run shows them."""
    batches: bool = False
    """Whether all inputs and outputs have one common first dimension that may vary, from 1 on."""
    most_rows: int | None = None
    """None = no limit."""
    by_position: bool = False
    """Whether configured names are matched by their order if they do not match the program's names."""
    overwritten: frozenset[int] = frozenset()
    """The positions of the inputs that the program may write to."""
    conditions: tuple[str, ...] = ()
    """Conditions of the inputs' sizes in addition to `open_sizes`, in SizeCondition's form."""
    precision: str = ""
    """The weights' datatypes, e.g. "fp32" or "int8, fp32"; "" = the file does not say."""

    @property
    def default_names(self) -> tuple[list[str], list[str]]:
        """The default names of its inputs, and of its outputs if the file describes them."""
        inputs, outputs = ([tensor.names[0] for tensor in tensors] for tensors in (self.inputs, self.outputs or ()))
        return inputs, outputs


@dataclass(frozen=True, slots=True)
class Program:
    call: Callable[[Sequence[Any]], Any]
    """Takes all inputs: tensors and lists of str. Returns one or more of these, also in tuples, lists and dicts."""
    signature: ProgramSignature
    devices: tuple[str, ...] = ()
    """The devices of the program's parts, for KIND_MODEL; empty = not determined."""
    check: Callable[[Sequence[TensorSpec], bool], None] | None = None
    """Checks the inputs' specs, in the program's order; True = their first dimension is the batch. Raises ServeError
    (INVALID_ARGUMENT) if the program does not take such inputs. None = only runs check their inputs."""
    facts: GraphFacts = NO_FACTS
    buffers: tuple[Any, ...] = ()
    """Tensors that runs may change."""
    keep_attributes: Callable[[], Callable[[], None]] | None = None
    """Copies what else runs may change, and returns a function that gives it back; None = they change nothing else."""


def in_precision(program: Program, dtype: torch.dtype) -> Program:
    """Wrap a program with weights of `dtype`: inputs and outputs keep the file's datatypes. Outputs of which the file
    says none are FP32 instead of `dtype`."""
    known = program.signature.outputs or ()
    output_dtypes = [torch_dtype(tensor.datatype) for tensor in known if tensor.datatype is not None]

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def call(values: Sequence[Any]) -> Any:
        result = program.call([cast(value) for value in values])
        if output_dtypes:
            return [value.to(original) for value, original in zip(outputs_of(result), output_dtypes, strict=True)]
        return pytree.tree_map_only(
            torch.Tensor, lambda value: value.float() if value.dtype is dtype else value, result
        )

    return replace(program, call=call)


class UnfitPrecision(ServeError):
    """A program cannot compute in the precision of the parameter."""


def unfit_precision(precision: str, reason: str) -> UnfitPrecision:
    datatype = str(DTYPES[precision])
    return UnfitPrecision(
        StatusCode.INVALID_ARGUMENT,
        f"parameter 'precision' is \"{precision}\", but the program cannot compute in it, because it fixes other"
        f" datatypes: {reason}; export the program in that precision (model.to({datatype}) before the export), or"
        " remove the parameter",
    )


def open_on_own_devices(path: Path, dtype: torch.dtype | None) -> Program:
    """Open a program of torch.export with each part on the device that the file names. Inputs are moved to the devices
    that they had during the export. Raises ServeError (INVALID_ARGUMENT) like `read_exported` and `open_exported`."""
    exported = read_exported(path, None)
    program = open_exported(exported, dtype)
    values = _values(exported)
    devices = [values[tensor.names[0]].device for tensor in program.signature.inputs]

    def call(given: Sequence[Any]) -> Any:
        return program.call([value.to(device) for value, device in zip(given, devices, strict=True)])

    return replace(program, call=call, devices=tuple(sorted(devices_of(exported))))


def open_exported(
    exported: Any, dtype: torch.dtype | None = None, compiled: Callable[[Any], Callable[..., Any]] | None = None
) -> Program:
    """Open a program of torch.export. `dtype`: the datatype of weights and computation; None = the file's. `compiled`
    makes the callable that runs instead of the program's module. Raises ServeError like `exported_program`, and
    ServeError (INVALID_ARGUMENT) if PyTorch cannot make a module of the program."""
    try:
        module = exported.module()
    except Exception as error:
        raise invalid_argument(f"PyTorch {torch.__version__} cannot make a module of the program: {error}") from error
    if dtype is not None:
        module = module.to(dtype)
    program = exported_program(exported, module if compiled is None else compiled(module), module.state_dict())
    program = replace(program, buffers=tuple(module.buffers()))
    return program if dtype is None else in_precision(program, dtype)


def exported_program(exported: Any, module: Callable[..., Any], weights: Mapping[str, Any] | None = None) -> Program:
    """Return the program with its signature. `module` runs it, with the exported program's arguments. `weights`: to
    tell the precision; None = the file's. Raises ServeError (INVALID_ARGUMENT) if an input or output cannot be
    served."""
    in_spec = exported.call_spec.in_spec
    values = _values(exported)
    constants: list[Any] = []
    tensor_positions: list[int] = []
    limits = index_limits(exported)
    inputs: list[ProgramTensor] = []
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    for index, (spec, path) in enumerate(zip(specs, argument_paths(in_spec), strict=True)):
        constants.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else None)
        if isinstance(spec.arg, ConstantArgument):
            continue
        if not isinstance(spec.arg, TensorArgument):
            raise invalid_argument(
                f"input '{spec.arg.name}' of the program is not a tensor; export it with a tensor there"
            )
        tensor = _tensor("input", (spec.arg.name, f"INPUT__{len(inputs)}", path), values[spec.arg.name])
        sizes = tuple(open_size(size, exported.range_constraints) for size in values[spec.arg.name].shape)
        inputs.append(replace(tensor, open_sizes=sizes, limits=limits.get(spec.arg.name, ())))
        tensor_positions.append(index)
    results = [spec for spec in exported.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    output_nodes = [spec.arg.name for spec in results if isinstance(spec.arg, TensorArgument)]
    names = output_names(
        pytree.tree_unflatten([spec.arg for spec in results], exported.call_spec.out_spec), TensorArgument
    )
    rows = _common_rows([values[tensor.names[0]] for tensor in inputs] + [values[name] for name in output_nodes])
    bounds = exported.range_constraints.get(rows)
    mutated_inputs = exported.graph_signature.user_inputs_to_mutate.values()

    def call(tensors: Sequence[Any]) -> Any:
        leaves = list(constants)
        for index, value in zip(tensor_positions, tensors, strict=True):
            leaves[index] = value
        args, kwargs = pytree.tree_unflatten(leaves, in_spec)
        return module(*args, **kwargs)

    signature = ProgramSignature(
        tuple(inputs),
        tuple(_tensor("output", aliases, values[name]) for aliases, name in zip(names, output_nodes, strict=True)),
        batches=bool(inputs) and rows is not None and (bounds is None or bool(bounds.lower <= LEAST_TRIED)),
        most_rows=None if bounds is None or not bounds.upper < UNBOUNDED else int(bounds.upper),
        overwritten=frozenset(index for index, tensor in enumerate(inputs) if tensor.names[0] in mutated_inputs),
        precision=precision_of(exported.state_dict if weights is None else weights),
    )
    return Program(call, signature, facts=graph_facts(exported))


def remove_non_tensor_results(exported: Any) -> None:
    """Remove results that are not tensors, e.g. sizes, which compilers and exporters would put among the output
    tensors. The remaining results become a tuple."""
    output, signature = exported.graph.output_node(), exported.graph_signature
    kept = [
        (value, spec)
        for value, spec in zip(output.args[0], signature.output_specs, strict=True)
        if spec.kind.name != "USER_OUTPUT" or isinstance(spec.arg, TensorArgument)
    ]
    output.args = (tuple(value for value, _ in kept),)
    signature.output_specs = [spec for _, spec in kept]
    results = tuple(spec for _, spec in kept if spec.kind.name == "USER_OUTPUT")
    exported.module_call_graph[0].signature.out_spec = pytree.tree_structure(results)


def size_conditions(exported: Any) -> tuple[str, ...]:
    """Return the conditions of a torch.export program's input sizes, in addition to `open_sizes`. The program itself
    checks them, but code compiled from the program does not. Raises ServeError (INVALID_ARGUMENT) if a condition is not
    understood."""
    conditions = []
    guards = getattr(exported, "_guards_code", ())  # PyTorch 2.8 has no guards.
    paths = list(_guarded_paths(exported)) if guards else []
    for guard in guards:
        condition = guard
        for path, index in paths:
            condition = re.sub(re.escape(f"L{path}.size()[") + r"(\d+)\]", rf"size_{index}_\1", condition)
        if "size_" not in condition and ".size()" not in condition:
            continue  # The guard is about values in the file itself.
        try:
            if not SizeCondition(condition).excludes_only_0_and_1:
                conditions.append(condition)
        except ValueError:
            raise invalid_argument(
                f"the program has a condition of its inputs' sizes that cannot be checked before compiled code reads"
                f" them: {guard}; set parameter 'engine' to \"eager\", which checks it itself"
            ) from None
    return tuple(conditions)


def _guarded_paths(exported: Any) -> Iterator[tuple[str, int]]:
    """Yield the texts that conditions may use for input tensors, each with the tensor's position among the inputs."""
    in_spec = exported.call_spec.in_spec
    args, kwargs = pytree.tree_unflatten(list(range(in_spec.num_leaves)), in_spec)
    arguments = inspect.signature(exported.module().forward).bind(*args, **kwargs).arguments
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    indices = {
        leaf: index
        for index, leaf in enumerate(leaf for leaf, spec in enumerate(specs) if isinstance(spec.arg, TensorArgument))
    }
    for path, leaf in pytree.tree_leaves_with_path(arguments):
        if leaf in indices:
            yield pytree.keystr(path), indices[leaf]
            yield f"['flat_args'][{leaf}]", indices[leaf]
            repeated = re.fullmatch(r"(.+)_(\d+)", str(path[0].key))
            if repeated is not None:  # An argument of *args.
                yield f"['{repeated[1]}'][{repeated[2]}]{pytree.keystr(path[1:])}", indices[leaf]


def without_shapes(
    inputs: Sequence[tuple[str, ...]], precision: str = "", by_position: bool = False
) -> ProgramSignature:
    """Make the signature for a file without datatypes, shapes, and the inputs that the program overwrites."""
    tensors = tuple(map(ProgramTensor, inputs))
    overwritten = frozenset(range(len(tensors)))
    return ProgramSignature(tensors, None, by_position=by_position, overwritten=overwritten, precision=precision)


def precision_of(weights: Mapping[str, Any]) -> str:
    """Return the weights' datatypes, the datatype with the most bytes first."""
    sizes: Counter[str] = Counter()
    # Datatype of weights -> name in `precision`. Other integers are missing because they are counts or indices.
    names = {
        **{dtype: name for name, dtype in DTYPES.items()},
        torch.float32: "fp32",
        torch.float64: "fp64",
        torch.int8: "int8",
        torch.uint8: "uint8",
    }
    for tensor in weights.values():
        if isinstance(tensor, torch.Tensor) and tensor.dtype in names:
            sizes[names[tensor.dtype]] += tensor.nbytes
    return ", ".join(name for name, _ in sizes.most_common())


def coarsest(precision: str) -> str:
    """Return the coarsest of a program's weights, as GraphFacts names it. `precision`: as of ProgramSignature."""
    names = precision.split(", ")
    if not {"int8", "uint8"}.isdisjoint(names):
        return "quantised"
    return next((name for name in ("bf16", "fp16") if name in names), "fp32")


def argument_paths(in_spec: Any) -> list[str]:
    """Return Triton's names for a program's arguments: ARGS[0], ARGS[1][key], KWARGS[mask]."""
    args, kwargs = pytree.tree_unflatten([0] * in_spec.num_leaves, in_spec)
    positional = [f"ARGS{path_text(path)}" for path, _ in pytree.tree_flatten_with_path(args)[0]]
    return positional + [f"KWARGS{path_text(path)}" for path, _ in pytree.tree_flatten_with_path(kwargs)[0]]


def _values(exported: Any) -> dict[str, Any]:
    """Return the graph's inputs, weights and outputs by node name, as tensors without data."""
    (results,) = exported.graph.output_node().args
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    nodes += [node for node in results if isinstance(node, torch.fx.Node)]
    return {node.name: node.meta.get("val") for node in nodes}


def _tensor(kind: str, names: tuple[str, ...], value: Any) -> ProgramTensor:
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    datatype = datatype_of(value.dtype, f"{kind} '{names[0]}' of the program")
    sample, strides = (tuple(map(_example_size, one)) for one in (value.shape, value.stride()))
    contiguous_strides = [prod(sample[dimension + 1 :]) for dimension in range(len(sample))]
    is_contiguous = all(
        size < 2 or own == full for size, own, full in zip(sample, strides, contiguous_strides, strict=True)
    )
    return ProgramTensor(names, datatype, shape, sample, strides=() if is_contiguous else strides)


def _example_size(size: Any) -> int:
    """Return the size that the export's example had; 1 = unknown."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def _common_rows(tensors: Sequence[Any]) -> Any:
    """Return the symbol that is the first size of all tensors, and part of no other size; None = there is none."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if not all(shape and not isinstance(shape[0], int) for shape in shapes):
        return None
    first = {shape[0].node.expr for shape in shapes}
    others = [size.node.expr for shape in shapes for size in shape[1:] if not isinstance(size, int)]
    symbol: Any = first.pop() if len(first) == 1 else None
    is_alone = symbol is not None and not any(symbol in size.free_symbols for size in others)
    return symbol if is_alone and symbol.is_symbol else None
