"""The control inputs: what a model is told of each request's place in its sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rocserve.core.datatypes import DataType
from rocserve.core.model_config import ControlKind, SequenceBatching, SequenceControl
from rocserve.core.sequence_tensors import control_inputs
from rocserve.core.sequences import SequenceId, SequenceTag
from rocserve.core.tensors import Buffer, encode_bytes_elements
from rocserve.core.validation import InputPlan


class ControlTensors:
    """Made once a model; one value a row each."""

    def __init__(self, batching: SequenceBatching, batches: bool) -> None:
        """`batches`: whether the model has a batch dimension."""
        shape = (1, 1) if batches else (1,)
        self.inputs = tuple(
            InputPlan(tensor.name, tensor.datatype, shape, 1, tensor.datatype.itemsize or -1)
            for tensor in control_inputs(batching)
        )
        self._controls = [entry.controls[0] for entry in batching.control_inputs if entry.controls]
        self._flags = {
            (starts, ends): [_value(control, starts, ends) for control in self._controls]
            for starts in (False, True)
            for ends in (False, True)
        }
        self._identities = [
            (place, control.datatype)
            for place, control in enumerate(self._controls)
            if control.kind is ControlKind.CORRELATION_ID
        ]
        self.absent: Sequence[Buffer] = [_absent_value(control) for control in self._controls]
        """For a row that is of no request."""

    @property
    def correlation_id(self) -> InputPlan | None:
        """The input that tells the sequence's id, where the model has one."""
        return next((self.inputs[place] for place, _ in self._identities), None)

    def of(self, tag: SequenceTag) -> list[Buffer]:
        """The data of the inputs, for a request."""
        data: list[Buffer] = list(self._flags[tag.starts, tag.ends])
        for place, datatype in self._identities:
            data[place] = _identity(tag.id, datatype)
        return data


def _value(control: SequenceControl, starts: bool, ends: bool) -> Buffer:
    if control.kind is ControlKind.CORRELATION_ID:
        return b""
    is_set = {ControlKind.START: starts, ControlKind.END: ends, ControlKind.READY: True}[control.kind]
    return np.array(control.yes if is_set else control.no, control.datatype.numpy_dtype).tobytes()


def _absent_value(control: SequenceControl) -> Buffer:
    if control.kind is ControlKind.CORRELATION_ID:
        return bytes(control.datatype.itemsize or 4)
    return np.array(control.no, control.datatype.numpy_dtype).tobytes()


def _identity(sequence: SequenceId, datatype: DataType) -> Buffer:
    if datatype is DataType.BYTES:
        return encode_bytes_elements([str(sequence)])
    assert isinstance(sequence, int), "checked when the request was taken"
    # A narrow control gets the low bits, as in Triton.
    return sequence.to_bytes(8, "little")[: datatype.itemsize]
