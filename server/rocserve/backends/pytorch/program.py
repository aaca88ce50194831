"""Programs of PyTorch: opened from each kind of file, with what the file says of their inputs and outputs."""

from __future__ import annotations

import inspect
import logging
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
from rocserve.backends.pytorch.environment import variable
from rocserve.backends.pytorch.index_limits import Limits, index_limits
from rocserve.backends.pytorch.open_sizes import LEAST_TRIED, UNBOUNDED, OpenSize, SizeCondition, open_size
from rocserve.backends.pytorch.package_machine import foreign_parts
from rocserve.backends.pytorch.package_source import read_source
from rocserve.backends.pytorch.unpacked import unpacked
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument, unavailable
from rocserve.core.requests import TensorSpec

_LOG = logging.getLogger(__name__)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""By the parameter `precision`; fp32 is as the file has it."""
_PRECISIONS = {
    **{dtype: name for name, dtype in DTYPES.items()},
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "int8",
    torch.uint8: "uint8",
}
"""Of weights; integers of other sizes are counts or indices."""
_CPU = torch.device("cpu")
_TENSOR = "Tensor"
"""As TorchScript writes the type."""
_ONLY_TENSORS = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
"""Has pickles in a program, those of the example's tensors, read as tensors and nothing else: PyTorch itself would fall
back to pickles that call functions."""
_PACKAGE_DEVICE = "AOTI_DEVICE_KEY"
"""In a package's metadata: the kind of device that it was compiled for."""
_PACKAGE_MODEL, _PACKAGE_RUNNERS = "model", 1
"""What aoti_compile_and_package calls the one that it writes, and how many of its calls run at once."""


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """An input or an output as the program's file has it."""

    names: tuple[str, ...]
    """Those that a configuration may use; the first is the default."""
    datatype: DataType | None = None
    """None = the file does not say."""
    shape: tuple[int, ...] | None = None
    """-1 where the size varies; None = the file does not say."""
    sample: tuple[int, ...] = ()
    """A shape that the program is known to take; empty where the file does not say the shape."""
    open_sizes: tuple[OpenSize | None, ...] = ()
    """Of an input, for each dimension; None = it does not vary, or by more than one number."""
    limits: Limits = ()
    """Of an input by which the program looks into a tensor."""
    strides: tuple[int, ...] = ()
    """Of an input, how the values of `sample` lay in memory when the program was exported; empty: as a request's."""


@dataclass(frozen=True, slots=True)
class ProgramSignature:
    """A program's inputs and outputs, as far as its file says them."""

    inputs: tuple[ProgramTensor, ...]
    outputs: tuple[ProgramTensor, ...] | None
    """None = only a run shows them."""
    batches: bool = False
    """Whether the first dimension of all inputs and outputs is one number, which may vary."""
    most_rows: int | None = None
    """None = any number."""
    by_position: bool = False
    """Whether names in the configuration that are not the program's are matched by their order."""
    overwritten: frozenset[int] = frozenset()
    """The positions of the inputs that it may write into."""
    conditions: tuple[str, ...] = ()
    """Of the sizes of its inputs, beside their `open_sizes`, as SizeCondition has them."""
    precision: str = ""
    """Of its weights: "fp32", "int8, fp32"; "" = the file does not say."""

    @property
    def default_names(self) -> tuple[list[str], list[str]]:
        """Of its inputs, and of its outputs as far as the file says them."""
        inputs, outputs = ([tensor.names[0] for tensor in tensors] for tensors in (self.inputs, self.outputs or ()))
        return inputs, outputs


def take_as_they_are(specs: Sequence[TensorSpec], batches: bool) -> None:
    """Of a program whose own checks refuse other inputs."""


@dataclass(frozen=True, slots=True)
class Program:
    call: Callable[[Sequence[Any]], Any]
    """From all inputs, each a tensor or a list of str, to the program's result: a tensor, a list of str, or tuples,
    lists and dicts of them."""
    signature: ProgramSignature
    devices: tuple[str, ...] = ()
    """Where its parts are, of one that leaves them where its file has them."""
    check: Callable[[Sequence[TensorSpec], bool], None] = take_as_they_are
    """Whether it takes such inputs, in its order; True: their first dimension is a batch's rows. Raises: ServeError:
    INVALID_ARGUMENT, it does not."""


