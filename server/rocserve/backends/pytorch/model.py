"""A program that serves: its parameters followed, its tensors under the configuration's names."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from rocserve.backends.base import Batch, BatchResult, Execution, SequentialExecution
from rocserve.backends.batch_sizes import default_batch_sizes, parse_batch_sizes, rows_that_fit
from rocserve.backends.device_tensors import DeviceTensors, SharedTensor, is_on_device
from rocserve.backends.pytorch import BACKEND
from rocserve.backends.pytorch.binding import BoundProgram, bind
from rocserve.backends.pytorch.datatypes import from_torch, to_torch
from rocserve.backends.pytorch.parameters import RunOptions
from rocserve.backends.pytorch.program import Program, outputs_of
from rocserve.backends.pytorch.sizes import Report, SizedLane, SizedProgram
from rocserve.core.device_references import DEVICE_PROPERTY, References
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.requests import Signature, TensorSpec
from rocserve.core.tensors import Tensor

Array = np.ndarray[Any, Any]
_LOG = logging.getLogger(__name__)

_BATCHES_AT_ONCE = 2
"""On a GPU: one is copied while the other is computed."""
_WARM_UPS = 3
"""TorchScript looks at its first two runs and compiles for what it has seen."""


class TorchModel:
    """Of one instance, on one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        program: Program,
        options: RunOptions,
        device: torch.device,
        properties: Mapping[str, str],
    ) -> None:
        """`properties`: what its metadata says of it.

        Raises:
            ServeError: INVALID_ARGUMENT, what the configuration says does not do for the program.
        """
        self._tensors = None if device.type == "cpu" else DeviceTensors(device)
        self.properties = {**properties, DEVICE_PROPERTY: self._tensors.name} if self._tensors else properties
        self._config = config
        self._program = program
        self._options = options
        self._device = device
        self.executions: Sequence[Execution] = [SequentialExecution(self) for _ in range(options.batches_at_once or 1)]
        self._bound: BoundProgram = bind(program.signature, config, self._call)

    @property
    def signature(self) -> Signature:
        return self._bound.signature

    def bound_batches(self, memory_bytes: int) -> None:
        """Have the signature say how many rows fit into memory."""
        with suppress(ServeError):
            rows = rows_that_fit(lambda rows: self._call(self._bound.zeros(rows)), 1, memory_bytes)
            least = min((each for each in (rows, self.signature.max_batch_size) if each is not None), default=None)
            self._bound = replace(self._bound, signature=replace(self.signature, max_batch_size=least))
            if rows is not None and rows < BACKEND.default_max_batch_size:
                _LOG.info("model '%s': its memory suffices for batches of %d rows", self._config.name, rows)

    def fix_sizes(self, captures: bool, report: Report) -> None:
        """Have batches run at fixed sizes, where the program has batches and all other dimensions are numbers: those of
        parameter `batch_sizes`, else 1, 2, 4 ... and the largest batch.

        Args:
            captures: by captured graphs; a program that cannot be captured goes on as it is.

        Raises:
            ServeError: INVALID_ARGUMENT, the parameter is no list of sizes.
        """
        shapes = self._bound.shapes
        assert self._tensors is not None, "a GPU's"
        if not self.signature.supports_batching or any(-1 in shape[1:] for shape in shapes.values()):
            return
        most = BACKEND.default_max_batch_size
        largest = self._config.max_batch_size or min(most, self.signature.max_batch_size or most)
        text = self._config.parameters.get("batch_sizes", "").strip()
        sizes = parse_batch_sizes(text, largest) if text else default_batch_sizes(largest)
        datatypes = {spec.name: spec.datatype for spec in self.signature.inputs}
        specs = [TensorSpec(name, datatypes[name], shapes[name]) for name in self._bound.inputs]
        lanes = self._options.batches_at_once or _BATCHES_AT_ONCE
        sized = SizedProgram(self._program, specs, self._device, captures, lanes, self._tensors)
        try:
            with self.mode():
                sized.open(sizes, report)
        except Exception as error:
            if not captures:
                raise
            _LOG.warning("model '%s' runs operator by operator, as it cannot be captured: %s", self._config.name, error)
        else:
            self.executions = [SizedExecution(self, lane) for lane in sized.lanes]
            self.properties = {**self.properties, "batch_sizes": ", ".join(map(str, sized.sizes))}
        finally:
            report("")

    def warm_up(self, samples: Sequence[Batch]) -> None:
        """Without samples: zeros, of the sizes of the example where the file has them; a program that cannot take them
        is no fault."""
        if not samples:
            zeros = {tensor.name: tensor for tensor in self._bound.zeros(1)}
            try:
                for _ in range(_WARM_UPS):
                    self.execute(Batch(zeros, tuple(self._bound.outputs), (1,)))
            except ServeError as error:
                _LOG.info("model '%s' could not be warmed up with zeros: %s", self._config.name, error)
        for sample in samples:
            self.execute(sample)

    def execute(self, batch: Batch) -> BatchResult:
        """
        Raises:
            ServeError: INVALID_ARGUMENT where the program's own checks refuse the inputs; UNAVAILABLE where memory does
                not suffice; else INTERNAL, in PyTorch's words.
        """
        execution = self.executions[0]
        if isinstance(execution, SizedExecution):
            execution.start(batch)
            return execution.result()
        outputs = outputs_of(self._call(self.inputs_of(batch)))
        staying = self.staying(batch)
        if staying:
            assert self._tensors is not None, "a GPU's"
            outputs = [
                self._tensors.share(output) if place in staying and is_on_device(output) else output
                for place, output in enumerate(outputs)
            ]
            self._tensors.wait()
        return self.named(outputs, batch)

    def inputs_of(self, batch: Batch) -> list[Tensor]:
        """In the program's order."""
        return [batch.inputs[name] for name in self._bound.inputs]

    def staying(self, batch: Batch) -> Collection[int]:
        """The places of the outputs that are left on the GPU."""
        return [self._bound.outputs[name] for name in batch.may_stay]

    def value(self, tensor: Tensor, copies: bool) -> Any:
        """An input as PyTorch has it, where it lies or as a copy."""
        if type(tensor.data) is not References:
            return to_torch(tensor, copies)
        assert self._tensors is not None, "the server sends none where no property asks for them"
        found = self._tensors.open(tensor)
        return found.clone() if copies else found

    def named(self, outputs: Sequence[Any], batch: Batch) -> BatchResult:
        """What the program returned for a batch, as its signature calls it. Raises: ServeError: INTERNAL."""
        places = self._bound.outputs
        if len(outputs) < len(places):
            raise internal(f"the program returned {len(outputs)} outputs, expected {len(places)}")
        named: dict[str, Array | Tensor] = {}
        kept: list[object] = []
        for name in batch.requested_outputs:
            output = outputs[places[name]]
            if isinstance(output, SharedTensor):
                named[name] = output.referring(name, self._config.max_batch_size > 0)
                kept.append(output)
            else:
                named[name] = from_torch(name, output)
        return BatchResult(named, kept=kept)

    def close(self) -> None:
        self.executions = ()
        del self._program
        if self._device.type != "cpu":
            torch.cuda.empty_cache()

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        """What the program returns for inputs in its order. Raises: ServeError."""
        with self.errors(), self.mode(), torch.jit.optimized_execution(self._options.optimised_execution):
            written = self._program.signature.overwritten
            values = [self.value(tensor, place in written) for place, tensor in enumerate(inputs)]
            if self._device.type != "cpu":
                values = [value.to(self._device) if isinstance(value, torch.Tensor) else value for value in values]
            return self._program.call(values)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """What PyTorch raises while a batch runs, as a ServeError."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise unavailable(f"PyTorch: {error}") from None
        except AssertionError as error:
            # What an exported program holds its inputs against.
            raise invalid_argument(f"PyTorch: {error}") from None
        except Exception as error:
            raise internal(f"PyTorch: {error}") from None
        finally:
            if self._options.cleans_cache and self._device.type != "cpu":
                torch.cuda.empty_cache()

    def mode(self) -> AbstractContextManager[Any]:
        mode: AbstractContextManager[Any] = torch.inference_mode() if self._options.inference_mode else torch.no_grad()
        return mode


class SizedExecution:
    """An execution at fixed sizes, beside which others may be under way."""

    def __init__(self, model: TorchModel, lane: SizedLane) -> None:
        self._model = model
        self._lane = lane
        self._batch: Batch
        self.input_memory = lane.input_memory

    def start(self, batch: Batch) -> None:
        """See Execution."""
        self._batch = batch
        with self._model.errors(), self._model.mode(), torch.cuda.stream(self._lane.stream):
            inputs = [self._model.value(tensor, copies=False) for tensor in self._model.inputs_of(batch)]
            self._lane.start(inputs, self._model.staying(batch))

    @property
    def is_done(self) -> bool:
        """See Execution."""
        return self._lane.is_done

    def result(self) -> BatchResult:
        """See Execution."""
        with self._model.errors():
            outputs = self._lane.result()
        named = self._model.named(outputs, self._batch)
        return BatchResult(
            {name: _copied(value, self._batch.room.get(name)) for name, value in named.outputs.items()}, kept=named.kept
        )


def _copied(value: Array | Tensor, room: Array | None) -> Array | Tensor:
    """An output out of the memory of the next, and where it is to go where that is known."""
    if isinstance(value, Tensor):
        return Tensor(value.name, value.datatype, value.shape, bytes(value.data))
    if room is None or room.shape != value.shape or room.dtype != value.dtype:
        return value.copy()
    np.copyto(room, value)
    return room


def set_up(options: RunOptions) -> None:
    """Have this process run programs as the parameters say."""
    # Inputs are looked at where they lie, in memory that only the server writes; what a program writes into is copied.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    torch.set_num_threads(options.intra_op_threads)
    if torch.get_num_interop_threads() != options.inter_op_threads:
        torch.set_num_interop_threads(options.inter_op_threads)
    torch.backends.cudnn.enabled = options.cudnn
    switches = {
        "ENABLE_JIT_EXECUTOR": torch._C._jit_set_profiling_executor,
        "ENABLE_JIT_PROFILING": torch._C._jit_set_profiling_mode,
        "ENABLE_TENSOR_FUSER": torch._C._jit_set_texpr_fuser_enabled,
    }
    for name, value in options.script_switches.items():
        switches[name](value)
