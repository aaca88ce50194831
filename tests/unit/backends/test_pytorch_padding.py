"""Programs of which open dimensions are padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace

import numpy as np
import pytest
from support.pytorch import TorchFiles

from rocserve.backends.base import Batch, LoadedModel, ModelSource
from rocserve.backends.warmup import as_served
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.load_check import PADDING, LoadCheckFailed
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.tensors import tensor_from_numpy

# Importing PyTorch takes seconds.
pytestmark = pytest.mark.long

SourceMaker = Callable[..., ModelSource]
Loader = Callable[..., LoadedModel]

IDS, MASK = (InputConfig(name, DataType.INT64, (-1,)) for name in ("ids", "mask"))


@pytest.fixture
def load(model_source: SourceMaker, torch_files: TorchFiles) -> Iterator[Loader]:
    """Load a program with parameters, as eager PyTorch does on the CPU. `inputs`: None = those of a text encoder.
    `is_open`: the configuration does not say how many rows a batch has."""
    from rocserve.backends.pytorch import eager

    with ExitStack() as stack:

        def loaded(
            name: str = "encoder",
            max_batch_size: int = 8,
            inputs: Sequence[InputConfig] | None = None,
            outputs: Sequence[OutputConfig] = (),
            is_open: bool = False,
            **parameters: str,
        ) -> LoadedModel:
            if inputs is None:
                inputs = [replace(one, dims=(-1,) if max_batch_size else (-1, -1)) for one in (IDS, MASK)]
            source = model_source(
                f"model{torch_files.path(name).suffix}",
                torch_files.data(name),
                inputs=inputs,
                outputs=outputs,
                max_batch_size=max_batch_size,
                parameters=parameters,
            )
            config = replace(source.config, is_batch_size_written=not is_open)
            if is_open:
                config = replace(config, max_batch_size=0)
            return stack.enter_context(closing(eager.load(replace(source, config=config))))

        yield loaded


def batch_of(ids: np.ndarray) -> Batch:
    inputs = {"ids": ids, "mask": np.ones_like(ids)}
    tensors = {name: tensor_from_numpy(name, values, DataType.INT64) for name, values in inputs.items()}
    return Batch(tensors, ("states", "mean"), (len(ids),))


@pytest.mark.parametrize("max_batch_size", [0, 8])
def test_written_sizes_are_padded_and_cut_back(load: Loader, max_batch_size: int) -> None:
    label = "ids:0" if max_batch_size else "ids:1"
    model = load(max_batch_size=max_batch_size, sizes=f"{label}=8,16,32")
    (dimension,) = model.signature.padding.dimensions
    assert (dimension.label, dimension.sizes) == (label, (8, 16, 32))
    assert (dimension.inputs, dimension.outputs) == ({"ids": (1,), "mask": (1,)}, {"states": (1,)})
    assert model.load_check.parts[-1] == f"dimension '{label}' may be padded"
    for length in (2, 8, 19):
        batch = batch_of(np.random.default_rng(length).integers(0, 50, (2, length)))
        alone = model.execute(batch).outputs
        served = as_served(batch, model._config, model.signature.padding)  # type: ignore[attr-defined]
        padded = model.execute(served).outputs
        assert padded["states"].shape[1] == dimension.size_for(length)
        np.testing.assert_allclose(padded["states"][:, :length], alone["states"], atol=1e-6)
        np.testing.assert_allclose(padded["mean"], alone["mean"], atol=1e-6)


def test_bf16_is_padded_too(load: Loader) -> None:
    model = load(sizes="ids:0=8,16,32", precision="bf16")
    assert model.load_check.parts[-1] == "dimension 'ids:0' may be padded"
    for length in (2, 8, 19):
        batch = batch_of(np.random.default_rng(length).integers(0, 50, (2, length)))
        alone = model.execute(batch).outputs
        padded = model.execute(as_served(batch, model._config, model.signature.padding)).outputs  # type: ignore[attr-defined]
        # Of values up to 3, with eight bits of their fraction: a step or two.
        np.testing.assert_allclose(padded["states"][:, :length], alone["states"], atol=3e-2)
        np.testing.assert_allclose(padded["mean"], alone["mean"], atol=3e-2)


def test_what_shows_in_added_elements_is_warned_of_and_refused_under_strict(load: Loader) -> None:
    model = load("seeing_all", sizes="ids:0=8,16")
    assert model.load_check.failures == (PADDING,)
    assert model.load_check.warning.startswith("padded as configured, but dimension 'ids:0' must not be padded: output")
    with pytest.raises(LoadCheckFailed, match="dimension 'ids:0' must not be padded"):
        load("seeing_all", sizes="ids:0=8,16", load_check="strict")
    unchecked = load("seeing_all", sizes="ids:0=8,16", load_check="off")
    assert unchecked.load_check.parts == () and unchecked.signature.padding.dimensions


@pytest.mark.parametrize(
    ("name", "sizes", "text"),
    [
        ("encoder", "ids:0=8,64", "pads dimension 'ids:0' to 64, but dimension 1 of input 'ids' was exported for 0 at"),
        (
            "encoder",
            "mask:0=8",
            "names the dimension 'mask:0', which the model does not have.*open dimensions are.*ids:0",
        ),
        ("pair", "left:0=8", "from which the program computes other sizes of its inputs"),
        ("stepped", "x:0=8,18", "pads dimension 'x:0' to 18.*exported for 0 at least, at most 32, in steps of 4"),
    ],
)
def test_sizes_that_the_program_does_not_take_are_refused(load: Loader, name: str, sizes: str, text: str) -> None:
    with pytest.raises(ServeError, match=text) as refused:
        load(name, 0 if name == "pair" else 8, None if "encoder" in name else (), sizes=sizes)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT


def test_nothing_is_padded_on_the_cpu_unless_it_is_written(load: Loader) -> None:
    assert not load().signature.padding.dimensions


def outputs_of(model: LoadedModel) -> list[dict[str, tuple[int, ...]]]:
    return [dict(dimension.outputs) for dimension in model.signature.padding.dimensions]


def test_rows_that_are_padded_are_cut_back(load: Loader) -> None:
    model = load(max_batch_size=0, sizes="ids:0=2,4; ids:1=8,16")
    assert outputs_of(model) == [{"states": (0,), "mean": (0,)}, {"states": (1,)}]
    assert "dimension 'ids:0' may be padded" in model.load_check.parts


def test_inputs_of_a_file_without_sizes_are_padded_together(load: Loader) -> None:
    model = load("traced_encoder", sizes="ids:0, mask:0=8,16")
    (dimension,) = model.signature.padding.dimensions
    assert (dimension.label, dimension.inputs) == ("ids:0,mask:0", {"ids": (1,), "mask": (1,)})
    assert outputs_of(model) == [{"states": (1,)}]
    assert model.load_check.parts[-1] == "dimension 'ids:0,mask:0' may be padded"


@pytest.mark.parametrize(
    ("sizes", "max_batch_size", "place"),
    [("ids:0=8,16", 8, 1), ("mask:0=8,16", 8, 1), ("ids:0=8,16; mask:0=8,16", 8, 1), ("mask:1=8,16", 0, 1)],
)
def test_inputs_that_must_be_equal_are_padded_together(
    load: Loader, sizes: str, max_batch_size: int, place: int
) -> None:
    model = load("traced_encoder", max_batch_size, sizes=sizes)
    (dimension,) = model.signature.padding.dimensions
    assert dimension.inputs == {"ids": (place,), "mask": (place,)}
    assert model.load_check.parts[-1] == f"dimension '{dimension.label}' may be padded"
    # A mask of one element would fit beside any number of ids, and show the added ones.
    for length in (1, 5, 11):
        batch = batch_of(np.arange(1, 1 + 2 * length).reshape(2, length))
        alone = model.execute(batch).outputs
        padded = model.execute(as_served(batch, model._config, model.signature.padding)).outputs  # type: ignore[attr-defined]
        assert padded["states"].shape[1] == dimension.size_for(length)
        np.testing.assert_allclose(padded["states"][:, :length], alone["states"], atol=1e-6)
        np.testing.assert_allclose(padded["mean"], alone["mean"], atol=1e-6)


def test_sizes_of_equal_inputs_must_be_equal(load: Loader) -> None:
    with pytest.raises(ServeError, match="gives the dimensions 'ids:0' and 'mask:0' different sizes"):
        load("traced_encoder", sizes="ids:0=8,16; mask:0=8")


def test_a_program_that_refuses_zeros_is_padded(load: Loader) -> None:
    inputs, outputs = [InputConfig("x", DataType.FP32, (-1,)), MASK], [OutputConfig("OUTPUT__0", DataType.FP32, (-1,))]
    model = load("shares", inputs=inputs, outputs=outputs, sizes="x:0=8,16")
    assert outputs_of(model) == [{"OUTPUT__0": (1,)}]
    assert model.signature.padding.dimensions[0].inputs == {"x": (1,), "mask": (1,)}
    assert model.load_check.parts[-1] == "dimension 'x:0' may be padded"


@pytest.mark.parametrize("sizes", ["8,16", "32"])
def test_sizes_in_steps_are_padded(load: Loader, sizes: str) -> None:
    assert outputs_of(load("stepped", inputs=(), sizes=f"x:0={sizes}")) == [{"OUTPUT__0": (1,)}]


def test_the_largest_length_that_the_program_takes_may_be_the_only_size(load: Loader) -> None:
    assert outputs_of(load(sizes="ids:0=40")) == [{"states": (1,)}]


def test_an_output_without_its_dropped_sizes_is_cut_back(load: Loader) -> None:
    model = load(
        "squeezing",
        inputs=[InputConfig("x", DataType.FP32, (1, -1))],
        outputs=[OutputConfig("y", DataType.FP32, (1, -1))],
        sizes="x:1=8,16",
    )
    assert outputs_of(model) == [{"y": (2,)}]


def test_texts_are_cut_back(load: Loader) -> None:
    model = load(
        "spelled",
        0,
        inputs=[InputConfig("x", DataType.INT64, (-1,))],
        outputs=[OutputConfig("texts", DataType.BYTES, (-1,)), OutputConfig("y", DataType.INT64, (-1,))],
        sizes="x:0=8,16",
    )
    assert outputs_of(model) == [{"texts": (0,), "y": (0,)}]


def test_an_output_that_zeros_do_not_have_is_cut_back(load: Loader) -> None:
    outputs = [OutputConfig("found", DataType.FP32, (-1,)), OutputConfig("rest", DataType.FP32, (-1,))]
    model = load("perhaps", 8, [InputConfig("x", DataType.FP32, (-1,))], outputs, sizes="x:0=8,16")
    assert outputs_of(model) == [{"found": (1,), "rest": (1,), "OUTPUT__2": (1,)}]


def test_a_precision_that_does_not_fit_is_named_before_sizes(load: Loader) -> None:
    with pytest.raises(ServeError, match="parameter 'precision' is \"fp16\", but the program cannot compute in it"):
        load("typed_texts", inputs=(), sizes="x:0=8,16", precision="fp16")


def test_rows_that_fit_are_those_of_the_largest_size(load: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    from rocserve.backends.pytorch import model as tested

    shapes: list[tuple[int, ...]] = []

    def tried(run: Callable[[int], object], at_once: int, memory_bytes: int) -> int:
        monkeypatch.setattr(tested.TorchModel, "_call", lambda self, inputs: shapes.extend(one.shape for one in inputs))
        run(3)
        return 3

    monkeypatch.setattr(tested, "rows_that_fit", tried)
    model = load(is_open=True, sizes="ids:0=8,32")
    assert shapes == [(3, 32), (3, 32)] and model.signature.max_batch_size == 3
