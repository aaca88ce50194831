"""Serves a PyTorch program with the tensor names and the parameters of the model configuration."""

from __future__ import annotations

import logging
import os
import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch

from rocserve.backends.base import Batch, BatchResult, Execution, ModelSource, SequentialExecution
from rocserve.backends.batch_sizes import default_batch_sizes, parse_batch_sizes, rows_that_fit
from rocserve.backends.device_tensors import DeviceTensors, is_on_device, named_outputs
from rocserve.backends.pytorch import BACKEND
from rocserve.backends.pytorch.binding import BoundProgram, bind
from rocserve.backends.pytorch.checked_tensors import unchanged
from rocserve.backends.pytorch.datatypes import OURS, is_strings, to_torch, torch_dtype
from rocserve.backends.pytorch.fixed_sizes import sized_executions
from rocserve.backends.pytorch.index_limits import within_limits
from rocserve.backends.pytorch.model_check import ModelCheck
from rocserve.backends.pytorch.padded_sizes import configured_padding, covers_all, default_padding, padding_runs
from rocserve.backends.pytorch.parameters import RunOptions
from rocserve.backends.pytorch.program import DTYPES, Program, unfit_precision
from rocserve.backends.written_sizes import is_written
from rocserve.core.datatypes import DataType
from rocserve.core.device_references import DEVICE_PROPERTY
from rocserve.core.errors import ServeError, StatusCode, internal, invalid_argument, unavailable
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import Padding
from rocserve.core.printable import readable_size
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.rows import doubt_of
from rocserve.plane.freed_memory import FreedMemory

_LOG = logging.getLogger(__name__)


class MissingOutput(ServeError):
    """A result of the program lacks an output."""


def fixed_batch_sizes(config: ModelConfig, bound: BoundProgram) -> Sequence[int]:
    """Return the sizes at which batches run on a GPU: the parameter `batch_sizes`, else 1, 2, 4 ... and the largest
    batch. Empty if the program does not batch, or another dimension varies and is not padded. Raises ServeError
    (INVALID_ARGUMENT) if the parameter is not a list of sizes."""
    signature = bound.signature
    if not signature.supports_batching or not covers_all(signature.padding, bound):
        return ()
    most = BACKEND.default_max_batch_size
    largest = config.max_batch_size or min(most, signature.max_batch_size or most)
    text = config.parameters.get("batch_sizes", "").strip()
    return parse_batch_sizes(text, largest) if text else default_batch_sizes(largest)


def _cause_first(text: str) -> str:
    """Return the text of an error with its cause before TorchScript's traceback, which ends with the cause."""
    causes = re.findall(r"^\w+(?:Error|Exception)\b.*", text, re.MULTILINE) if "TorchScript" in text else []
    return f"{causes[-1]}\n{text}" if causes else text


