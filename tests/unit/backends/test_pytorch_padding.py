"""Programs of which open dimensions are padded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from rocserve.core.model_config import InputConfig
from rocserve.core.tensors import tensor_from_numpy

SourceMaker = Callable[..., ModelSource]
Loader = Callable[..., LoadedModel]

IDS, MASK = (InputConfig(name, DataType.INT64, (-1,)) for name in ("ids", "mask"))


@pytest.fixture
def load(model_source: SourceMaker, torch_files: TorchFiles) -> Iterator[Loader]:
    """Load a program with parameters, as eager PyTorch does on the CPU."""
    from rocserve.backends.pytorch import eager

    with ExitStack() as stack:

        def loaded(name: str = "encoder", max_batch_size: int = 8, **parameters: str) -> LoadedModel:
            source = model_source(
                "model.pt2",
                torch_files.data(name),
                inputs=[replace(one, dims=(-1, -1) if not max_batch_size else (-1,)) for one in (IDS, MASK)]
                if name != "pair"
                else [],
                max_batch_size=max_batch_size,
                parameters=parameters,
            )
            config = replace(source.config, is_batch_size_written=True)
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
        ("pair", "left:0=8", "computes other sizes of its inputs from it"),
    ],
)
def test_sizes_that_the_program_does_not_take_are_refused(load: Loader, name: str, sizes: str, text: str) -> None:
    with pytest.raises(ServeError, match=text) as refused:
        load(name, 0 if name == "pair" else 8, sizes=sizes)
    assert refused.value.code is StatusCode.INVALID_ARGUMENT


def test_nothing_is_padded_on_the_cpu_unless_it_is_written(load: Loader) -> None:
    assert not load().signature.padding.dimensions