def outputs_of(result: Any) -> list[Any]:
    """The tensors and lists of str in a program's result, in its order."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [leaf for leaf in pytree.tree_leaves(result, _is_strings) if isinstance(leaf, torch.Tensor | list)]


def output_names(result: Any, kind: type | tuple[type, ...] = (torch.Tensor, list)) -> list[tuple[str, ...]]:
    """The names that a configuration may use for the leaves of this kind in a program's result: the key of a dict
    where that is a name of one alone, then Triton's, OUTPUT__<position> and RESULT with the path."""
    paths = [path for path, leaf in pytree.tree_flatten_with_path(result, _is_strings)[0] if isinstance(leaf, kind)]
    keys = [str(path[0].key) if len(path) == 1 and isinstance(path[0], pytree.MappingKey) else "" for path in paths]
    return [
        (*((key,) if key and keys.count(key) == 1 else ()), f"OUTPUT__{place}", f"RESULT{_path_text(path)}")
        for place, (key, path) in enumerate(zip(keys, paths, strict=True))
    ]


def in_precision(program: Program, dtype: torch.dtype) -> Program:
    """A program whose weights are of `dtype`, called with tensors of its original datatypes."""
    known = program.signature.outputs or ()
    wanted = [torch_dtype(tensor.datatype) for tensor in known if tensor.datatype is not None]

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    def call(values: Sequence[Any]) -> Any:
        result = program.call([cast(value) for value in values])
        if wanted:
            return [value.to(own) for value, own in zip(outputs_of(result), wanted, strict=True)]
        return pytree.tree_map_only(
            torch.Tensor, lambda value: value.float() if value.dtype is dtype else value, result
        )

    return replace(program, call=call)


def read_exported(path: Path, device: torch.device | None = _CPU) -> Any:
    """A program of torch.export on the device; None: each of its parts is where the file has it. Raises: ServeError:
    INVALID_ARGUMENT, PyTorch cannot read it, with PyTorch's reason."""
    # Operators of quantised programs, without which these cannot be read.
    import torch.ao.quantization.fx._decomposed

    try:
        with variable(_ONLY_TENSORS, "1"):
            exported = torch.export.load(path)
    except Exception as error:
        raise _unreadable(path, error) from error
    if device is None or devices_of(exported) <= {str(device)}:
        return exported
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(exported, device)


def devices_of(exported: Any) -> set[str]:
    """Where the parts of a program of torch.export are, and its inputs."""
    tensors = [*exported.state_dict.values(), *exported.constants.values()]
    tensors += [node.meta.get("val") for node in exported.graph.nodes]
    return {str(tensor.device) for tensor in tensors if isinstance(tensor, torch.Tensor)}


def open_placed(path: Path, dtype: torch.dtype | None) -> Program:
    """A program of torch.export with each of its parts where the file has it, which is given each input where that was
    when it was exported. Raises: ServeError: INVALID_ARGUMENT, as `read_exported` and `open_exported`."""
    exported = read_exported(path, None)
    program = open_exported(exported, dtype)
    values = _values(exported)
    places = [values[tensor.names[0]].device for tensor in program.signature.inputs]

    def call(given: Sequence[Any]) -> Any:
        return program.call([value.to(place) for value, place in zip(given, places, strict=True)])

    return replace(program, call=call, devices=tuple(sorted(devices_of(exported))))


def open_exported(
    exported: Any, dtype: torch.dtype | None = None, compiled: Callable[[Any], Callable[..., Any]] | None = None
) -> Program:
    """A program of torch.export.

    Args:
        dtype: of the weights and the computation; None = the file's.
        compiled: gives what runs in the place of the program's module.

    Raises:
        ServeError: as `exported_program`; INVALID_ARGUMENT, PyTorch cannot make a module of it.
    """
    try:
        module = exported.module()
    except Exception as error:
        raise invalid_argument(f"PyTorch {torch.__version__} cannot make a module of the program: {error}") from error
    if dtype is not None:
        module = module.to(dtype)
    program = exported_program(exported, module if compiled is None else compiled(module), module.state_dict())
    return program if dtype is None else in_precision(program, dtype)


