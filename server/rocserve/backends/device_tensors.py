"""Shares tensors between workers on one GPU, by references (core/device_references.py)."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from rocserve.backends.base import BatchResult
from rocserve.backends.pytorch.datatypes import datatype_of, from_torch, to_torch, torch_dtype
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import UNCOUNTED, DeviceReference, References, pack_references, references_of
from rocserve.core.errors import unavailable
from rocserve.core.tensors import Tensor


def instance_gpu(number: int | None) -> torch.device:
    """Return the GPU of a worker's instance. Raises RuntimeError if PyTorch cannot use one."""
    if not torch.cuda.is_available():
        raise RuntimeError(f"PyTorch {torch.__version__} finds no GPU that it can use")
    # A worker that sees only one GPU sees it as its first.
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else number or 0)


class DeviceTensors:
    """Shares tensors with other models' workers, and opens theirs. From any thread."""

    def __init__(self, device: torch.device) -> None:
        self.name = str(torch.cuda.get_device_properties(device).uuid)
        """Equal in every process."""
        self._device = device
        self._free_blocks: dict[int, list[_Block]] = {}
        """Blocks that the server has returned, by size. A block stays shared until the process ends."""
        self._opened_blocks: OrderedDict[tuple[bytes, int, int], torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def share(self, value: torch.Tensor) -> SharedTensor:
        """Copy a tensor to memory that others may open after the current stream has made the copy."""
        nbytes = value.numel() * value.element_size()
        # The allocator returns no blocks of fewer than 512 bytes.
        size = max(512, 1 << (nbytes - 1).bit_length())
        free = self._free_blocks.setdefault(size, [])
        try:
            block = free.pop()
        except IndexError:
            block = _Block(size, self._device)
        block.octets[:nbytes].view(value.dtype).view(value.shape).copy_(value, non_blocking=True)
        return SharedTensor(block, free, datatype_of(value.dtype, "an output"), tuple(value.shape))

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def open(self, tensor: Tensor) -> torch.Tensor:
        """Return the tensor that References describe, valid until their batch is done in the server. Raises ServeError
        (UNAVAILABLE)."""
        runs: list[tuple[DeviceReference, int]] = []
        for reference in references_of(tensor):
            first = reference
            # Adjacent rows become one part.
            if runs and _block(runs[-1][0]) == _block(reference) and runs[-1][1] == reference.offset:
                first, _ = runs.pop()
            runs.append((first, reference.offset + reference.nbytes))
        with self._lock:
            parts = [self._octets(first)[first.offset : end] for first, end in runs]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        return whole.view(torch_dtype(tensor.datatype)).view(tensor.shape)

    def value(self, tensor: Tensor, copies: bool) -> Any:
        """Return a tensor of a batch as a PyTorch tensor, in place or copied. Raises ServeError as `open`."""
        if type(tensor.data) is not References:
            return to_torch(tensor, copies)
        found = self.open(tensor)
        return found.clone() if copies else found

    def _octets(self, reference: DeviceReference) -> torch.Tensor:
        key = _block(reference)
        octets = self._opened_blocks.get(key)
        if octets is None:
            try:
                storage = torch.UntypedStorage._new_shared_cuda(
                    self._device.index, reference.handle, reference.block_bytes, reference.block_offset,
                    UNCOUNTED, 0, b"", False,
                )  # fmt: skip
            except RuntimeError as error:
                why = str(error).partition("\n")[0]
                raise unavailable(f"the memory of another worker on the GPU cannot be opened: {why}") from None
            octets = self._opened_blocks[key] = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            if len(self._opened_blocks) > 256:
                self._opened_blocks.popitem(last=False)
        self._opened_blocks.move_to_end(key)
        return octets


class _Block:
    """GPU memory that other processes may open."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.octets = torch.empty(size, dtype=torch.uint8, device=device)
        _, self.handle, self.nbytes, self.offset, *_ = self.octets.untyped_storage()._share_cuda_()


class SharedTensor:
    """A tensor in a block. The block is free again when this object is deleted."""

    def __init__(self, block: _Block, free: list[_Block], datatype: DataType, shape: tuple[int, ...]) -> None:
        self._block = block
        self._free_blocks = free
        self._datatype = datatype
        self.shape = shape

    def __del__(self) -> None:
        self._free_blocks.append(self._block)

    def pack_references(self, name: str, batching: bool) -> Tensor:
        """Return the References to send instead of the tensor, one for each row if the model batches."""
        block, rows, shape = self._block, 1, self.shape
        if batching:
            rows, *rest = shape
            shape = tuple(rest)
        size = math.prod(shape) * self._datatype.itemsize
        return pack_references(
            name,
            [
                DeviceReference(block.handle, block.offset, block.nbytes, row * size, self._datatype, shape)
                for row in range(rows)
            ],
        )


def named_outputs(outputs: Mapping[str, Any], batching: bool) -> BatchResult:
    """Return a batch's outputs. Raises ServeError (INTERNAL) if the protocol has no datatype for an output."""
    named: dict[str, np.ndarray[Any, Any] | Tensor] = {}
    kept: list[object] = []
    for name, output in outputs.items():
        if isinstance(output, SharedTensor):
            named[name] = output.pack_references(name, batching)
            kept.append(output)
        else:
            named[name] = from_torch(name, output)
    return BatchResult(named, kept=kept)


def _block(reference: DeviceReference) -> tuple[bytes, int, int]:
    return reference.handle, reference.block_offset, reference.block_bytes


def is_on_device(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu" and value.layout is torch.strided
