"""Checks a request against its model's configuration. Status codes and texts are Triton's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from rocserve.core.datatypes import DataType
from rocserve.core.errors import invalid_argument
from rocserve.core.memo import Memo
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import NO_PADDING, Bucket, Buckets, Padding
from rocserve.core.parameters import NO_PARAMETERS, check_request_parameters, class_count
from rocserve.core.printable import listed, names_hint
from rocserve.core.request_prefix import request_prefix
from rocserve.core.requests import InferRequest, InputHead, InputPlan, RequestHead, RequestPlan, client_parameters
from rocserve.core.tensor_places import PackedTensors, PlacedTensors
from rocserve.core.tensors import Buffer, element_fault

_BATCH_NOTE = (
    "NOTE: Setting a non-zero max_batch_size in the model config requires a batch dimension to be prepended to each"
    " input shape. If you want to specify the full shape including the batch dim in your input dims config, try"
    " setting max_batch_size to zero. See the model configuration docs for more info on max_batch_size."
)


class RequestValidator:
    """Turns request heads into plans and caches them, because clients repeat their heads. Of several faulty inputs the
    last is reported, and errors list inputs from last to first, as Triton does."""

    def __init__(self, config: ModelConfig, sees_requests: bool = False, padding: Padding = NO_PADDING) -> None:
        """`sees_requests`: the model sees single requests, with the client's own parameters. `padding`: the
        signature's."""
        self._config = config
        self.sees_requests = sees_requests
        self._inputs = {entry.name: entry for entry in config.inputs}
        self._required = tuple(entry.name for entry in config.inputs if not entry.optional)
        self._outputs = tuple(entry.name for entry in config.outputs)
        self._plans = Memo[RequestHead, RequestPlan]()
        self._buckets = Buckets(padding)
        self._known_buckets = Memo[object, Bucket]()

    def validate(self, request: InferRequest) -> RequestPlan:
        """Set a request's plan and check its data. Raises ServeError (INVALID_ARGUMENT) with Triton's text."""
        plan = self._plans.get(request.head)
        if plan is None:
            plan = self.plan(request.head, request_prefix([request.id]))
            if plan.is_small:
                self._plans.keep(request.head, plan)
        contents = request.data
        # isinstance() of an abstract class takes longer than everything else here.
        if type(contents) is PlacedTensors or type(contents) is PackedTensors:
            sizes = contents.sizes
        else:
            sizes = [*map(len, contents)]
        if sizes != plan.input_bytes:
            for index, (entry, data) in enumerate(zip(plan.inputs, contents, strict=True)):
                if len(data) != entry.nbytes:
                    self._check_bytes(entry, data, request, index)
        request.plan = plan
        request.nbytes = plan.nbytes or sum(sizes)
        return plan

    def _check_bytes(self, entry: InputPlan, data: Buffer, request: InferRequest, index: int) -> None:
        if entry.nbytes >= 0:
            raise invalid_argument(
                f"{request_prefix([request.id])}input byte size mismatch for input '{entry.name}' for model"
                f" '{self._config.name}'. Expected {entry.nbytes}, got {len(data)}"
            )
        counted = request.element_faults
        fault = counted[index] if counted is not None else element_fault(data, entry.element_count)
        if fault:
            where = f"inference input '{entry.name}' for model '{self._config.name}'"
            raise invalid_argument(request_prefix([request.id]) + fault.format(where=where))

    def plan(self, head: RequestHead, prefix: str) -> RequestPlan:
        """Plan any request with this head. `prefix` begins error texts. Raises ServeError (INVALID_ARGUMENT)."""
        check_request_parameters(head.parameters)
        _check_named_once("input", [entry.name for entry in head.inputs], prefix)
        _check_named_once("output", [output.name for output in head.outputs], prefix)
        classifications: dict[str, int] = {}
        for output in head.outputs:
            if output.name not in self._outputs:
                raise invalid_argument(
                    f"unexpected inference output '{output.name}' for model '{self._config.name}'"
                    f"{names_hint('its outputs are', output.name, self._outputs)}"
                )
            if count := class_count(output.parameters):
                classifications[output.name] = count
        outputs = tuple(output.name for output in head.outputs) or self._outputs
        self._check_input_names(head, prefix)
        batch_size = self._batch_size(head, prefix)
        inputs = tuple(
            self._plan_input(entry, prefix, entry.name in head.references) for entry in reversed(head.inputs)
        )[::-1]
        shared = ((entry.name, entry.head.datatype, self._shared_shape(entry)) for entry in inputs)
        batch_key = tuple(sorted(shared, key=lambda key: key[0]))
        shapes = [(entry.name, entry.shape) for entry in inputs]
        return RequestPlan(
            batch_size=batch_size,
            inputs=inputs,
            batch_key=batch_key,
            outputs=outputs,
            classifications=classifications,
            priority=int(head.parameters.get("priority", 0)),
            timeout_microseconds=int(head.parameters.get("timeout", 0)),
            parameters=client_parameters(head) if self.sees_requests else NO_PARAMETERS,
            reference_outputs=tuple(name for name in outputs if name in head.reference_outputs),
            is_small=head.is_small,
            bucket=self._bucket(shapes, batch_key, batch_size, prefix) if self._buckets else None,
            real_elements=self._buckets.elements(shapes),
        )

    def _shared_shape(self, entry: InputPlan) -> tuple[int, ...]:
        """Return the part of an input's shape that all requests of a batch share."""
        if self._inputs[entry.name].allow_ragged_batch:
            return ()
        return self._buckets.shared_shape(entry.name, entry.shape)[int(self._config.max_batch_size > 0) :]

    def _bucket(
        self, shapes: Sequence[tuple[str, tuple[int, ...]]], batch_key: object, batch_size: int, prefix: str
    ) -> Bucket:
        try:
            bucket = self._buckets.bucket(shapes, batch_size)
        except ValueError as fault:
            raise invalid_argument(f"{prefix}{fault} (model '{self._config.name}')") from None
        key = (bucket.sizes, batch_key)
        return self._known_buckets.get(key) or self._known_buckets.keep(key, bucket)

    def _check_input_names(self, head: RequestHead, prefix: str) -> None:
        names = [entry.name for entry in head.inputs]
        if not len(self._required) <= len(names) <= len(self._inputs):
            raise invalid_argument(prefix + self._wrong_input_count(names))
        for entry in reversed(head.inputs):
            if entry.name not in self._inputs:
                raise invalid_argument(
                    f"unexpected inference input '{entry.name}' for model '{self._config.name}'"
                    f"{names_hint('its inputs are', entry.name, self._inputs)}"
                )
        if not set(names).issuperset(self._required):
            raise invalid_argument(prefix + self._wrong_input_count(names))

    def _wrong_input_count(self, names: Sequence[str]) -> str:
        required, total = len(self._required), len(self._inputs)
        expected = (
            f"expected {total} inputs"
            if required == total
            else f"expected number of inputs between {required} and {total}"
        )
        missing = [name for name in self._required if name not in names]
        extra = [name for name in names if name not in self._inputs]
        # Triton's sentence speaks of missing inputs only.
        known = f" The model has no input {_quoted(extra)}; its inputs are: {listed(sorted(self._inputs))}"
        return (
            f"{expected} but got {len(names)} inputs for model '{self._config.name}'. Got input(s)"
            f" [{_quoted(names[::-1])}], but missing required input(s) [{_quoted(missing)}]. Please provide all"
            f" required input(s).{known if extra else ''}"
        )

    def _batch_size(self, head: RequestHead, prefix: str) -> int:
        model, limit = self._config.name, self._config.max_batch_size
        if limit == 0:
            return 1
        batch_size: int | None = None
        for entry in reversed(head.inputs):
            if not entry.shape:
                raise invalid_argument(
                    f"{prefix}input '{entry.name}' has no shape but model requires batch dimension for '{model}'"
                )
            if batch_size is None:
                batch_size = entry.shape[0]
            elif entry.shape[0] != batch_size:
                raise invalid_argument(
                    f"{prefix}input '{entry.name}' batch size does not match other inputs for '{model}'"
                )
        size = 1 if batch_size is None else batch_size
        if size < 1:
            raise invalid_argument(f"{prefix}inference request batch-size must be >= 1 for '{model}'")
        if size > limit:
            way_out = (
                "; the server chose this limit: write a larger max_batch_size into config.pbtxt, or send fewer rows"
            )
            raise invalid_argument(
                f"{prefix}inference request batch-size must be <= {limit} for '{model}'"
                f"{way_out if self._config.is_batch_size_chosen else ''}"
            )
        return size

    def _plan_input(self, entry: InputHead, prefix: str, is_reference: bool) -> InputPlan:
        model, expected = self._config.name, self._inputs[entry.name]
        if entry.datatype != expected.datatype.value:
            is_number = expected.datatype.numpy_dtype.kind in "iuf"
            default = {"FP64": "float64", "INT64": "int64"}.get(entry.datatype, "") if is_number else ""
            advice = f"; numpy makes {default} by default: send array.astype('{expected.datatype.numpy_dtype}')"
            raise invalid_argument(
                f"{prefix}inference input '{entry.name}' data-type is '{entry.datatype}', but model '{model}' expects"
                f" '{expected.datatype.value}'{advice if default and expected.datatype is not DataType.BF16 else ''}"
            )
        batching = self._config.max_batch_size > 0
        dims = entry.shape[1:] if batching else entry.shape
        if len(dims) == len(expected.dims) and -1 in dims:
            raise invalid_argument(
                f"{prefix}All input dimensions should be specified for input '{entry.name}' for model '{model}', got"
                f" {format_shape(entry.shape)}"
            )
        if not (expected.any_rank or admits(expected.dims, dims)) or any(size < 0 for size in dims):
            full = (-1, *expected.dims) if batching else expected.dims
            note = _BATCH_NOTE if batching else ""
            if self._config.is_batch_size_chosen:
                # Without a written max_batch_size, the advice to set it to zero does not apply.
                note = ""
                if admits(expected.dims, entry.shape):
                    note = f"The first dimension is the batch: send {format_shape((1, *entry.shape))}"
                elif admits(full, (*entry.shape, 1)):
                    note = f"Each row has one value: send {format_shape((*entry.shape, 1))}"
            raise invalid_argument(
                f"{prefix}unexpected shape for input '{entry.name}' for model '{model}'. Expected {format_shape(full)},"
                f" got {format_shape(entry.shape)}. {note}"
            )
        if expected.reshape is not None:
            dims = reshape_dims(dims, expected.dims, expected.reshape)
        seen = (*entry.shape[:1], *dims) if batching else dims
        if is_reference:
            rows = entry.shape[0] if batching else 1
            return InputPlan(entry.name, expected.datatype, seen, rows, -1, is_reference)
        count = math.prod(entry.shape)
        nbytes = -1 if expected.datatype is DataType.BYTES else count * expected.datatype.itemsize
        return InputPlan(entry.name, expected.datatype, seen, count, nbytes)


def _check_named_once(what: str, names: Sequence[str], prefix: str) -> None:
    """Raise ServeError, in Triton's words, for the first repeated name."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise invalid_argument(f"{prefix}{what} '{name}' already exists in request")
        seen.add(name)


def reshape_dims(dims: tuple[int, ...], pattern: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """Return `target` with each -1 replaced by the next size of `dims` for which `pattern` has -1."""
    variable = iter(size for size, expected in zip(dims, pattern, strict=True) if expected == -1)
    return tuple(next(variable, size) if size == -1 else size for size in target)


def admits(pattern: Sequence[int], dims: Sequence[int]) -> bool:
    """Return whether dims fit a shape with -1 for variable sizes."""
    return len(pattern) == len(dims) and all(
        expected in (-1, size) for expected, size in zip(pattern, dims, strict=True)
    )


def _quoted(names: Sequence[str]) -> str:
    return ",".join(f"'{name}'" for name in names)


def format_shape(shape: Iterable[int]) -> str:
    """Return a shape as Triton's messages write it: [-1,16]."""
    return "[" + ",".join(str(size) for size in shape) + "]"
