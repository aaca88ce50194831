"""What TorchScript returns: outputs go by their keys and paths, whatever else the result has."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from support.pytorch import TorchFiles

from rocserve.backends.base import Batch, BatchResult, LoadedModel, ModelSource
from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError, StatusCode
from rocserve.core.model_config import InputConfig, OutputConfig
from rocserve.core.tensors import tensor_from_numpy

# Importing PyTorch takes seconds.
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="no PyTorch here; `make pytorch` installs it"),
]

FP32 = DataType.FP32
ROW, POSITIVE, NEGATIVE = InputConfig("x", FP32, (3,)), np.float32([1, 2, 3]), np.float32([-1, -2, -3])
Loader = Callable[..., LoadedModel]


@pytest.fixture
def loaded(model_source: Callable[..., ModelSource], torch_files: TorchFiles) -> Loader:
    """Load a file of `torch_files`, with these outputs in its configuration."""

    def load(name: str, *outputs: str, **options: Any) -> LoadedModel:
        from rocserve.backends.pytorch import eager

        path = torch_files.path(name)
        entries = [OutputConfig(output, FP32, (3,)) for output in outputs]
        options = {"inputs": [ROW], "outputs": entries, **options}
        return eager.load(model_source(f"model{path.suffix}", path.read_bytes(), **options))

    return load


def names_of(model: LoadedModel) -> list[str]:
    return [spec.name for spec in model.signature.outputs]


def run(model: LoadedModel, x: Any, *wanted: str, sizes: tuple[int, ...] = (1,), **more: Any) -> BatchResult:
    names = wanted or tuple(names_of(model))
    return model.execute(Batch({"x": tensor_from_numpy("x", x, FP32)}, names, sizes, **more))


def values(result: BatchResult) -> Mapping[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in result.outputs.items()}


def test_a_key_that_is_there_only_sometimes(loaded: Loader, caplog: pytest.LogCaptureFixture) -> None:
    model = loaded("finding")
    assert names_of(model) == ["scores"]
    assert values(run(model, POSITIVE)) == {"scores": [2, 3, 4]}
    with caplog.at_level(logging.WARNING):
        model = loaded("finding", "boxes", "scores")
    assert "output 'boxes' of model 'model' is not in the program's result for zeros, which has 'scores'" in caplog.text
    assert values(run(model, POSITIVE)) == {"scores": [2, 3, 4], "boxes": [10, 20, 30]}
    assert values(run(model, NEGATIVE, "scores")) == {"scores": [0, -1, -2]}
    with caplog.at_level(logging.WARNING):
        loaded("finding", "boxes", "masks")
    assert (
        "output 'masks' of model 'model' is not in the program's result for zeros, which has 'scores':" in caplog.text
    )
    with pytest.raises(ServeError) as raised:
        run(model, NEGATIVE)
    assert raised.value.code is StatusCode.INTERNAL
    assert raised.value.text.startswith("the program's result for this request has no output 'boxes'")
    assert "it has 'scores'" in raised.value.text


def test_a_key_like_a_number_is_a_key(loaded: Loader) -> None:
    model = loaded("finding", "boxes__0")
    with pytest.raises(ServeError, match="has no output 'boxes__0'"):
        run(model, POSITIVE, "boxes__0")


def test_the_request_that_wants_the_missing_output_fails_alone(loaded: Loader) -> None:
    model = loaded("finding", "scores", "boxes", max_batch_size=4)
    rows = np.stack([NEGATIVE, NEGATIVE * 2, NEGATIVE * 3])
    wanted: Sequence[tuple[str, ...]] = [("scores",), ("scores", "boxes"), ("scores",)]
    result = run(model, rows, "scores", "boxes", sizes=(1, 1, 1), outputs_by_request=wanted)
    assert values(result)["scores"] == (rows + 1).tolist()
    assert np.asarray(result.outputs["boxes"]).shape == (3, 3), "a failed request has rows"
    assert [*result.failures] == [1] and "no output 'boxes'" in result.failures[1].text
    assert [*run(model, rows, "boxes", sizes=(2, 1)).failures] == [0, 1], "both want it"


def test_a_warm_up_sample_may_lack_an_output(loaded: Loader) -> None:
    model = loaded("finding", "scores", "boxes")
    model.warm_up([Batch({"x": tensor_from_numpy("x", NEGATIVE, FP32)}, ("scores", "boxes"), (1,))])
    model.warm_up([])


@pytest.mark.parametrize("outputs", [(), ("second", "first"), ("RESULT[first]", "second"), ("OUTPUT__1",)])
def test_keys_in_any_order(loaded: Loader, outputs: tuple[str, ...]) -> None:
    model = loaded("reordering", *outputs)
    right = {"first": [2, 3, 4], "second": [10, 20, 30]}
    right |= {"RESULT[first]": right["first"], "OUTPUT__1": right["second"]}
    found = values(run(model, POSITIVE))
    assert found == {name: right[name] for name in found} and found.keys() >= {*outputs}


def test_nothing_in_place_of_a_tensor(loaded: Loader) -> None:
    model = loaded("perhaps", "OUTPUT__1")
    assert names_of(model) == ["OUTPUT__1", "OUTPUT__2"]
    assert values(run(model, POSITIVE, "OUTPUT__1")) == {"OUTPUT__1": [2, 3, 4]}
    model = loaded("perhaps", "RESULT[0]", "RESULT[1]", "RESULT[2][0][top]")
    expected = {"RESULT[0]": [10, 20, 30], "RESULT[1]": [2, 3, 4], "RESULT[2][0][top]": [3, 4, 5]}
    assert values(run(model, POSITIVE, *expected)) == expected
    assert values(run(model, NEGATIVE, "RESULT[1]")) == {"RESULT[1]": [0, -1, -2]}
    for name in ("RESULT[0]", "RESULT[2][0][top]"):
        with pytest.raises(ServeError) as raised:
            run(model, NEGATIVE, name)
        assert f"has no output '{name}'" in raised.value.text


def test_fields_of_a_named_tuple_are_names(loaded: Loader) -> None:
    assert values(run(loaded("of_named_tuple"), POSITIVE)) == {"first": [2, 3, 4], "second": [10, 20, 30]}
    for names in (("second", "first"), ("RESULT[second]", "RESULT[first]"), ("OUTPUT__1", "OUTPUT__0")):
        assert values(run(loaded("of_named_tuple", *names), POSITIVE)) == {names[0]: [10, 20, 30], names[1]: [2, 3, 4]}


def test_names_that_the_result_can_never_have_go_by_position(loaded: Loader) -> None:
    """A tuple has no keys, and a tensor no parts, also not its attributes' names."""
    for outputs in (("RESULT[first]", "RESULT[second]"), ("RESULT[0][T]", "RESULT[append]")):
        model = loaded("two", *outputs)
        assert names_of(model) == [*outputs]
        assert values(run(model, POSITIVE)) == {outputs[0]: [2, 3, 4], outputs[1]: [10, 20, 30]}


