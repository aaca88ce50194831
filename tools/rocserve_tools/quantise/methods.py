"""Quantises a PyTorch program by one of three methods. Each takes a program and returns a module that computes in int8.

dynamic  Linear layers only. Weights have a scale per output channel, inputs a scale per row that depends on this row
         only: a request's answer does not depend on its batch.
static   Convolutions, linear layers and operations between them. Weights have a scale per output channel, inputs a
         scale per tensor, calibrated with the data.
qat      Like static, but scales and weights are trained.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_
from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)
from torchao.utils import unwrap_tensor_subclass

from rocserve.backends.pytorch.program import Program, exported_program
from rocserve.backends.pytorch.results import outputs_of
from rocserve.core.errors import invalid_argument
from rocserve.load_check.tensors import Array
from rocserve_tools.measuring.figures import difference

Train = Callable[[Any], object]

_EPS = 1e-5
"""torchao gives each batch normalisation this eps, PyTorch's default."""
_MOST_ROUNDING = 0.11
"""Relative difference between a network with quantised layers and its conversion to int8: as in torch_migraphx.py."""


def quantise_dynamic(program: ExportedProgram) -> GraphModule:
    module = program.module(check_guards=False)
    for place, node in enumerate(layers(module.graph)):
        if node.target is torch.ops.aten.linear.default and node.args[1].op == "get_attr":
            _as_layer(module, node, f"quantised_{place}")
    module.recompile()
    quantize_(module, Int8DynamicActivationInt8WeightConfig(version=2))
    unwrap_tensor_subclass(module)
    return module


def _as_layer(module: GraphModule, node: Any, name: str) -> None:
    """Turn a call of `linear` back into a layer, because torchao quantises layers."""
    source, weight, bias = (*node.args, None)[:3]
    values = attrgetter(weight.target)(module)
    layer = nn.Linear(values.shape[1], values.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(values.detach())
    if bias is not None:
        layer.bias = nn.Parameter(attrgetter(bias.target)(module).detach())
    module.add_submodule(name, layer)
    with module.graph.inserting_before(node):
        node.replace_all_uses_with(module.graph.call_module(name, (source,)))
    module.graph.erase_node(node)


def quantise_static(program: ExportedProgram, runs: Sequence[Mapping[str, Array]]) -> GraphModule:
    prepared = prepare_pt2e(program.module(check_guards=False), _quantizer(is_qat=False))
    observed = exported_program(program, prepared)
    for run in runs:
        results(observed, run)
    return convert_pt2e(prepared)


@dataclass(frozen=True, slots=True)
class BatchNorms:
    """The batch normalisations of a program, whose momentum and eps torchao 0.18 replaces by PyTorch's defaults. In
    inference, a variance of v with eps e equals a variance of v + e - d with eps d."""

    settings: Mapping[str, tuple[float, float]]
    """Momentum and eps, by the name of the buffer with the running variance."""

    @property
    def changed(self) -> int:
        """The number of layers whose eps torchao would change."""
        return sum(eps != _EPS for _, eps in self.settings.values())

    def restore(self, module: GraphModule) -> None:
        """Write each layer's momentum and eps into a module for training."""
        self._write(module, self.settings)

    def fold_eps(self, module: GraphModule) -> None:
        """Move the part of eps that differs from the default into the running variance."""
        self._write(module, {name: (momentum, _EPS) for name, (momentum, _) in self.settings.items()})
        for name, (_, eps) in self.settings.items():
            attrgetter(name)(module).add_(eps - _EPS)

    def _write(self, module: GraphModule, settings: Mapping[str, tuple[float, float]]) -> None:
        for node in module.graph.nodes:
            if _is_batch_norm(node):
                node.args = (*node.args[:6], *settings[node.args[4].target], *node.args[8:])
            elif node.op == "get_attr" and node.target in settings:
                for user in list(node.users):
                    if user.target is torch.ops.aten.add.Tensor:
                        user.args = (node, settings[node.target][1])
        module.recompile()


def batch_norms(module: GraphModule) -> BatchNorms:
    return BatchNorms({node.args[4].target: node.args[6:8] for node in module.graph.nodes if _is_batch_norm(node)})


def _is_batch_norm(node: Any) -> bool:
    return bool(node.target is torch.ops.aten.batch_norm.default and node.args[4] is not None)


def quantise_trained(program: ExportedProgram, train: Train, run: Mapping[str, Array]) -> GraphModule:
    """Quantise after training. `train` gets the network, whose layers round as they will after quantisation. Raises
    ServeError (INVALID_ARGUMENT) if the quantised network gives other numbers than the trained one for `run`."""
    module = program.module(check_guards=False)
    norms = batch_norms(module)
    prepared = prepare_qat_pt2e(module, _quantizer(is_qat=True))
    move_exported_model_to_train(prepared)
    norms.restore(prepared)
    train(prepared)
    move_exported_model_to_eval(prepared)
    norms.restore(prepared)
    expected = results(exported_program(program, prepared), run)
    with torch.no_grad():
        norms.fold_eps(prepared)
    converted = convert_pt2e(prepared)
    for trained, found in zip(expected, results(exported_program(program, converted), run), strict=True):
        if not np.issubdtype(trained.dtype, np.floating):
            continue
        relative = difference([found], [trained]).relative
        if relative > _MOST_ROUNDING:
            raise invalid_argument(
                "torchao's conversion changes the trained network: the relative difference of an output for the data"
                f" is {relative:.3g}, and at most {_MOST_ROUNDING} is rounding; use --method static"
            )
    return converted


def _quantizer(*, is_qat: bool) -> Any:
    """Return Inductor's quantiser for x86. ONNX has operators for its pairs of quantising and dequantising too."""
    return X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_qat=is_qat))