def exported_program(exported: Any, module: Callable[..., Any], weights: Mapping[str, Any] | None = None) -> Program:
    """The signature of a program of torch.export, and `module`, which takes the same arguments, to run it. `weights`:
    those of `module`; None = the file's. Raises: ServeError: INVALID_ARGUMENT, one of its tensors cannot be served."""
    in_spec = exported.call_spec.in_spec
    values = _values(exported)
    constants: list[Any] = []
    places: list[int] = []
    limits = index_limits(exported)
    inputs: list[ProgramTensor] = []
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    for place, (spec, path) in enumerate(zip(specs, _argument_paths(in_spec), strict=True)):
        constants.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else None)
        if isinstance(spec.arg, ConstantArgument):
            continue
        if not isinstance(spec.arg, TensorArgument):
            raise invalid_argument(
                f"input '{spec.arg.name}' of the program is no tensor; export it with a tensor there"
            )
        tensor = _tensor("input", (spec.arg.name, f"INPUT__{len(inputs)}", path), values[spec.arg.name])
        sizes = tuple(open_size(size, exported.range_constraints) for size in values[spec.arg.name].shape)
        inputs.append(replace(tensor, open_sizes=sizes, limits=limits.get(spec.arg.name, ())))
        places.append(place)
    results = [spec for spec in exported.graph_signature.output_specs if spec.kind.name == "USER_OUTPUT"]
    tensors = [spec.arg.name for spec in results if isinstance(spec.arg, TensorArgument)]
    names = output_names(
        pytree.tree_unflatten([spec.arg for spec in results], exported.call_spec.out_spec), TensorArgument
    )
    rows = _common_rows([values[tensor.names[0]] for tensor in inputs] + [values[name] for name in tensors])
    bounds = exported.range_constraints.get(rows)
    written = exported.graph_signature.user_inputs_to_mutate.values()

    def call(given: Sequence[Any]) -> Any:
        leaves = list(constants)
        for place, value in zip(places, given, strict=True):
            leaves[place] = value
        args, kwargs = pytree.tree_unflatten(leaves, in_spec)
        return module(*args, **kwargs)

    signature = ProgramSignature(
        tuple(inputs),
        tuple(_tensor("output", own, values[name]) for own, name in zip(names, tensors, strict=True)),
        batches=bool(inputs) and rows is not None and (bounds is None or bool(bounds.lower <= LEAST_TRIED)),
        most_rows=None if bounds is None or not bounds.upper < UNBOUNDED else int(bounds.upper),
        overwritten=frozenset(place for place, tensor in enumerate(inputs) if tensor.names[0] in written),
        precision=_precision_of(exported.state_dict if weights is None else weights),
    )
    return Program(call, signature)


def leave_out_what_is_no_tensor(exported: Any) -> None:
    """Of its results, which are in a tuple then: what compilers and exporters make of it would have a size among the
    tensors."""
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
    """What a program of torch.export wants of its inputs' sizes beside their `open_sizes`: it checks that itself, and
    what is compiled of it does not. Raises: ServeError: INVALID_ARGUMENT, there is a condition that is not understood.
    """
    conditions = []
    guards = getattr(exported, "_guards_code", ())  # PyTorch 2.8 has none.
    paths = list(_guarded_paths(exported)) if guards else []
    for guard in guards:
        condition = guard
        for path, place in paths:
            condition = re.sub(re.escape(f"L{path}.size()[") + r"(\d+)\]", rf"size_{place}_\1", condition)
        if "size_" not in condition and ".size()" not in condition:
            continue  # Of values that the file itself has.
        try:
            if not SizeCondition(condition).only_tells_0_and_1_apart:
                conditions.append(condition)
        except ValueError:
            raise invalid_argument(
                f"the program has a condition of its inputs' sizes that cannot be checked before compiled code reads"
                f" them: {guard}; set parameter 'engine' to \"eager\", which checks it itself"
            ) from None
    return tuple(conditions)


def _guarded_paths(exported: Any) -> Iterator[tuple[str, int]]:
    """The texts by which conditions may name the program's tensors, and the positions of these among its inputs."""
    in_spec = exported.call_spec.in_spec
    args, kwargs = pytree.tree_unflatten(list(range(in_spec.num_leaves)), in_spec)
    arguments = inspect.signature(exported.module().forward).bind(*args, **kwargs).arguments
    specs = [spec for spec in exported.graph_signature.input_specs if spec.kind.name == "USER_INPUT"]
    places = {
        leaf: place
        for place, leaf in enumerate(leaf for leaf, spec in enumerate(specs) if isinstance(spec.arg, TensorArgument))
    }
    for path, leaf in pytree.tree_leaves_with_path(arguments):
        if leaf in places:
            yield pytree.keystr(path), places[leaf]
            yield f"['flat_args'][{leaf}]", places[leaf]
            repeated = re.fullmatch(r"(.+)_(\d+)", str(path[0].key))
            if repeated is not None:  # Of *args.
                yield f"['{repeated[1]}'][{repeated[2]}]{pytree.keystr(path[1:])}", places[leaf]


