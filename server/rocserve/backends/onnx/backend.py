"""Loads ONNX models with ONNX Runtime in a worker, and executes their batches."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as engine_errors

from rocserve.backends.base import (
    Batch,
    BatchResult,
    Execution,
    LoadedModel,
    ModelSource,
    ThreadedExecution,
    model_executions,
)
from rocserve.backends.batch_sizes import default_batch_sizes, rows_that_fit, wanted_batch_sizes
from rocserve.backends.migraphx.options import PARAMETERS
from rocserve.backends.onnx import BACKEND
from rocserve.backends.onnx.device_sessions import BATCHES_ON_GPU, DeviceStream, device_executions, device_stream
from rocserve.backends.onnx.external_weights import ExternalWeights, find_external_weights
from rocserve.backends.onnx.opener import SessionOpener, session_facts
from rocserve.backends.onnx.padding_check import PaddingCheck
from rocserve.backends.onnx.plugins import installed_plugins
from rocserve.backends.onnx.provider_check import ProviderCheck
from rocserve.backends.onnx.provider_options import compiled_batch_sizes, pads_with_first_row
from rocserve.backends.onnx.provider_padding import ProviderPadding
from rocserve.backends.onnx.providers import Provider, ProviderPlan, plan_providers, with_caches
from rocserve.backends.onnx.rows_check import with_checked_rows
from rocserve.backends.onnx.runs import Array, InPlaceRun, Run, SizedRun, is_on_cpu, session_run
from rocserve.backends.onnx.signature import fixed_dimensions, session_signature
from rocserve.backends.onnx.strings import bytes_array, text_array
from rocserve.backends.padding_runs import PaddingRuns
from rocserve.backends.written_sizes import has_rows, written_padding
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal, invalid_argument, unavailable
from rocserve.core.load_check import NOT_CHECKED, LoadCheckFailed, LoadCheckReport
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import Buckets, Lengths, Padding, Shape
from rocserve.core.ragged import RaggedBatching, made_tensors
from rocserve.core.requests import Signature
from rocserve.core.tensors import Tensor, octets, tensor_from_numpy

_LOG = logging.getLogger(__name__)


def load(model: ModelSource) -> LoadedModel:
    """Load a model. Parameters: those of `providers` and `session_options`; on a GPU, or if a provider compiles each
    shape, also `batch_sizes`, `batch` and `pad_batch`. Raises ServeError (INVALID_ARGUMENT) if the file or the
    configuration is wrong, ServeError (UNAVAILABLE) if the execution provider is missing or does not start."""
    plan = plan_providers(model, onnxruntime.get_available_providers(), installed_plugins())
    # Parameters of MIGraphX that have no effect here are logged. Fixed batch sizes follow some of them.
    names = PARAMETERS | {"target"}
    if plan.compiling is not None or plan.on_gpu:
        # ONNX Runtime also follows these if it runs a model at fixed batch sizes.
        names -= {"batch", "batch_sizes", "pad_batch"}
    values = {name: text.strip().lower() for name, text in model.config.parameters.items() if name in names}
    unreduced = ("precision", "fp32")
    unused = sorted(f"'{name}'" for name, text in values.items() if text and (name, text) != unreduced)
    if unused:
        what = f"parameter {unused[0]} has" if len(unused) == 1 else f"parameters {', '.join(unused)} have"
        _LOG.warning("model '%s': %s no effect with ONNX Runtime, only with MIGraphX", model.name, what)
    try:
        opened = _load(model, plan)
        if plan.on_gpu and not opened.executions:
            thread = ThreadPoolExecutor(1, "batches")
            opened.executions = [ThreadedExecution(opened, thread) for _ in range(BATCHES_ON_GPU)]
        return opened
    except ServeError as error:
        accepts_cpu = plan.is_replaceable if isinstance(error, LoadCheckFailed) else plan.accepts_cpu
        if not plan.providers or not accepts_cpu:
            raise
        # The traceback would keep the sessions.
        failure = error.with_traceback(None)
    on_cpu = _load(model, ProviderPlan((), accepts_cpu=True))
    if isinstance(failure, LoadCheckFailed):
        instead = f"it runs on ONNX Runtime's CPU provider instead: {failure.text}"
        on_cpu.load_check = LoadCheckReport(warning=instead, failures=(failure.kind,)).then(on_cpu.load_check)
    else:
        _LOG.warning(
            "model '%s' runs on ONNX Runtime's CPU provider, as parameter 'engine' is \"auto\": %s", model.name, failure
        )
    return on_cpu


def _load(model: ModelSource, plan: ProviderPlan) -> OnnxModel:
    path = model.model_file
    if not path.is_file():
        raise invalid_argument(f"{path} does not exist or is not a file")
    if path.stat().st_size == 0:
        raise invalid_argument(f"{path} is empty; expected an ONNX model, copy it again")
    weights = find_external_weights(model)
    plan = with_caches(model, plan, weights)
    device = device_stream(model, plan)
    opener = SessionOpener(model, plan if device is None else device.plan, weights)
    if plan.compiling is not None and RaggedBatching(model.config):
        raise invalid_argument(
            f"model '{model.name}': {plan.compiling.kind.provider} compiles each shape, so requests of different shapes"
            " cannot share a batch there; make its instances KIND_CPU, or remove allow_ragged_batch, batch_input and"
            " batch_output"
        )
    if not plan.providers:
        return _load_session(model, opener, plan, device, weights)
    check = ProviderCheck(model, plan, weights)
    compiling = plan.compiling
    opened = (
        _load_session(model, opener, plan, device, weights, check)
        if compiling is None
        else load_fixed_shapes(model, opener, compiling, check.before)
    )
    check.after(opened)
    opened.load_check = check.report
    return opened


def _load_session(
    model: ModelSource,
    opener: SessionOpener,
    plan: ProviderPlan,
    device: DeviceStream | None,
    weights: ExternalWeights,
    check: ProviderCheck | None = None,
) -> OnnxModel:
    """Open sessions that take any shape, or each of which takes one batch size. `check`: None = on the CPU."""
    session = opener.open()
    signature = session_signature(session, model.config, opener.file)
    if check is not None:
        signature = check.before(signature)
    batches, tensors = model.config.max_batch_size > 0, (*signature.inputs, *signature.outputs)
    if batches and signature.inputs and all(spec.shape[:1] == (1,) for spec in tensors):
        _LOG.debug("model '%s' has batch size 1 in its file: the rows of a batch run one by one", model.name)
        run = SizedRun({1: session_run(session, signature)}, pad_with_first_row=True, outputs=signature.outputs)
        inputs, outputs = (
            tuple(replace(spec, shape=(-1, *spec.shape[1:])) for spec in specs)
            for specs in (signature.inputs, signature.outputs)
        )
        signature = replace(signature, inputs=inputs, outputs=outputs, supports_batching=True)
        opened = OnnxModel(run, signature, model.config, session_facts(session))
        if check is None:
            _pad(opened, session, PaddingCheck(model, opener, weights))
        else:
            _pad_on_provider(opened, check, by_default=False)
        return opened
    shapes = [spec.shape[1:] for spec in signature.inputs]
    if plan.on_gpu and signature.supports_batching and not any(-1 in shape for shape in shapes):
        # CUDA's provider plans its convolutions again, for about 0.2 s, whenever a session gets another shape.
        first, *others = compiled_batch_sizes(model.config, {}, _largest_batch(model, signature)) or (0,)
        sessions = {first: session, **{size: opener.open() for size in others}}
        runs = {size: session_run(one, signature) for size, one in sessions.items()}
        opened = _sized(model, runs, signature, session)
        if device is not None:
            opened.run_on_device(model, device, sessions.__getitem__, tuple(sessions))
        return opened
    # Large outputs are written in place if all of them lie on the CPU.
    are_numbers = all(spec.datatype not in (DataType.BYTES, DataType.BF16) for spec in signature.outputs)
    takes_bf16 = any(spec.datatype is DataType.BF16 for spec in signature.inputs)
    in_place = (
        InPlaceRun(session, signature, batches) if are_numbers and is_on_cpu(session) and not takes_bf16 else None
    )
    opened = OnnxModel(
        session_run(session, signature), signature, model.config, session_facts(session), _in_place=in_place
    )
    if check is not None:
        _pad_on_provider(opened, check, by_default=device is not None and signature.supports_batching)
        largest = _largest_batch(model, opened.signature)
        if device is not None and opened.signature.padding.dimensions and largest:
            # Nothing is compiled, so that no size costs more than a few runs.
            sizes = wanted_batch_sizes(model.config.parameters, largest, model.name) or default_batch_sizes(largest)
            opened.run_on_device(model, device, lambda rows: session, sizes)
        return opened
    padding_check = PaddingCheck(model, opener, weights)
    padding = written_padding(model.config, signature, _padding_runs(opened, session, padding_check).groups)
    opened.signature = replace(signature, padding=padding)
    if model.config.has_open_batch and signature.supports_batching:
        # First, because it measures how much memory the first batches take.
        opened.bound_batches(model.instance_count, model.memory_bytes)
    opened.signature, opened.load_check = with_checked_rows(model, opener, weights, session, opened.signature)
    # Without independent rows, the first dimension is like the others.
    _pad(opened, session, padding_check)
    return opened


def _pad(opened: OnnxModel, session: Any, check: PaddingCheck) -> None:
    """Pad the dimensions that the parameter `sizes` names, and check it in the time that the rows check has left.
    Raises ServeError (INVALID_ARGUMENT) if they cannot be padded, LoadCheckFailed as `PaddingCheck.run`."""
    runs = _padding_runs(opened, session, check)
    padding = runs.with_outputs(written_padding(check.model.config, opened.signature, runs.groups))
    seconds = check.model.settings.load_check_seconds - opened.load_check.seconds
    signature = replace(opened.signature, padding=padding)
    opened.signature, report = check.run(session, signature, max(seconds, 0.0))
    opened.load_check = opened.load_check.then(report)


def _pad_on_provider(opened: OnnxModel, check: ProviderCheck, by_default: bool) -> None:
    """Pad the dimensions that the parameter `sizes` names; without it, and with `by_default`, all open dimensions, if
    the check allows it. Raises as `ProviderPadding.chosen`."""
    sizes = ProviderPadding(check.model, check.weights, opened.signature, opened.shapes_on_zeros)
    padding, report = sizes.chosen(by_default)
    opened.signature = replace(opened.signature, padding=padding)
    check.report = check.report.then(report)


def _padding_runs(opened: OnnxModel, session: Any, check: PaddingCheck) -> PaddingRuns:
    signature = opened.signature
    return PaddingRuns(check.model.config, opened.shapes_on_zeros, lambda _: check.search(session, signature))


def load_fixed_shapes(
    model: ModelSource,
    opener: SessionOpener,
    provider: Provider,
    check: Callable[[Signature], Signature] = lambda signature: signature,
) -> OnnxModel:
    """Open a session per batch size before the first request, for a provider that compiles each shape. Such a provider
    keeps one program per session, and compiles again for every other shape. If all varying dimensions have names,
    opening the session fixes their sizes and compiles; else the warm-up compiles. `check` completes the signature by
    the load check. Raises ServeError like `load`."""
    session = opener.open_for_signature()
    signature = check(session_signature(session, model.config, opener.file))
    inputs = {node.name: tuple(node.shape) for node in session.get_inputs()}
    del session
    sizes = compiled_batch_sizes(model.config, provider.accelerator, _largest_batch(model, signature))
    runs: dict[int, Run] = {}
    try:
        for number, size in enumerate(sizes or (0,)):
            batch = f" for batch size {size} ({number + 1} of {len(sizes)})" if size else ""
            model.report(f"{provider.kind.provider} compiles the model{batch}")
            session = opener.open(fixed_dimensions(inputs, model.config, provider.kind.provider, size))
            runs[size] = session_run(session, signature)
    finally:
        model.report("")
    return _sized(model, runs, signature, session, provider.accelerator)


def _largest_batch(model: ModelSource, signature: Signature) -> int:
    """Return the largest batch size; 0 = the model has no batch dimension."""
    config = model.config
    largest = BACKEND.default_max_batch_size if config.has_open_batch else config.max_batch_size
    is_joined = config.max_batch_size > 0 or not signature.dependent_rows
    return largest if signature.supports_batching and is_joined else 0


def _sized(
    model: ModelSource,
    runs: Mapping[int, Run],
    signature: Signature,
    session: Any,
    accelerator: Mapping[str, str] = MappingProxyType({}),
) -> OnnxModel:
    """Make the model from the run function of each batch size; 0 = the model has no batch dimension."""
    sizes = tuple(size for size in runs if size)
    first = pads_with_first_row(model.config, accelerator)
    run = SizedRun(runs, first, signature.outputs) if sizes else runs[0]
    facts = {**session_facts(session), **({"batch_sizes": ", ".join(map(str, sizes))} if sizes else {})}
    return OnnxModel(run, signature, model.config, facts, sizes)


@dataclass(eq=False)
class OnnxModel:
    """Serves a model with its sessions. Safe on several threads; running releases the GIL."""

    reads_files: ClassVar[bool] = True

    _run: Run
    signature: Signature
    _config: ModelConfig
    properties: Mapping[str, str]
    _sizes: Sequence[int] = ()
    """The fixed batch sizes, each of which is warmed up; empty = the session takes any size."""
    _in_place: InPlaceRun | None = None
    """Writes large outputs in place; None = not possible."""
    executions: Sequence[Execution] = field(default=(), init=False)
    load_check: LoadCheckReport = field(default=NOT_CHECKED, init=False)

    def __post_init__(self) -> None:
        inputs, outputs = self.signature.inputs, self.signature.outputs
        self._takes_text = any(spec.datatype is DataType.BYTES for spec in inputs)
        self._bfloat16 = frozenset(spec.name for spec in outputs if spec.datatype is DataType.BF16)

    def run_on_device(
        self, model: ModelSource, device: DeviceStream, session_for: Callable[[int], Any], batch_sizes: Sequence[int]
    ) -> None:
        """Run batches in PyTorch's memory, if the model can. `session_for`: see device_executions."""
        self.executions, properties = device_executions(model, device, session_for, batch_sizes, self.signature)
        self.properties = {**self.properties, **properties}

    def shapes_on_zeros(self, padding: Padding, lengths: Lengths) -> Mapping[str, Shape]:
        """Return the shapes of the outputs for zeros of these lengths. Raises ServeError."""
        # One row alone may lose its dimension.
        rows = 1 + has_rows(self._config, self.signature)
        found = self.execute(self._zeros(rows, Buckets(padding), lengths)).outputs
        return {name: tuple(value.shape) for name, value in found.items()}

    def bound_batches(self, at_once: int, memory_bytes: int) -> None:
        """Set the signature's max_batch_size to the rows that fit into memory with `at_once` concurrent batches (see
        rows_that_fit), measured on zeros of the largest sizes."""
        try:
            padding = self.signature.padding
            buckets = Buckets(padding)
            rows = rows_that_fit(
                lambda rows: self.execute(self._zeros(rows, buckets, padding.largest)), at_once, memory_bytes
            )
        except ServeError:
            # The model does not take zeros; the warm-up reports why.
            return
        self.signature = replace(self.signature, max_batch_size=rows)
        if rows is not None and rows < BACKEND.default_max_batch_size:
            _LOG.debug("model '%s': memory suffices for batches of %d rows", self._config.name, rows)

    def warm_up(self, samples: Sequence[Batch]) -> ServeError | None:
        """Run zeros at each fixed batch size (one row if there are neither sizes nor samples), then the samples. Open
        dimensions of zeros have the smallest size or the configuration's, else 1. Returns a refusal of zeros, if there
        are no samples."""
        refusal: ServeError | None = None
        # Warm-up batches run like served batches, through the first execution.
        execution, *_ = model_executions(self)
        padding = self.signature.padding
        if self._sizes or not samples:
            try:
                for size in self._sizes or (1,):
                    execution.start(self._zeros(size, Buckets(padding), padding.smallest))
                    execution.result()
            except ServeError as error:
                _LOG.debug("model '%s': warm-up with zeros failed: %s", self._config.name, error)
                refusal = error.with_traceback(None)
        for sample in samples:
            execution.start(sample)
            execution.result()
        return None if samples else refusal

    def execute(self, batch: Batch) -> BatchResult:
        """Run a batch. Raises ServeError with ONNX Runtime's text: INVALID_ARGUMENT if ONNX Runtime blames the inputs,
        else INTERNAL."""
        inputs: Mapping[str, Array] = batch.arrays if not self._takes_text else {}
        if self._takes_text:
            inputs = {
                name: text_array(tensor.numpy()) if tensor.datatype is DataType.BYTES else tensor.numpy()
                for name, tensor in batch.inputs.items()
            }
        wanted, in_place = batch.requested_outputs, self._in_place
        results: Sequence[Array] | None = None
        if in_place is not None and in_place.fits(batch):
            try:
                results = in_place(batch, inputs)
            except Exception:
                # An output's shape may differ from the model's declaration. An input's fault is raised again by the
                # second run.
                _LOG.debug("model '%s' cannot write its outputs in place", self._config.name, exc_info=True)
        else:
            in_place = None
        try:
            if results is None:
                results = self._run(wanted, inputs)
                if in_place is not None:
                    # The plain run succeeded where the in-place run failed. Without this, every batch might run twice.
                    self._in_place = None
        except ServeError:
            raise
        except (engine_errors.InvalidArgument, ValueError) as error:
            raise invalid_argument(f"onnx runtime error: {error}") from None
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            raise internal(f"onnx runtime error: {error}") from None
        outputs: dict[str, Array | Tensor] = dict(zip(wanted, results, strict=True))
        if self._bfloat16 or self._takes_text:
            for name, array in zip(wanted, results, strict=True):
                if array.dtype == np.object_:
                    outputs[name] = bytes_array(array)
                elif name in self._bfloat16:
                    data = octets(np.ascontiguousarray(array))
                    outputs[name] = Tensor(name, DataType.BF16, array.shape, data)
        return BatchResult(outputs)

    def close(self) -> None:
        self.executions = ()
        del self._run
        self._in_place = None

    def _zeros(self, rows: int, buckets: Buckets, lengths: Lengths) -> Batch:
        """Return a batch of zeros. `lengths`: of the padded dimensions."""
        declared = {entry.name: entry for entry in self._config.inputs}
        inputs: dict[str, Tensor] = {}
        # The inputs that the server computes, for one request of zeros.
        for made in self._config.batch_inputs:
            source = declared[made.source_inputs[0]]
            shapes = [(rows, *(abs(size) for size in source.model_dims))]
            inputs.update((tensor.name, tensor) for tensor in made_tensors(made, shapes))
        for spec in self.signature.inputs:
            if spec.name in inputs or spec.name in self.signature.optional_inputs:
                continue
            # Open dimensions take the configuration's size, else 1.
            shape = spec.shape
            if (entry := declared.get(spec.name)) is not None:
                shape = (rows, *entry.model_dims) if self._config.max_batch_size > 0 else entry.model_dims
                if entry.allow_ragged_batch:
                    shape = (math.prod(abs(size) for size in shape),)
            shape = buckets.padded_shape(spec.name, shape, lengths)
            if shape[:1] == (-1,):
                shape = (rows, *shape[1:])
            whole = [1 if dim == -1 else dim for dim in shape]
            try:
                zeros = np.zeros(whole, dtype=spec.datatype.numpy_dtype)
            except (MemoryError, ValueError) as error:
                raise unavailable(f"input '{spec.name}' of shape {whole} does not fit into memory: {error}") from None
            if spec.datatype is DataType.BYTES:
                zeros.fill(b"")
            inputs[spec.name] = tensor_from_numpy(spec.name, zeros, spec.datatype)
        return Batch(inputs, tuple(spec.name for spec in self.signature.outputs), (rows,))