def _free_gpu_cache() -> None:
    """Free cached GPU memory, if this process has used a GPU."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


class TorchModel:
    """Serves one instance of a program, and is the SizedModel of its executions. For one thread at a time."""

    def __init__(
        self,
        source: ModelSource,
        program: Program,
        options: RunOptions,
        device: torch.device,
        properties: Mapping[str, str],
        captures: bool = True,
        original: Callable[[], Program] | None = None,
        takes_zeros: bool = True,
        check: Callable[[BoundProgram], ModelCheck] | None = None,
    ) -> None:
        """`device`: the device of the program's inputs. `properties`: facts for the metadata. `captures`: whether
        batches may run as captured graphs. `original` opens the program in the file's precision, to tell why it fails
        in another; None = its precision has been tried. `takes_zeros`: False = zeros may end the process, so no runs on
        zeros find how many rows fit into memory. `check` makes the load check; None = runs in this process show what
        the rows do. Raises ServeError (INVALID_ARGUMENT) if the configuration does not fit the program."""
        self.program = program
        self.device = device
        self.tensors = None if device.type == "cpu" else DeviceTensors(device)
        facts = {
            "device": str(device),
            **properties,
            "precision": program.signature.precision,
            "threads": str(options.intra_op_threads),
            DEVICE_PROPERTY: self.tensors.name if self.tensors else "",
        }
        self.properties: Mapping[str, str] = {name: value for name, value in facts.items() if value}
        self._config = source.config
        self._options = options
        self._original = original if options.precision in DTYPES else None
        if device.type == "cpu":
            # Each batch reuses the memory that the previous one freed, because getting new pages takes longer than many
            # operators. The leftovers of loading are returned to the system.
            deque(FreedMemory(of_any_size=True).give_back(), 0)
        self.executions: Sequence[Execution] = [SequentialExecution(self) for _ in range(options.batches_at_once or 1)]
        self._preparation: Iterator[bool] = iter(())
        """Prepares a size with each step, and yields whether more are left."""
        with unchanged(program):
            self._bound: BoundProgram = bind(program, source.config, self._trial)
            self._output_specs = {spec.name: spec for spec in self.signature.outputs}
            limits = [tensor.limits for tensor in program.signature.inputs]
            self._limits = {spec.name: own for spec, own in zip(self._bound.inputs, limits, strict=True) if own}
            checked = check(self._bound) if check else self._checked(source)
            self._bound = replace(self._bound, signature=replace(self.signature, dependent_rows=doubt_of(checked.rows)))
            may_be_sized = self.signature.supports_batching and checked.allows_padding
            by_default = may_be_sized and captures and device.type != "cpu"
            self._pad(checked, zeros_only=check is not None, by_default=by_default)
            self.load_check = checked.report
            if may_be_sized and device.type != "cpu":
                self._use_fixed_sizes(captures, source)
            elif may_be_sized and source.config.has_open_batch and takes_zeros:
                self._bound_batches(source.memory_bytes)

    @property
    def signature(self) -> Signature:
        return self._bound.signature

    def _checked(self, source: ModelSource) -> ModelCheck:
        """Find whether rows depend on each other, if requests may be joined."""
        check = ModelCheck(source, self.device, self.program.signature.precision)
        if check.asks_for_rows(self._bound):
            check.check_rows_here(self._bound, self.program, self._call)
        return check

    def _pad(self, check: ModelCheck, zeros_only: bool, by_default: bool) -> None:
        """Pad the dimensions that the parameter `sizes` names. Without it, and with `by_default`, pad a dimension that
        keeps graphs from being captured, if the load check shows that it may be padded. Raises ServeError
        (INVALID_ARGUMENT) if dimensions cannot be padded, and as `ModelCheck.report_padding`."""
        if not by_default and not is_written(self._config):
            return
        program, tensors = self.program, self.program.signature.inputs
        zeros_only = zeros_only or self.device.type != "cpu"

        def made(padding: Padding) -> LengthTrials:
            return check.length_trials(self._bound, program, self._call, padding, zeros_only)

        runs = padding_runs(self._config, self._bound, tensors, self._call, None if zeros_only else made)
        padding = configured_padding(self._config, self._bound, tensors, runs.groups)
        is_chosen = not padding.dimensions
        if is_chosen:
            padding = default_padding(self._config, self._bound, tensors)
        if not padding.dimensions:
            return
        try:
            padding = runs.with_outputs(padding)
            verdict = check.check_padding(self._bound, program, self._call, padding, zeros_only)
        except ServeError as error:
            if is_chosen:
                check.note(f"not padded: {error.text}")
                return
            zeros = self._bound.zeros(1, padding.smallest, padding)
            try:
                self._call(zeros)
            except ServeError as refusal:
                self._check_precision(zeros, refusal)
            raise
        if not is_chosen and verdict is not None:
            check.report_padding(verdict)
        elif is_chosen:
            check.note(", ".join(dict.fromkeys(one.reason for one in verdict.dimensions)) if verdict else "")
            if verdict is None or not verdict.allows_all:
                return
        if verdict is not None:
            padding = replace(padding, values=verdict.values)
        self._bound = replace(self._bound, signature=replace(self.signature, padding=padding))
        # Outputs are cut back in the worker's memory.
        self.properties = {name: value for name, value in self.properties.items() if name != DEVICE_PROPERTY}

    def _bound_batches(self, memory_bytes: int) -> None:
        """Lower the signature's max_batch_size to the rows that fit into memory."""
        with suppress(ServeError):
            padding = self.signature.padding
            rows = rows_that_fit(
                lambda rows: self._call(self._bound.zeros(rows, padding.largest, padding)), 1, memory_bytes
            )
            least = min((one for one in (rows, self.signature.max_batch_size) if one is not None), default=None)
            self._bound = replace(self._bound, signature=replace(self.signature, max_batch_size=least))
            if rows is not None and rows < BACKEND.default_max_batch_size:
                _LOG.debug("model '%s': memory suffices for batches of %d rows", self._config.name, rows)

    def _use_fixed_sizes(self, captures: bool, source: ModelSource) -> None:
        """Make batches run at the sizes of `fixed_batch_sizes`, if there are any. A program that cannot be captured
        runs operator by operator. Raises as `fixed_batch_sizes`; if not `captures`, also as `sized_executions`."""
        sizes = fixed_batch_sizes(self._config, self._bound)
        if not sizes:
            return
        self._preparation = self._prepare(sizes, captures, source)
        is_more = next(self._preparation)
        while is_more and not captures:
            # The first batch of a size would have to wait until the engine has compiled for it.
            is_more = next(self._preparation)

    def _prepare(self, batch_sizes: Sequence[int], captures: bool, source: ModelSource) -> Iterator[bool]:
        """Prepare a size with each step; see `_use_fixed_sizes`. The first step ends before the model is READY."""
        # On a GPU, one batch is copied while another is computed.
        count, is_serving = self._options.batches_at_once or 2, False

        def report(text: str) -> None:
            source.report(f"serving; {text}" if is_serving else text)

        free, _ = torch.cuda.mem_get_info(self.device)
        try:
            with self.mode():
                executions, steps = sized_executions(
                    self, self._outputs, self._bound.inputs, batch_sizes, count, captures, report,
                    padding=self.signature.padding,
                )  # fmt: skip
            self.executions = executions
            self.properties = {**self.properties, "batch_sizes": ", ".join(map(str, batch_sizes))}
            is_serving = captures
            source.report("")
            while not executions[0].is_complete:
                yield True
                with self.mode():
                    next(steps, None)
        except Exception as error:
            if not captures:
                raise
            what = "batches of further sizes " if is_serving else ""
            _LOG.warning(
                "model '%s' runs %soperator by operator, as it cannot be captured: %s", self._config.name, what, error
            )
        else:
            self.properties = {**self.properties, "batch_sizes": ", ".join(map(str, executions[0].batch_sizes))}
            taken = free - torch.cuda.mem_get_info(self.device)[0]
            _LOG.info(
                "model '%s' is prepared for %d sizes of batches, %d batches at once, with %s of the GPU's memory",
                self._config.name, sum(map(len, executions[0].sizes.values())), count, readable_size(max(taken, 0)),
            )  # fmt: skip
        finally:
            source.report("")
        yield False

    def prepare_more(self) -> bool:
        """See `model_preparation`."""
        return next(self._preparation, False)

    def unchanged(self) -> AbstractContextManager[None]:
        """See `model_unchanged`."""
        return unchanged(self.program)

    def warm_up(self, samples: Sequence[Batch]) -> ServeError | None:
        """Run the samples; without samples, run zeros in the example's sizes. Returns a refusal of zeros. Raises
        ServeError, also (INVALID_ARGUMENT) if the program fails only because of the parameter `precision`."""
        refusal: ServeError | None = None
        if not samples:
            zeros: list[Tensor] = []
            try:
                padding = self.signature.padding
                zeros = self._bound.zeros(1, padding.smallest, padding)
                batch = Batch({tensor.name: tensor for tensor in zeros}, tuple(self._bound.outputs), (1,))
                # TorchScript profiles its first two runs, and then compiles for their shapes.
                for _ in range(3):
                    with suppress(MissingOutput):
                        self.execute(batch)
            except ServeError as error:
                self._check_precision(zeros, error)
                _LOG.debug("model '%s': warm-up with zeros failed: %s", self._config.name, error)
                refusal = error.with_traceback(None)
        for sample in samples:
            try:
                failures: Iterable[ServeError] = self.execute(sample).failures.values()
            except ServeError as error:
                self._check_precision(self.inputs_of(sample)[0], error)
                failures = (error,)
            for failure in failures:
                if not isinstance(failure, MissingOutput):
                    raise failure
                _LOG.debug("model '%s', in a warm-up sample: %s", self._config.name, failure)
        self._original = None
        return refusal

    def _trial(self, inputs: Sequence[Tensor]) -> Any:
        try:
            return self._call(inputs)
        except ServeError as error:
            self._check_precision(inputs, error)
            raise

    def _check_precision(self, inputs: Sequence[Tensor], error: ServeError) -> None:
        """Raises ServeError (INVALID_ARGUMENT) if the program, which failed with `error`, takes the same inputs in the
        file's own precision."""
        if self._original is None or error.code is StatusCode.UNAVAILABLE:
            return
        changed = self.program
        try:
            self.program = self._original()
            self._call(inputs)
        except ServeError:
            return
        finally:
            self.program = changed
        raise unfit_precision(self._options.precision, error.text)

    def execute(self, batch: Batch) -> BatchResult:
        """Run a batch. Raises ServeError: INVALID_ARGUMENT if `inputs_of` or the program's own checks refuse the
        inputs, UNAVAILABLE if memory does not suffice, else INTERNAL with PyTorch's text."""
        execution = self.executions[0]
        if not isinstance(execution, SequentialExecution):
            execution.start(batch)
            return execution.result()
        inputs, failures = self.inputs_of(batch)
        outputs = self._bound.outputs_in(self._call(inputs))
        outputs_on_gpu = self.outputs_on_gpu(batch)
        if outputs_on_gpu:
            assert self.tensors is not None, "a GPU's"
            outputs = [
                self.tensors.share(output) if index in outputs_on_gpu and is_on_device(output) else output
                for index, output in enumerate(outputs)
            ]
            self.tensors.wait()
        return self.batch_result(outputs, batch, failures)

    def inputs_of(self, batch: Batch) -> tuple[list[Tensor], Mapping[int, ServeError]]:
        """Return inputs in the program's order, invalid values replaced, and the errors of requests with invalid
        values. Raises ServeError (INVALID_ARGUMENT) if the batch's only request has a value out of range."""
        failures, inputs = within_limits(batch, self._limits) if self._limits else ({}, batch.inputs)
        if failures and len(batch.request_sizes) == 1:
            raise failures[0]
        return [inputs[spec.name] for spec in self._bound.inputs], failures

    def outputs_on_gpu(self, batch: Batch) -> Collection[int]:
        return [self._bound.outputs[name] for name in batch.reference_outputs]

    def value(self, tensor: Tensor, copies: bool) -> Any:
        return to_torch(tensor, copies) if self.tensors is None else self.tensors.value(tensor, copies)

    def batch_result(self, outputs: Sequence[Any], batch: Batch, failures: Mapping[int, ServeError]) -> BatchResult:
        indices = self._bound.outputs
        if len(outputs) < len(indices):
            raise internal(f"the program returned {len(outputs)} outputs, expected {len(indices)}")
        named = {name: outputs[indices[name]] for name in batch.requested_outputs}
        missing = [name for name, value in named.items() if self._is_missing(name, value)]
        if missing:
            failures = {**self._lacking(missing, outputs, batch), **failures}
            named.update((name, self._stand_in(name, sum(batch.request_sizes))) for name in missing)
        for name, value in named.items():
            self._check_datatype(name, value)
        result = named_outputs(named, self._config.max_batch_size > 0)
        return replace(result, failures=failures) if failures else result

    def _check_datatype(self, name: str, value: Any) -> None:
        """Raises ServeError (INTERNAL) if an output has another datatype than clients expect: that of TorchScript's
        results may follow the inputs."""
        declared = self._output_specs[name].datatype
        if isinstance(value, torch.Tensor):
            own: DataType | None = OURS.get(value.dtype)
        elif is_strings(value):
            own = DataType.BYTES
        else:
            return
        if own is not None and own is not declared:
            raise internal(
                f"configuration expects datatype {declared.value} for output '{name}', model provides {own.value} for"
                " this request; make the program return one datatype, whatever its inputs are"
            )

    def _lacking(self, missing: Sequence[str], outputs: Sequence[Any], batch: Batch) -> Mapping[int, ServeError]:
        """Return the errors of the requests that want an output which the result lacks. Raises MissingOutput if that
        is the batch's only request."""
        indices = self._bound.outputs.items()
        present = [name for name, index in indices if not self._is_missing(name, outputs[index])]
        has = ", ".join(f"'{name}'" for name in present) or "none"
        failures: dict[int, ServeError] = {}
        for position in range(len(batch.request_sizes)):
            wanted = batch.outputs_by_request[position] if batch.outputs_by_request else batch.requested_outputs
            name = next((one for one in wanted if one in missing), None)
            if name is not None:
                failures[position] = MissingOutput(
                    StatusCode.INTERNAL,
                    f"the program's result for this request has no output '{name}', expected all outputs that are"
                    f" requested; it has {has}; request only outputs that each result has, or make the program return"
                    " an empty tensor",
                )
        if len(batch.request_sizes) == 1 or batch.cuts:
            raise failures[min(failures)]
        return failures

    def _is_missing(self, name: str, value: Any) -> bool:
        """Return whether an output's value is None, or an empty list in place of a tensor."""
        if isinstance(value, list):
            return not value and self._output_specs[name].datatype is not DataType.BYTES
        return value is None

    def _stand_in(self, name: str, rows: int) -> Any:
        """Return any rows for an output that a result lacks."""
        spec = self._output_specs[name]
        if spec.datatype is DataType.BYTES:
            return [""] * rows
        return torch.zeros((rows, *(max(size, 0) for size in spec.shape[1:])), dtype=torch_dtype(spec.datatype))

    def _outputs(self, inputs: Sequence[Any]) -> list[Any]:
        return self._bound.outputs_in(self.program.call(inputs))

    def close(self) -> None:
        self._preparation = iter(())
        self.executions = ()
        del self.program
        _free_gpu_cache()

    def _call(self, inputs: Sequence[Tensor]) -> Any:
        """Run the program on inputs in the program's order. Raises ServeError if the run fails."""
        with self.errors(), self.mode(), torch.jit.optimized_execution(self._options.optimised_execution):
            written = self.program.signature.overwritten
            values = [self.value(tensor, index in written) for index, tensor in enumerate(inputs)]
            if self.device.type != "cpu":
                values = [value.to(self.device) if isinstance(value, torch.Tensor) else value for value in values]
            return self.program.call(values)

    @contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except ServeError:
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise unavailable(f"PyTorch: {error}") from None
        except AssertionError as error:
            # An exported program raises AssertionError if its check of the inputs fails.
            raise invalid_argument(f"PyTorch: {error}") from None
        except Exception as error:
            self._exit_if_gpu_is_lost(error)
            # The CPU allocator's error has no separate class.
            is_memory = "can't allocate memory" in str(error)
            raise (unavailable if is_memory else internal)(f"PyTorch: {_cause_first(str(error))}") from None
        finally:
            if self._options.cleans_cache:
                _free_gpu_cache()

    def _exit_if_gpu_is_lost(self, error: Exception) -> None:
        """End the process if its GPU is lost, so that the server starts another. After an index out of range and
        similar errors, a GPU refuses all further calls of the process."""
        if self.device.type == "cpu" or not isinstance(error, torch.AcceleratorError):
            return
        try:
            torch.cuda.synchronize(self.device)
        except Exception:
            _LOG.critical("model '%s' has lost its GPU, and its worker ends: %s", self._config.name, error)
            os._exit(70)

    def mode(self) -> AbstractContextManager[Any]:
        mode: AbstractContextManager[Any] = torch.inference_mode() if self._options.inference_mode else torch.no_grad()
        return mode