def open_script(path: Path, device: torch.device | None, dtype: torch.dtype | None, keys: Sequence[str]) -> Program:
    """A TorchScript program.

    Args:
        device: None: each of its parts is where the file has it; it is given its inputs on the CPU.
        dtype: of the weights and the computation; None = the file's.
        keys: the names of the inputs in the configuration, for a `forward` that takes a dict, or need not have all.

    Raises:
        ServeError: INVALID_ARGUMENT, PyTorch cannot read it, or it takes something else than tensors and strings.
    """
    try:
        module = torch.jit.load(path, map_location=device)
        if hasattr(module, "training"):  # A frozen one has no modes.
            module.eval()
        if dtype is not None:
            module.to(dtype)
        arguments = module.forward.schema.arguments[1:]
    except Exception as error:
        raise _unreadable(path, error) from error
    weights = module.state_dict()
    precision = _precision_of(weights)
    devices = tuple(sorted({str(each.device) for each in weights.values() if isinstance(each, torch.Tensor)}))
    needed = [
        argument
        for place, argument in enumerate(arguments)
        if not argument.has_default_value()
        or str(argument.type) == _TENSOR
        or (_is_tensor(argument) and not {argument.name, f"INPUT__{place}"}.isdisjoint(keys))
    ]
    if len(needed) == 1 and str(needed[0].type) == "Dict[str, Tensor]":
        signature = _without_shapes([(key,) for key in keys], precision)
        return Program(lambda values: module(dict(zip(keys, values, strict=True))), signature, devices)
    for argument in needed:
        if not _is_tensor(argument) and str(argument.type) != "List[str]":
            raise invalid_argument(
                f"argument '{argument.name}' of forward in {path.name} is of type {argument.type}; what can be served"
                " are arguments of type Tensor or List[str], or a single one of type Dict[str, Tensor]"
            )
    own = [argument.name for argument in needed]

    def call(values: Sequence[Any]) -> Any:
        return module(*values)

    def call_by_name(values: Sequence[Any]) -> Any:
        return module(**dict(zip(own, values, strict=True)))

    is_first = own == [argument.name for argument in arguments[: len(own)]]
    names = [(name, f"INPUT__{place}") for place, name in enumerate(own)]
    signature = _without_shapes(names, precision, by_position=True)
    return Program(call if is_first else call_by_name, signature, devices)


def open_package(path: Path, device: torch.device | None, checks: bool = True) -> Program:
    """A package of AOTInductor.

    Args:
        device: None: the first of the kind that it was compiled for, where it is given its inputs.
        checks: whether its inputs are compared with what it was compiled for.

    Raises:
        ServeError: INVALID_ARGUMENT, PyTorch cannot load it, or it does not say what it was compiled for; UNAVAILABLE,
            it is compiled for another kind of device.
    """
    index = -1 if device is None or device.index is None else device.index
    try:
        if (device is None or device.type != _CPU.type) and torch.cuda.is_available():
            torch.cuda.init()
        # Not by torch._inductor.aoti_load_package, which imports all of Inductor first and tries the C++ compiler.
        loader = unpacked(
            lambda: torch._C._aoti.AOTIModelPackageLoader(str(path), _PACKAGE_MODEL, False, _PACKAGE_RUNNERS, index)
        )
        metadata = loader.get_metadata()
        compiled_for = metadata.get(_PACKAGE_DEVICE, _CPU.type if device is None else device.type)
        in_spec, out_spec = map(pytree.treespec_loads, loader.get_call_spec())
    except Exception as error:
        raise _unreadable(path, error) from error
    if device is not None and compiled_for != device.type:
        raise unavailable(
            f"{path.name} is compiled for PyTorch's device '{compiled_for}' and the instance is on '{device.type}';"
            " give the model instances there, or compile the program for this device"
        )
    if lacking := foreign_parts(metadata, index):
        _LOG.warning(
            "%s is compiled for %s, which this machine lacks: its code may not run here", path, ", ".join(lacking)
        )

    paths = _argument_paths(in_spec)
    source = read_source(path) if checks else None
    if source is not None and len(source.inputs) != len(paths):
        raise invalid_argument(f"{path.name} has inputs that are no tensors; compile the program without them")

    def call(values: Sequence[Any]) -> Any:
        if source is not None:
            source.check_sizes(paths, values)
        own = values if device is not None else [value.to(compiled_for) for value in values]
        return pytree.tree_unflatten(loader.boxed_run(list(own)), out_spec)

    signature = _without_shapes([(f"INPUT__{place}", argument) for place, argument in enumerate(paths)])
    if source is None:
        return Program(call, signature, (compiled_for,))
    tensors = zip(signature.inputs, source.samples, strict=True)
    inputs = tuple(replace(tensor, sample=sample) for tensor, sample in tensors)
    signature = replace(signature, inputs=inputs, most_rows=source.most_rows)
    return Program(call, signature, (compiled_for,), source.check)


