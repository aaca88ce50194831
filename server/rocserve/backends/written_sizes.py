"""Reads the parameters `sizes` and `padding`: to which sizes a model's open dimensions are padded, and with what.

parameters { key: "sizes" value: { string_value: "sequence=16,32,64,128; IMAGE:1=224,320; ids:0,mask:0=16,32" } }
parameters { key: "padding" value: { string_value: "0; input_ids=1" } }
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

import numpy as np

from rocserve.backends.batch_sizes import parse_batch_sizes
from rocserve.backends.parameters import LOAD_CHECK
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, invalid_argument
from rocserve.core.load_check import PADDING, LoadCheckFailed, LoadCheckMode, LoadCheckReport
from rocserve.core.model_config import ModelConfig, state_inputs
from rocserve.core.padding import Lengths, PaddedDimension, Padding, Shape, joined
from rocserve.core.printable import names_hint
from rocserve.core.ragged import RaggedBatching
from rocserve.core.requests import Signature, TensorSpec
from rocserve.load_check.padding_verdict import PaddingVerdict

SIZES = "sizes"
VALUES = "padding"


def is_mask(name: str) -> bool:
    """Return whether an input says which elements are real, by its name."""
    return "mask" in name.lower()


def has_rows(config: ModelConfig, signature: Signature) -> bool:
    """Return whether the first dimension of each tensor counts the rows of a batch, as the configuration says, or will
    say when it is completed."""
    is_completed = config.has_open_batch and signature.supports_batching and not signature.dependent_rows
    return config.max_batch_size > 0 or is_completed


def text_inputs(signature: Signature) -> frozenset[str]:
    """Return the inputs that no engine pads."""
    return frozenset(spec.name for spec in signature.inputs if spec.datatype is DataType.BYTES)


def open_dimensions(config: ModelConfig, signature: Signature) -> Sequence[PaddedDimension]:
    """Return the dimensions that requests may send in any length, without sizes, but for the rows of a batch, and for
    those of a sequence's states, whose sizes the model decides."""
    batching = config.sequence_batching
    states = frozenset(state.name for state in state_inputs(batching)) if batching is not None else frozenset()
    first = int(has_rows(config, signature))
    declared = {entry.name: entry.model_dims for entry in (*config.inputs, *config.outputs) if not entry.any_rank}
    rows = {spec.dimension_names[0] for spec in signature.inputs if first and spec.dimension_names}

    def labels(spec: TensorSpec) -> Iterable[tuple[int, str]]:
        """Yield the open places of a tensor, and their labels."""
        own = () if spec.any_rank else declared.get(spec.name, spec.shape[first:])
        for place, (size, given) in enumerate(zip(spec.shape[first:], own, strict=False), first):
            name = spec.dimension_names[place] if spec.dimension_names else ""
            # The configuration may fix a size that the file leaves open.
            if size == given == -1 and (not name or name not in rows):
                yield place, name or f"{spec.name}:{place - first}"

    def places(specs: Iterable[TensorSpec], label: str) -> Mapping[str, tuple[int, ...]]:
        found = {spec.name: tuple(place for place, own in labels(spec) if own == label) for spec in specs}
        return {name: own for name, own in found.items() if own}

    found: list[PaddedDimension] = []
    for label in dict.fromkeys(label for spec in signature.inputs for _, label in labels(spec)):
        inputs = places(signature.inputs, label)
        if states.isdisjoint(inputs):
            found.append(PaddedDimension(label, (), inputs, places(signature.outputs, label)))
    return found