def training_function(file: Path) -> Train:
    """Return the function `train` of a Python file. Raises ServeError (INVALID_ARGUMENT) if there is none."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise invalid_argument(f"{file} is not a Python file; expected one that defines train(network)")
    script = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.absolute().parent))  # Python does the same for a script.
    spec.loader.exec_module(script)
    train: Train | None = getattr(script, "train", None)
    if not callable(train):
        raise invalid_argument(f"{file} has no function train(network)")
    return train


def results(program: Program, run: Mapping[str, Array]) -> list[Array]:
    """Return the program's outputs for one run's inputs. bf16 becomes fp32, because numpy has no bf16."""
    with torch.no_grad():
        found = outputs_of(program.call(_tensors(program, run)))
    return [(value.float() if value.dtype is torch.bfloat16 else value).numpy() for value in found]


def _tensors(program: Program, run: Mapping[str, Array]) -> list[Any]:
    return [torch.from_numpy(np.ascontiguousarray(run[tensor.names[0]])) for tensor in program.signature.inputs]


def layers(graph: Any) -> list[Any]:
    """Return the nodes that multiply by weights."""
    kinds = ("conv1d", "conv2d", "conv3d", "linear")
    return [
        node
        for node in graph.nodes
        if isinstance(node.target, torch._ops.OpOverload) and node.target.overloadpacket.__name__ in kinds
    ]


def is_quantised(program: ExportedProgram) -> bool:
    """Return whether the program has int8 weights. `layers` does not find dynamically quantised layers."""
    values = (*program.state_dict.values(), *program.constants.values())
    return any(isinstance(value, torch.Tensor) and value.dtype is torch.int8 and value.ndim > 1 for value in values)


def export_again(module: GraphModule, original: ExportedProgram, run: Mapping[str, Array]) -> ExportedProgram:
    """Export the module as a program with the original's inputs and outputs. `run`: example inputs."""
    _drop_replaced_weights(module)
    program = exported_program(original, lambda *args, **kwargs: (args, kwargs))
    if program.signature.batches:
        # An export with one row would be fixed to one row. No more than two rows, because the file stores the example.
        run = {name: np.resize(array, (2, *array.shape[1:])) for name, array in run.items()}
    args, kwargs = program.call(_tensors(program, run))
    rows = {0: Dim.DYNAMIC(min=1, max=program.signature.most_rows)} if program.signature.batches else {}
    shapes = [pytree.tree_map(lambda value: rows if isinstance(value, torch.Tensor) else None, args)]
    shapes.append(pytree.tree_map(lambda value: rows if isinstance(value, torch.Tensor) else None, kwargs))
    with torch.no_grad():
        exported = torch.export.export(module, args, kwargs, dynamic_shapes=(*shapes[0], *shapes[1].values()))
    # torchao's operators are replaced by PyTorch's, because a server need not have torchao.
    own = {op: made for op, made in torch.export.default_decompositions().items() if op.namespace == "torchao"}
    exported = exported.run_decompositions(own)
    for node in exported.graph.nodes:
        # Records of a node's origin may be larger than the weights.
        for origin in ("stack_trace", "nn_module_stack", "source_fn_stack", "from_node", "torch_fn"):
            node.meta.pop(origin, None)
    return exported


def _drop_replaced_weights(module: GraphModule) -> None:
    module.graph.eliminate_dead_code()
    module.recompile()
    called = tuple(f"{node.target}." for node in module.graph.nodes if node.op == "call_module")
    used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in [name for name, _ in (*module.named_parameters(), *module.named_buffers())]:
        if name not in used and not name.startswith(called):
            owner, _, last = name.rpartition(".")
            delattr(module.get_submodule(owner), last)