def test_a_number_counts_from_the_result_also_if_zeros_fail(loaded: Loader) -> None:
    assert values(run(loaded("nothing_for_zeros", "OUTPUT__2"), POSITIVE)) == {"OUTPUT__2": [4, 5, 6]}
    assert values(run(loaded("nothing_for_zeros", "one", "other"), POSITIVE)) == {"one": [2, 3, 4], "other": [3, 4, 5]}


def test_sizes_behind_strides_vary(loaded: Loader) -> None:
    """One pixel is too small for the program, and pictures of 2 to 8 give one value."""
    picture = InputConfig("x", FP32, (1, -1, -1))
    for rows in (0, 4):
        model = loaded("strided", inputs=[picture], max_batch_size=rows)
        batch = (-1,) if rows else ()
        shapes = [spec.shape for spec in model.signature.outputs]
        assert shapes == [(*batch, 2, -1, -1), (*batch, 2)]


@pytest.mark.parametrize("name", ["OUTPUT__0", "scores"])
def test_a_squeezed_row_is_a_row_where_the_configuration_says_so(loaded: Loader, name: str) -> None:
    """The worker gives such a row its sizes of 1 back."""
    column = InputConfig("x", FP32, (3, 1))
    model = loaded("squeezing", name, inputs=[column], max_batch_size=4)
    assert [spec.shape for spec in model.signature.outputs] == [(-1, 3)]
    rows = np.float32([[[1], [2], [3]], [[4], [5], [6]]])
    assert values(run(model, rows, sizes=(1, 1))) == {name: [[2, 3, 4], [5, 6, 7]]}
    with pytest.raises(
        ServeError, match="so the model does not batch; remove max_batch_size, or, if one row lacks only sizes of"
    ):
        loaded("squeezing", inputs=[column], max_batch_size=4)


def test_an_empty_list_in_a_program_of_torch_export_is_no_output(loaded: Loader) -> None:
    model = loaded("lists", inputs=[], max_batch_size=4)
    assert values(run(model, np.float32([[1, 2, 3, 4]]))) == {"twice": [[2, 4, 6, 8]]}
