"""Runs sessions of ONNX Runtime on a GPU in PyTorch's memory and on its stream. ONNX Runtime can compute on a given
stream; PyTorch provides streams, memory and graphs. So batches run like those of the pytorch backend: at fixed sizes,
from pinned memory, through captured graphs, two in flight, with tensors that may stay on the GPU."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import onnxruntime

from rocserve.backends.base import Batch, BatchResult, Execution, ModelSource
from rocserve.backends.onnx.provider_options import CUDA, ROCM
from rocserve.backends.onnx.providers import ProviderPlan
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, internal, unavailable
from rocserve.core.padding import Buckets
from rocserve.core.requests import Signature
from rocserve.core.steps import result_of
from rocserve.core.tensors import Tensor

if TYPE_CHECKING:
    from rocserve.backends.device_tensors import DeviceTensors

_LOG = logging.getLogger(__name__)

BATCHES_ON_GPU = 2
"""Concurrent batches per instance: one is gathered while another runs."""


class DeviceStream:
    """Holds a PyTorch stream on the instance's GPU for the model's sessions."""

    def __init__(self, model: ModelSource, plan: ProviderPlan) -> None:
        """Raises RuntimeError if PyTorch cannot use the GPU."""
        import torch

        from rocserve.backends.device_tensors import instance_gpu

        self.device = instance_gpu(model.device)
        torch.cuda.set_device(self.device)
        self.stream = torch.cuda.Stream(self.device)
        stream = {"user_compute_stream": str(self.stream.cuda_stream)}
        providers = (
            replace(provider, options={**provider.options, **stream}) if provider.kind.on_gpu else provider
            for provider in plan.providers
        )
        self.plan = replace(plan, providers=tuple(providers))
        """The plan whose GPU providers compute on the stream."""


def device_stream(model: ModelSource, plan: ProviderPlan) -> DeviceStream | None:
    """Open a stream; None = no batch dimension, a provider that takes no stream, or PyTorch cannot use the GPU."""
    batches = model.config.max_batch_size > 0 or model.config.has_open_batch
    on_gpu = [provider for provider in plan.providers if provider.kind.on_gpu]
    takes = all(provider.kind in (CUDA, ROCM) and not provider.devices for provider in on_gpu)
    if not (plan.on_gpu and batches and takes) or importlib.util.find_spec("torch") is None:
        return None
    try:
        return DeviceStream(model, plan)
    except (ImportError, RuntimeError) as error:
        _LOG.info("model '%s' runs without captured graphs: %s", model.name, error)
        return None


def device_executions(
    model: ModelSource,
    device: DeviceStream,
    session_for: Callable[[int], Any],
    batch_sizes: Sequence[int],
    signature: Signature,
) -> tuple[Sequence[Execution], Mapping[str, str]]:
    """Return executions of the batch sizes, and facts for the model's metadata. No executions = the sessions cannot run
    in PyTorch's memory. Sessions that cannot be captured run operator by operator. `session_for`: returns the session
    of a batch size; if dimensions are padded, one that takes any size."""
    padding = signature.padding
    buckets = Buckets(padding)
    # ONNX Runtime binds memory by numpy's types, which lack these two.
    if signature.optional_inputs or any(
        spec.datatype in (DataType.BYTES, DataType.BF16)
        or -1 in buckets.padded_shape(spec.name, spec.shape, padding.smallest)[1:]
        for spec in (*signature.inputs, *signature.outputs)
    ):
        return (), {}
    from rocserve.backends.pytorch.fixed_sizes import sized_executions
    from rocserve.core.device_references import DEVICE_PROPERTY

    sized = _DeviceSessions(model, device, session_for, signature)
    # A session of any length computes with lengths on the CPU, which no graph can hold. A session for each pair of a
    # length and a batch size could be captured, but each has its own weights (330 MB for a BERT-base in half
    # precision), takes a second to open, and runs 64 texts no faster.
    for captures in (False,) if buckets else (True, False):
        try:
            with sized.mode():
                executions, steps = sized_executions(
                    sized, sized.call, signature.inputs, batch_sizes, BATCHES_ON_GPU, captures, model.report,
                    device.stream, padding,
                )  # fmt: skip
                # A session takes only its own batch size, so none can stand in for another. Without graphs all sizes
                # take a few runs each.
                result_of(steps)
        except Exception as error:
            how = "by captured graphs" if captures else "in PyTorch's memory"
            _LOG.warning("model '%s' cannot run %s: %s", model.name, how, error)
        else:
            return executions, {
                # Memory may not suffice for all sizes.
                "batch_sizes": ", ".join(map(str, executions[0].batch_sizes)),
                "graphs": "captured" if captures else "none",
                # Outputs are cut back in the worker's memory.
                **({} if buckets else {DEVICE_PROPERTY: sized.tensors.name}),
            }
        finally:
            model.report("")
    return (), {}


class _DeviceSessions:
    """Makes a SizedModel of sessions that each take one batch size, or of one that takes any size."""

    def __init__(
        self, model: ModelSource, device: DeviceStream, session_for: Callable[[int], Any], signature: Signature
    ) -> None:
        from rocserve.backends.device_tensors import DeviceTensors

        self.device = device.device
        self.tensors: DeviceTensors = DeviceTensors(device.device)
        self._stream = device.stream
        self._session_for = session_for
        self._inputs, self._outputs = signature.inputs, signature.outputs
        self._output_index = {spec.name: index for index, spec in enumerate(signature.outputs)}
        self._buckets = Buckets(signature.padding)
        self._batches = model.config.max_batch_size > 0
        self._options = onnxruntime.RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    def call(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the session for the inputs' number of rows. The returned outputs have their values when the current
        stream has done the work that is queued in it now."""
        import torch

        from rocserve.backends.pytorch.datatypes import torch_dtype

        rows = len(inputs[0])
        lengths = self._buckets.lengths(
            (spec.name, tuple(value.shape)) for spec, value in zip(self._inputs, inputs, strict=True)
        )
        session = self._session_for(rows)
        binding = session.io_binding()
        shapes = [self._buckets.padded_shape(spec.name, (rows, *spec.shape[1:]), lengths) for spec in self._outputs]
        outputs = [
            torch.empty(shape, dtype=torch_dtype(spec.datatype), device=self.device)
            for spec, shape in zip(self._outputs, shapes, strict=True)
        ]
        index = self.device.index
        for bind, specs, values in (
            (binding.bind_input, self._inputs, inputs),
            (binding.bind_output, self._outputs, outputs),
        ):
            for spec, value in zip(specs, values, strict=True):
                element = spec.datatype.numpy_dtype
                bind(spec.name, "cuda", index, element, tuple(value.shape), value.data_ptr())
        current = torch.cuda.current_stream(self.device)
        if current != self._stream:
            self._stream.wait_stream(current)
        session.run_with_iobinding(binding, self._options)
        if current != self._stream:
            current.wait_stream(self._stream)
        return outputs

    def inputs_of(self, batch: Batch) -> tuple[list[Tensor], Mapping[int, ServeError]]:
        return [batch.inputs[spec.name] for spec in self._inputs], {}

    def value(self, tensor: Tensor, copies: bool) -> Any:
        return self.tensors.value(tensor, copies)

    def outputs_on_gpu(self, batch: Batch) -> Collection[int]:
        return [self._output_index[name] for name in batch.reference_outputs]

    def batch_result(self, outputs: Sequence[Any], batch: Batch, failures: Mapping[int, ServeError]) -> BatchResult:
        from rocserve.backends.device_tensors import named_outputs

        return named_outputs(
            {name: outputs[self._output_index[name]] for name in batch.requested_outputs}, self._batches
        )

    @contextmanager
    def errors(self) -> Iterator[None]:
        import torch

        try:
            yield
        except ServeError:
            raise
        except torch.OutOfMemoryError as error:
            raise unavailable(f"PyTorch: {error}") from None
        except Exception as error:
            # The binding's exceptions have no common base class but Exception.
            raise internal(f"onnx runtime error: {error}") from None

    def mode(self) -> AbstractContextManager[Any]:
        import torch

        mode: AbstractContextManager[Any] = torch.inference_mode()
        return mode