def _without_shapes(
    inputs: Sequence[tuple[str, ...]], precision: str = "", by_position: bool = False
) -> ProgramSignature:
    """Of a file that gives neither datatypes nor shapes. The program may write into any of its inputs."""
    tensors = tuple(map(ProgramTensor, inputs))
    overwritten = frozenset(range(len(tensors)))
    return ProgramSignature(tensors, None, by_position=by_position, overwritten=overwritten, precision=precision)


def _precision_of(weights: Mapping[str, Any]) -> str:
    """The one that most bytes are in comes first."""
    sizes: Counter[str] = Counter()
    for tensor in weights.values():
        if isinstance(tensor, torch.Tensor) and tensor.dtype in _PRECISIONS:
            sizes[_PRECISIONS[tensor.dtype]] += tensor.nbytes
    return ", ".join(name for name, _ in sizes.most_common())


def _argument_paths(in_spec: Any) -> list[str]:
    """Triton's names for a program's arguments: ARGS[0], ARGS[1][key], KWARGS[mask]."""
    args, kwargs = pytree.tree_unflatten([0] * in_spec.num_leaves, in_spec)
    positional = [f"ARGS{_path_text(path)}" for path, _ in pytree.tree_flatten_with_path(args)[0]]
    return positional + [f"KWARGS{_path_text(path)}" for path, _ in pytree.tree_flatten_with_path(kwargs)[0]]


def _path_text(path: Sequence[Any]) -> str:
    return "".join(f"[{getattr(key, 'idx', getattr(key, 'key', getattr(key, 'name', '')))}]" for key in path)


def _values(exported: Any) -> dict[str, Any]:
    """Inputs and outputs by the names of the graph's nodes, as tensors without data."""
    (results,) = exported.graph.output_node().args
    nodes = [node for node in exported.graph.nodes if node.op == "placeholder"]
    nodes += [node for node in results if isinstance(node, torch.fx.Node)]
    return {node.name: node.meta.get("val") for node in nodes}


def _tensor(kind: str, names: tuple[str, ...], value: Any) -> ProgramTensor:
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    datatype = datatype_of(value.dtype, f"{kind} '{names[0]}' of the program")
    sample, strides = (tuple(map(_example_size, each)) for each in (value.shape, value.stride()))
    whole = [prod(sample[dimension + 1 :]) for dimension in range(len(sample))]
    is_as_requests = all(size < 2 or own == full for size, own, full in zip(sample, strides, whole, strict=True))
    return ProgramTensor(names, datatype, shape, sample, strides=() if is_as_requests else strides)


def _example_size(size: Any) -> int:
    """The one that the program was exported with."""
    if isinstance(size, int):
        return size
    return int(size.node.hint) if size.node.has_hint() else 1


def _common_rows(tensors: Sequence[Any]) -> Any:
    """The symbol that is the first size of all of them, and in no other size; None where there is none."""
    shapes = [tuple(tensor.shape) for tensor in tensors]
    if not all(shape and not isinstance(shape[0], int) for shape in shapes):
        return None
    first = {shape[0].node.expr for shape in shapes}
    others = [size.node.expr for shape in shapes for size in shape[1:] if not isinstance(size, int)]
    symbol: Any = first.pop() if len(first) == 1 else None
    is_alone = symbol is not None and not any(symbol in size.free_symbols for size in others)
    return symbol if is_alone and symbol.is_symbol else None


def _is_tensor(argument: Any) -> bool:
    return str(argument.type) in (_TENSOR, f"Optional[{_TENSOR}]")


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(element, str) for element in value)


def _unreadable(path: Path, error: Exception) -> ServeError:
    return invalid_argument(f"PyTorch {torch.__version__} cannot read {path.name}: {error}")
