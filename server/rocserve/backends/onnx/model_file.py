"""Reads facts from an ONNX file that ONNX Runtime does not expose, and corrects exported classifiers.

scikit-learn's and LightGBM's exporters end a classifier with the operator ZipMap, which turns the tensor of
probabilities into a sequence of maps from class to probability. Tensor protocols have no maps, so the tensor itself is
served, under the name of ZipMap's output, and the classes become its labels. For classifiers with several labels
scikit-learn's exporter writes a ZipMap of a tensor of three dimensions, which ONNX Runtime does not load. LightGBM's
exporter also declares one label for any number of rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocserve.load_check.onnx_facts import expose

if TYPE_CHECKING:
    import onnx

FATAL_ONLY = 4
"""ONNX Runtime's level of the log in which it writes no errors, which it also raises."""
WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
"""ONNX Runtime's option for the folder of the external weights of a model that is given as bytes."""
_LEFT_OUT = dict.fromkeys(("Poisson", "Tweedie"), "exp of the predictions; apply it in the client") | dict.fromkeys(
    ("MultiClassOneVsAll", "MultiLogloss", "MultiCrossEntropy"),
    "the sigmoid of each class, and takes a softmax over all instead; run CatBoost itself in a model.py",
)
"""Loss of CatBoost -> what its exporter leaves out (findings/catboost_export_forgets_exponent_and_sigmoids.sh)."""


@dataclass(frozen=True)
class ModelFile:
    """An ONNX file, or the corrected model that is served instead."""

    path: Path
    content: bytes | None = None
    """The model that is served instead; None = the file itself."""
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Output -> its classes, for outputs that were maps; no classes = the file does not name them."""

    def message(self) -> onnx.ModelProto:
        """Read the served model, without external weights."""
        import onnx

        if self.content is not None:
            return onnx.load_from_string(self.content)
        return onnx.load(self.path, format="protobuf", load_external_data=False)

    def exposing(self, tensors: Sequence[str]) -> ModelFile:
        """Return the model with inner tensors as further outputs."""
        message = self.message()
        expose(message, tensors)
        return ModelFile(self.path, message.SerializeToString())

    @cached_property
    def scalars(self) -> frozenset[str]:
        """The inputs and outputs that the file declares as scalars. ONNX Runtime says the same of a tensor without a
        shape, and of one whose declared and inferred shapes have different ranks."""
        message = read_message(self.path)
        values = () if message is None else (*message.graph.input, *message.graph.output)
        return frozenset(
            value.name
            for value in values
            if value.type.tensor_type.HasField("shape") and not value.type.tensor_type.shape.dim
        )


def open_served(file: ModelFile, open_session: Callable[[ModelFile], Any]) -> tuple[ModelFile, Any]:
    """Return the file, or its correction if it needs one, and its session. `open_session`: opens a session of either,
    and raises ONNX Runtime's exceptions."""
    session: Any = None
    try:
        session = open_session(file)
    except Exception as error:
        # The binding's exceptions have no common base class but Exception.
        if "ZipMap" not in str(error) or (served := corrected(file.path)).content is None:
            raise
    else:
        if not may_need_correction(session) or (served := corrected(file.path)).content is None:
            return file, session
    session = None  # Frees its memory for the next one.
    return served, open_session(served)


def may_need_correction(session: Any) -> bool:
    """Return whether a session of the unchanged file has an output of maps, or one number or text for any number of
    rows. Importing onnx takes longer than loading a small model, so no other file is parsed."""
    outputs = session.get_outputs()
    if any(node.type.startswith("seq(map(") for node in outputs):
        return True
    has_single = any(node.shape == [1] and node.type in ("tensor(int64)", "tensor(string)") for node in outputs)
    return has_single and not any(isinstance(node.shape[0], int) for node in session.get_inputs() if node.shape)


def left_out(session: Any) -> str:
    """Return what CatBoost computes with this model and its exporter does not write; "" = nothing, or unknown."""
    about = session.get_modelmeta()
    if about.producer_name != "CatBoost":
        return ""
    try:
        loss = json.loads(about.custom_metadata_map["params"])["loss_function"]["type"]
        return f"with loss '{loss}' CatBoost's exporter leaves out {_LEFT_OUT[loss]}"
    except (ValueError, LookupError, TypeError):
        # Another loss, or a file that was changed.
        return ""


def corrected(path: Path) -> ModelFile:
    """Read a file, replace each ZipMap that makes an output of the model, and open the rows of labels."""
    message = read_message(path)
    if message is None:
        return ModelFile(path)
    labels = dict(_replace_zip_maps(message.graph))
    if not _open_label_rows(message.graph) and not labels:
        return ModelFile(path)
    return ModelFile(path, message.SerializeToString(), labels)


def read_message(path: Path) -> onnx.ModelProto | None:
    """Read a file's message without external weights; None = it cannot be read."""
    import onnx

    try:
        return onnx.load(path, format="protobuf", load_external_data=False)
    except Exception:
        # protobuf raises its own exceptions, and no module here may import protobuf.
        return None


def _replace_zip_maps(graph: onnx.GraphProto) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Replace each ZipMap that makes an output by Identity, and yield the output with its classes."""
    outputs = {value.name: value for value in graph.output}
    for node in graph.node:
        if node.op_type != "ZipMap" or len(node.output) != 1 or node.output[0] not in outputs:
            continue
        classes = tuple(
            label.decode(errors="replace") if isinstance(label, bytes) else str(label)
            for attribute in node.attribute
            if attribute.name in ("classlabels_int64s", "classlabels_strings")
            for label in (*attribute.ints, *attribute.strings)
        )
        node.op_type, node.domain = "Identity", ""
        del node.attribute[:]
        kind = outputs[node.output[0]].type
        kind.Clear()
        # 1 is TensorProto.DataType.FLOAT in onnx.proto.
        kind.tensor_type.elem_type = 1
        if classes:
            # By ZipMap's definition: a row for each map, with a float for each class.
            kind.tensor_type.shape.dim.add()
            kind.tensor_type.shape.dim.add().dim_value = len(classes)
        yield node.output[0], classes


def _open_label_rows(graph: onnx.GraphProto) -> bool:
    """Open the only dimension of labels that are declared as one, where the inputs' rows are open. Returns whether
    there are any."""
    defaults = {tensor.name for tensor in graph.initializer}
    inputs = [value.type.tensor_type.shape.dim for value in graph.input if value.name not in defaults]
    if not all(dims and not dims[0].HasField("dim_value") for dims in inputs):
        return False
    makers = {name: node for node in graph.node for name in node.output}
    opened = False
    for value in graph.output:
        dims = value.type.tensor_type.shape.dim
        if len(dims) == 1 and dims[0].dim_value == 1 and _is_label(value.name, makers):
            dims[0].Clear()
            opened = True
    return opened


def _is_label(tensor: str, makers: Mapping[str, onnx.NodeProto]) -> bool:
    """Return whether a tensor is the first output of a classifier, which has a label for each row by definition."""
    # A damaged file may have a cycle.
    for _ in makers:
        node = makers.get(tensor)
        if node is None or node.op_type not in ("Cast", "Identity"):
            # LinearClassifier, SVMClassifier, TreeEnsembleClassifier.
            return node is not None and node.op_type.endswith("Classifier") and tensor == node.output[0]
        tensor = node.input[0]
    return False
