"""Chooses the sizes to which a program's open dimensions are padded, those of the parameter `sizes`, or, for captured
graphs, some up to the program's own bound; and finds which outputs are cut back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from rocserve.backends.dropped_sizes import with_dropped_sizes
from rocserve.backends.padding_runs import PaddingRuns
from rocserve.backends.pytorch.binding import BoundProgram, Trial, shape_of
from rocserve.backends.pytorch.open_sizes import OpenSize, bounds_text
from rocserve.backends.pytorch.program import ProgramTensor
from rocserve.backends.pytorch.results import has_value
from rocserve.backends.written_sizes import (
    Groups,
    half_steps,
    has_rows,
    open_dimensions,
    other_size,
    text_inputs,
    written_padding,
)
from rocserve.core.errors import invalid_argument
from rocserve.core.model_config import ModelConfig
from rocserve.core.padding import NO_PADDING, Buckets, Lengths, PaddedDimension, Padding, Shape
from rocserve.core.requests import Signature, TensorSpec
from rocserve.load_check.length_trials import LengthTrials


def configured_padding(
    config: ModelConfig, bound: BoundProgram, tensors: Sequence[ProgramTensor], groups: Groups
) -> Padding:
    """Read the parameters. `tensors`: the program's inputs. `groups`: see written_padding. Raises ServeError
    (INVALID_ARGUMENT), also if the program was not exported for one of the sizes."""
    padding = written_padding(config, _labelled(config, bound.signature, tensors), groups)
    for dimension in padding.dimensions:
        for name, place, own in _places(dimension, bound, tensors):
            what = f"parameter 'sizes' of model '{config.name}' pads dimension '{dimension.label}'"
            if own is None or _others_follow(own, tensors):
                raise invalid_argument(
                    f"{what}, from which the program computes other sizes of its inputs; remove it, or export the"
                    " program with sizes that do not depend on each other"
                )
            for size in dimension.sizes:
                if not own.admits(size):
                    raise invalid_argument(
                        f"{what} to {size}, but dimension {place} of input '{name}' was exported for"
                        f" {bounds_text(own)}; leave the size out, or export the program for more sizes"
                    )
    return padding


def default_padding(config: ModelConfig, bound: BoundProgram, tensors: Sequence[ProgramTensor]) -> Padding:
    """Return the sizes of a program with one open dimension, up to its bound, beyond which a run could end the process;
    no dimensions if there are several, or the program has no bound."""
    found = open_dimensions(config, _labelled(config, bound.signature, tensors))
    if len(found) != 1 or text_inputs(bound.signature) & found[0].inputs.keys():
        return NO_PADDING
    (dimension,) = found
    sizes = [own for _, _, own in _places(dimension, bound, tensors)]
    first = sizes[0] if sizes else None
    if first is None or first.most is None or not first.is_plain or any(own != first for own in sizes):
        return NO_PADDING
    if _others_follow(first, tensors):
        return NO_PADDING
    # Longer inputs keep a GPU busy operator by operator, too.
    return Padding((replace(dimension, sizes=half_steps(min(first.most, 512), first.least), takes_others=True),))


def padding_runs(
    config: ModelConfig,
    bound: BoundProgram,
    tensors: Sequence[ProgramTensor],
    trial: Trial,
    made: Callable[[Padding], LengthTrials] | None,
) -> PaddingRuns:
    """`trial`: runs the program. `made`: see PaddingRuns."""
    specs = {spec.name: spec for spec in bound.signature.outputs}

    def zeros(padding: Padding, lengths: Lengths) -> Mapping[str, Shape]:
        outputs = bound.outputs_in(trial(bound.zeros(1, lengths, padding)))
        found: dict[str, Shape] = {}
        for name, index in bound.outputs.items():
            value, spec = outputs[index], specs[name]
            if not has_value(value):
                raise invalid_argument(f"the result has no output '{name}'; make the program always return it")
            shape = shape_of(value)
            found[name] = with_dropped_sizes(spec.shape, shape) or shape
        return found

    def second(dimension: PaddedDimension) -> int:
        own = next((own for _, _, own in _places(dimension, bound, tensors) if own is not None), None)
        if own is None or len(dimension.sizes) > 1:
            return other_size(dimension)
        less = dimension.sizes[0] - own.factor
        return less if own.admits(less) and less > 0 else dimension.sizes[0] + own.factor

    return PaddingRuns(config, zeros, made, second)


def covers_all(padding: Padding, bound: BoundProgram) -> bool:
    """Return whether no dimension of the inputs is open but the batch and those that are padded."""
    buckets, sizes = Buckets(padding), padding.smallest
    return all(-1 not in buckets.padded_shape(spec.name, spec.shape, sizes)[1:] for spec in bound.inputs)


def _labelled(config: ModelConfig, signature: Signature, tensors: Sequence[ProgramTensor]) -> Signature:
    """Return the signature with a name for each size that several places share: that of the first place, "INPUT:1", as
    in the configuration's dims. The file has only generated symbols for them."""
    first, labels = int(has_rows(config, signature)), dict[tuple[str, int, int], str]()

    def names(spec: TensorSpec, tensor: ProgramTensor) -> Iterator[str]:
        for place, own in enumerate(tensor.open_sizes):
            if own is None or place < first:
                yield ""
            else:
                yield labels.setdefault((own.number, own.factor, own.offset), f"{spec.name}:{place - first}")

    inputs = tuple(
        replace(spec, dimension_names=tuple(names(spec, tensor)))
        for spec, tensor in zip(signature.inputs, tensors, strict=True)
    )
    return replace(signature, inputs=inputs)


def _places(
    dimension: PaddedDimension, bound: BoundProgram, tensors: Sequence[ProgramTensor]
) -> Iterator[tuple[str, int, OpenSize | None]]:
    """Yield the places of a dimension with their sizes in the file, if the file has them."""
    for spec, tensor in zip(bound.inputs, tensors, strict=True):
        for place in dimension.inputs.get(spec.name, ()):
            if tensor.open_sizes:
                yield spec.name, place, tensor.open_sizes[place]


def _others_follow(own: OpenSize, tensors: Sequence[ProgramTensor]) -> bool:
    """Return whether another size is computed from the number of this one."""
    sizes = (size for tensor in tensors for size in tensor.open_sizes if size is not None)
    return any(size.number == own.number and size != own for size in sizes)