def half_steps(longest: int, least: int = 0) -> tuple[int, ...]:
    """Return 16, 24, 32, 48, 64, 96 ... from `least` to `longest`, and `longest` itself. Powers of two alone pad twice
    as many elements."""
    # From 16 on, because shorter requests take an engine as long.
    powers = [1 << exponent for exponent in range(4, longest.bit_length())]
    steps = {*powers, *(power + power // 2 for power in powers)}
    return (*sorted(size for size in steps if least <= size < longest), longest)


Groups = Callable[[Sequence[PaddedDimension]], Sequence[Sequence[int]]]
"""Returns open dimensions by their indices, in groups: the lengths of those of a group must be equal."""


def written_padding(config: ModelConfig, signature: Signature, groups: Groups | None = None) -> Padding:
    """Read the parameters; no dimensions if `sizes` is not written. `groups`: finds dimensions that are one dimension
    with several labels, any of which may be written; None = the file's dimensions. Dimensions whose sizes are not
    written have none. Raises ServeError (INVALID_ARGUMENT)."""
    text = config.parameters.get(SIZES, "").strip()
    dimensions = open_dimensions(config, signature) if text else ()
    texts = text_inputs(signature)
    padded = _written_sizes(text, config, {one.label: one for one in dimensions}, texts) if text else ()
    if groups is not None and padded and len(found := _with_unwritten(padded, dimensions)) > 1:
        wholes = (_equal(config, [found[index] for index in group], texts) for group in groups(found))
        padded = tuple(one for one in wholes if one.sizes)
    return Padding(padded, padding_values(config, signature, padded))


def _with_unwritten(
    written: Sequence[PaddedDimension], dimensions: Sequence[PaddedDimension]
) -> Sequence[PaddedDimension]:
    """Return all open dimensions, those without written sizes without sizes."""
    found: list[PaddedDimension] = []
    for item in dimensions:
        name, (place, *_) = next(iter(item.inputs.items()))
        own = next((one for one in written if place in one.inputs.get(name, ())), item)
        if own not in found:
            found.append(own)
    return found


def _equal(config: ModelConfig, dimensions: Sequence[PaddedDimension], texts: Set[str]) -> PaddedDimension:
    """Return dimensions whose lengths must be equal as one. Raises ServeError (INVALID_ARGUMENT)."""
    prefix, whole = f"parameter '{SIZES}' of model '{config.name}'", joined(dimensions)
    for other in dimensions:
        if other.sizes and other.sizes != whole.sizes:
            raise invalid_argument(
                f"{prefix} gives the dimensions '{whole.label}' and '{other.label}' different sizes, but the model"
                " needs equal ones; write the sizes of one of them"
            )
    if whole.sizes and (found := texts & whole.inputs.keys()):
        raise invalid_argument(
            f"{prefix} names the dimension '{whole.label}', which must equal a dimension of the texts in input"
            f" '{min(found)}'; texts cannot be padded"
        )
    return whole


def other_size(dimension: PaddedDimension) -> int:
    """Return a size besides the first. Models take few that are not written: none above the largest, as of a table of
    positions, and seldom another than a smaller one."""
    first, *others = dimension.sizes
    return others[0] if others else first - 1 or 2


def with_measured_outputs(
    padding: Padding,
    config: ModelConfig,
    shapes: Callable[[Lengths], Mapping[str, Shape]],
    second: Callable[[PaddedDimension], int] = other_size,
) -> Padding:
    """Return the padding with those places of the outputs that follow a dimension in fact, whatever they are called.
    `shapes`: runs the model with these lengths, and returns the shapes of its outputs. `second`: returns a size besides
    a dimension's first. Raises ServeError (INVALID_ARGUMENT) if an output has other lengths than the inputs, so that it
    cannot be cut back."""
    first = padding.smallest
    before = shapes(first) if first else {}
    found: list[PaddedDimension] = []
    for index, dimension in enumerate(padding.dimensions):
        other = second(dimension)
        after = shapes((*first[:index], other, *first[index + 1 :]))
        outputs: dict[str, tuple[int, ...]] = {}
        for name, shape in before.items():
            pairs = [*zip(shape, after[name], strict=False)]
            follows = tuple(place for place, (size, now) in enumerate(pairs) if size != now)
            if len(shape) != len(after[name]) or any(pairs[place] != (first[index], other) for place in follows):
                remedy = (
                    "remove it" if is_written(config) else "give the dimension a number in the configuration's dims"
                )
                raise invalid_argument(
                    f"{subject(config)} cannot pad dimension '{dimension.label}': output"
                    f" '{name}' has the shape {list(shape)} for the size {first[index]} and {list(after[name])} for"
                    f" {other}, and can be cut back only where its sizes are those of the dimension; {remedy}"
                )
            if follows:
                outputs[name] = follows
        found.append(replace(dimension, outputs=outputs))
    return replace(padding, dimensions=tuple(found))


def subject(config: ModelConfig) -> str:
    """Return what pads a model, as errors begin."""
    return f"parameter '{SIZES}' of model '{config.name}'" if is_written(config) else f"model '{config.name}'"


def is_written(config: ModelConfig) -> bool:
    """Return whether `sizes` is written."""
    return bool(config.parameters.get(SIZES, "").strip())


def _written_sizes(
    text: str, config: ModelConfig, dimensions: Mapping[str, PaddedDimension], texts: Set[str]
) -> tuple[PaddedDimension, ...]:
    """Return the dimensions that are named, in the order of `dimensions`. `texts`: the inputs that hold texts."""
    prefix = f"parameter '{SIZES}' of model '{config.name}'"
    if RaggedBatching(config):
        raise invalid_argument(
            f"{prefix} pads requests of different lengths, but allow_ragged_batch, batch_input and batch_output join"
            " them without padding; remove one or the other"
        )
    order = [*dimensions]
    found: dict[int, PaddedDimension] = {}
    named: set[str] = set()
    for entry in filter(None, map(str.strip, text.split(";"))):
        label, is_pair, sizes = entry.rpartition("=")
        # A name in the file may have commas.
        own = [label.strip()] if label.strip() in dimensions else [*map(str.strip, label.split(","))]
        if not is_pair or not all(own):
            raise invalid_argument(f"{prefix} must be as in \"sequence=16,32,64; IMAGE:1=224,320\", not '{entry}'")
        for label in own:
            if label not in dimensions:
                hint = names_hint("its open dimensions are", label, dimensions)
                raise invalid_argument(
                    f"{prefix} names the dimension '{label}', which the model does not have, or which is not open"
                    f"{hint or '; none of its dimensions is open'}"
                )
            if label in named:
                raise invalid_argument(f"{prefix} names the dimension '{label}' twice")
            if texts & dimensions[label].inputs.keys():
                raise invalid_argument(f"{prefix} names the dimension '{label}' of texts, which cannot be padded")
            named.add(label)
        label = ",".join(own)
        found_sizes = parse_batch_sizes(sizes, None, f"dimension '{label}' in {prefix}")
        whole = joined([dimensions[one] for one in own])
        found[order.index(own[0])] = replace(whole, label=label, sizes=found_sizes)
    return tuple(found[index] for index in sorted(found))


def padding_values(
    config: ModelConfig, signature: Signature, dimensions: Iterable[PaddedDimension]
) -> Mapping[str, float]:
    """Return the values other than 0 with which padded inputs are filled. Raises ServeError (INVALID_ARGUMENT)."""
    padded = {name for dimension in dimensions for name in dimension.inputs}
    specs = {spec.name: spec for spec in signature.inputs if spec.name in padded}
    text, values = config.parameters.get(VALUES, ""), dict.fromkeys(specs, 0.0)
    for entry in sorted(filter(None, map(str.strip, text.split(";"))), key=lambda entry: "=" in entry):
        name, is_pair, number = entry.rpartition("=")
        name = name.strip()
        if is_pair and name not in specs:
            hint = names_hint("the padded inputs are", name, specs)
            raise _unfit(config, f"names the input '{name}', which is not padded{hint or ': no input is'}")
        # Added elements are not real, whatever value is written for all inputs.
        meant = [name] if is_pair else [one for one in specs if not is_mask(one)]
        for one in meant:
            values[one] = _value(number.strip(), specs[one], config)
    return {name: value for name, value in values.items() if value}


def written_values(config: ModelConfig) -> frozenset[str]:
    """Return the inputs of which the parameter `padding` gives the value by name."""
    entries = config.parameters.get(VALUES, "").split(";")
    return frozenset(entry.rpartition("=")[0].strip() for entry in entries if "=" in entry)


def padding_report(verdict: PaddingVerdict, mode: LoadCheckMode) -> LoadCheckReport:
    """Return what users read of the check of written sizes. Raises LoadCheckFailed if it is strict, and answers
    change."""
    report = verdict.report(warns_of_undecided=mode is LoadCheckMode.STRICT)
    if mode is LoadCheckMode.STRICT and report.failures:
        raise LoadCheckFailed(
            PADDING,
            f"parameter '{SIZES}' pads requests, but {verdict.refusals}; remove it from '{SIZES}', or set parameter"
            f' "{LOAD_CHECK}" to "on" to serve it with a warning',
        )
    return report


def _value(text: str, spec: TensorSpec, config: ModelConfig) -> float:
    try:
        value = float(text)
        kind = np.dtype(np.float32) if spec.datatype is DataType.BF16 else spec.datatype.numpy_dtype
        # Whole numbers beyond 2^53 are not exact as floats.
        fits = kind.kind == "f" or (abs(value) <= 2**53 and float(np.array(int(value), kind)) == value)
    except (ValueError, OverflowError):
        fits = False
    if not fits:
        raise _unfit(config, f"must be numbers that {spec.datatype.value} holds for input '{spec.name}', not '{text}'")
    return value


def _unfit(config: ModelConfig, why: str) -> ServeError:
    return invalid_argument(f"parameter '{VALUES}' of model '{config.name}' {why}")
