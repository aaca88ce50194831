"""Programs of models whose open dimensions are padded, on the real engine, target ref, compared with ONNX Runtime."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from support.encoders import encoder, with_own_names
from support.load_check import model
from support.migraphx_engine import Array, Engine, answers, given, padded, request, wait_for_all_sizes, wanted

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError
from rocserve.core.load_check import LoadCheckFailed

pytestmark = [pytest.mark.in_migraphx_process, pytest.mark.long, pytest.mark.usefixtures("jobs_here")]

NETWORK = encoder(layers=1).SerializeToString()
SIZES = "sequence=4,8"
TENSORS = {
    "inputs": tuple(given(name, -1, datatype=DataType.INT64) for name in ("input_ids", "attention_mask")),
    "outputs": (wanted("tokens", -1, 16), wanted("pooled", 16)),
}


def assert_right(found: dict[str, Array], inputs: dict[str, Array], size: int) -> None:
    tokens, pooled = onnxruntime.InferenceSession(NETWORK).run(["tokens", "pooled"], inputs)
    assert found["tokens"].shape == (len(tokens), size, 16)
    np.testing.assert_allclose(found["tokens"][:, : tokens.shape[1]], tokens, atol=1e-5)
    np.testing.assert_allclose(found["pooled"], pooled, atol=1e-5)


@pytest.mark.parametrize(("precision", "step"), [("fp16", 2**-9), ("bf16", 2**-6)])
def test_half_precisions(engine: Engine, precision: str, step: float) -> None:
    """The answers are those of a program without padding, to two steps of values from 2 to 4."""
    inputs = request(2, 3)
    exact = tuple(replace(entry, dims=(3,)) for entry in TENSORS["inputs"])
    outputs = (wanted("tokens", 3, 16), wanted("pooled", 16))
    options = {"batch_sizes": 2, "precision": precision, "load_check": "off"}
    loaded = engine.complete(NETWORK, 2, inputs=exact, outputs=outputs, **options)
    alone = answers(loaded, inputs)
    loaded.close()
    loaded = engine.complete(NETWORK, 2, sizes="sequence=4", **options, **TENSORS)
    found = answers(loaded, padded(inputs, loaded.signature.padding))
    loaded.close()
    for name, values in (("tokens", found["tokens"][:, :3]), ("pooled", found["pooled"])):
        np.testing.assert_allclose(values, alone[name], rtol=0, atol=2 * step)


def test_dimensions_with_other_names_that_must_be_equal(engine: Engine) -> None:
    sizes = "unk__2=4,8; unk__4=4,8"
    network = with_own_names(encoder(layers=1), "unk__{}").SerializeToString()
    loaded = engine.load(network, 2, sizes=sizes, **TENSORS)
    (dimension,) = loaded.signature.padding.dimensions
    assert dimension.inputs == {"input_ids": (1,), "attention_mask": (1,)}
    assert loaded.signature.padding.properties == {"sizes": sizes.partition(";")[0]}
    for rows, length in itertools.product((1, 2), (3, 8)):
        inputs = request(rows, length)
        assert_right(answers(loaded, padded(inputs, loaded.signature.padding)), inputs, 4 if length <= 4 else 8)
    loaded.close()


def test_it_is_ready_with_a_program_that_takes_every_request_and_compiles_the_others(tmp_path: Path) -> None:
    engine = Engine(tmp_path, tmp_path / "cache")
    loaded = engine.load(NETWORK, 2, sizes=SIZES, **TENSORS)
    padding = loaded.signature.padding
    assert padding.properties == {"sizes": "sequence=4,8"}
    assert [spec.shape for spec in loaded.signature.inputs] == [(-1, -1), (-1, -1)]
    assert [spec.shape for spec in loaded.signature.outputs] == [(-1, -1, 16), (-1, 16)]
    assert "dimension 'sequence' may be padded" in loaded.load_check.text
    assert not loaded.load_check.warning
    compiled = {text.partition(":")[0] for text in engine.reports if text.startswith("compiling")}
    assert {text.partition(" (")[0] for text in compiled} == {"compiling batch size 1, sequence 8 of model 'model'"}
    assert (loaded.properties["batch_sizes"], engine.reports[-1]) == ("1", "")
    # Three rows run in pieces.
    requests = [(request(rows, length), length) for rows in (1, 2, 3) for length in (1, 3, 4, 5, 8)]
    for inputs, length in requests:
        assert_right(answers(loaded, padded(inputs, padding)), inputs, 4 if length <= 4 else 8)
    engine.reports.clear()
    loaded.warm_up([])
    wait_for_all_sizes()
    assert [text for text in engine.reports if ";" not in text.removeprefix("serving;")] == [
        "serving; programs (batch x sequence) still to compile: 1x4, 2x4, 2x8",
        "serving; programs (batch x sequence) still to compile: 2x4, 2x8",
        "serving; programs (batch x sequence) still to compile: 2x8",
        "",
    ]
    assert loaded.properties["batch_sizes"] == "1, 2"
    for inputs, length in requests:
        assert_right(answers(loaded, padded(inputs, padding)), inputs, 4 if length <= 4 else 8)
    with pytest.raises(ServeError, match="expected 1 to 8, the largest of its sizes 4, 8"):
        answers(loaded, request(1, 9))
    loaded.close()
    # Another server compiles nothing.
    engine.reports.clear()
    engine.complete(NETWORK, 2, sizes=SIZES, **TENSORS).close()
    assert not [text for text in engine.reports if "compiling" in text]


def test_a_model_without_a_batch_dimension_pads_each_of_its_dimensions(engine: Engine) -> None:
    inputs = tuple(given(name, -1, -1, datatype=DataType.INT64) for name in ("input_ids", "attention_mask"))
    outputs = (wanted("tokens", -1, -1, 16), wanted("pooled", -1, 16))
    sizes = "batch=1,2; sequence=4"
    loaded = engine.complete(NETWORK, 0, sizes=sizes, inputs=inputs, outputs=outputs, load_check="off")
    assert "batch_sizes" not in loaded.properties
    for rows, length in ((1, 3), (2, 2), (2, 4)):
        own = request(rows, length)
        found = answers(loaded, padded(own, loaded.signature.padding))
        assert_right(found, own, 4)
    loaded.close()


def test_outputs_that_follow_a_length_under_another_name(engine: Engine) -> None:
    network = model(
        """g (float[batch, length, 2] x) => (float[batch, other, 2] y, float[batch, more] z) {
            y = Add(x, x) z = ReduceSum<keepdims = 0>(x, last) }""",
        last=np.array([2]),
    )
    tensors = {"inputs": (given("x", -1, 2),), "outputs": (wanted("y", -1, 2), wanted("z", -1))}
    loaded = engine.load(network.SerializeToString(), 1, sizes="length=4,8", load_check="off", **tensors)
    (dimension,) = loaded.signature.padding.dimensions
    assert dimension.outputs == {"y": (1,), "z": (1,)}
    loaded.close()


def test_a_file_that_fixes_its_batch_is_ready_with_its_own_batch_at_the_largest_size(engine: Engine) -> None:
    network = model("g (float[2, length, 2] x) => (float[2, length, 2] y) { y = Add(x, x) }").SerializeToString()
    tensors = {"inputs": (given("x", -1, 2),), "outputs": (wanted("y", -1, 2),)}
    loaded = engine.load(network, 2, sizes="length=4,8", load_check="off", **tensors)
    assert loaded.properties["batch_sizes"] == "2"
    x = np.random.default_rng(5).normal(size=(1, 8, 2)).astype(np.float32)
    np.testing.assert_array_equal(answers(loaded, {"x": x})["y"], x + x)
    loaded.warm_up([])
    wait_for_all_sizes()
    assert (loaded.properties["batch_sizes"], engine.reports[-1]) == ("1, 2", "")
    np.testing.assert_array_equal(answers(loaded, {"x": x[:, :4]})["y"], x[:, :4] * 2)
    loaded.close()


def test_an_output_that_cannot_be_cut_back(engine: Engine) -> None:
    network = model("g (float[batch, length, 2] x) => (float[batch, more, 2] y) { y = Concat<axis = 1>(x, x) }")
    tensors = {"inputs": (given("x", -1, 2),), "outputs": (wanted("y", -1, 2),)}
    with pytest.raises(ServeError, match=r"output 'y' has the shape \[1, 8, 2\] for the size 4 and \[1, 16, 2\] for 8"):
        engine.load(network.SerializeToString(), 1, sizes="length=4,8", **tensors)


def test_a_dimension_that_must_not_be_padded(engine: Engine) -> None:
    mean = model(
        "g (float[batch, length, 2] x) => (float[batch, 2] y) { y = ReduceMean<axes = [1], keepdims = 0>(x) }"
    ).SerializeToString()
    tensors = {"inputs": (given("x", -1, 2),), "outputs": (wanted("y", 2),)}
    loaded = engine.load(mean, 1, sizes="length=4,8", **tensors)
    assert "padded as configured, but dimension 'length' must not be padded: output 'y'" in loaded.load_check.warning
    loaded.close()
    with pytest.raises(LoadCheckFailed, match="parameter 'sizes' pads requests, but dimension 'length' must not be"):
        engine.load(mean, 1, sizes="length=4,8", load_check="strict", **tensors)
