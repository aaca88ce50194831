"""Open dimensions of which nobody has written sizes: padded where the check allows it, else refused as without a
number."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from support.encoders import encoder, with_own_names
from support.load_check import model, normal
from support.migraphx_engine import Array, Engine, answers, given, padded, request, wait_for_all_sizes, wanted

from rocserve.core.datatypes import DataType
from rocserve.core.errors import ServeError

pytestmark = [pytest.mark.in_migraphx_process, pytest.mark.long, pytest.mark.usefixtures("jobs_here")]

NETWORK = encoder(layers=1, longest=40).SerializeToString()


def test_sizes_up_to_the_longest_input_that_the_model_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path, tmp_path / "cache")
    network = encoder(layers=1, longest=24).SerializeToString()
    with caplog.at_level(logging.INFO):
        loaded = engine.load(network, 1)
    padding = loaded.signature.padding
    assert padding.properties == {"sizes": "sequence=16,24"}
    assert padding.dimensions[0].outputs == {"tokens": (1,)}
    assert [spec.shape for spec in loaded.signature.inputs] == [(-1, -1), (-1, -1)]
    assert loaded.load_check.text.startswith("rows are independent; dimension 'sequence' may be padded; ")
    planned = "model 'model': no sizes are written, so it is padded to sequence=16,24 in batches of 1: 2 programs"
    assert planned in caplog.text
    compiled = {text.partition(" (")[0].partition(":")[0] for text in engine.reports if text.startswith("compiling")}
    assert compiled == {"compiling batch size 1, sequence 24 of model 'model'"}
    loaded.warm_up([])
    wait_for_all_sizes()
    reference = onnxruntime.InferenceSession(network)
    for rows, length in ((1, 1), (2, 16), (3, 17), (1, 24)):
        inputs = request(rows, length)
        found = answers(loaded, padded(inputs, padding))
        tokens, pooled = reference.run(["tokens", "pooled"], inputs)
        np.testing.assert_allclose(found["tokens"][:, :length], tokens, atol=1e-5)
        np.testing.assert_allclose(found["pooled"], pooled, atol=1e-5)
    with pytest.raises(ServeError, match="expected 1 to 24, the largest of its sizes 16, 24"):
        answers(loaded, request(1, 25))
    loaded.close()
    # Another server checks and compiles nothing.
    engine.reports.clear()
    again = engine.complete(network, 1)
    assert again.signature == loaded.signature
    assert again.load_check.seconds == 0
    assert not [text for text in engine.reports if "compiling" in text]
    again.close()


def test_dimensions_without_names_that_must_be_equal_are_one(tmp_path: Path) -> None:
    engine = Engine(tmp_path, tmp_path / "cache")
    network = with_own_names(encoder(layers=1, longest=40), "").SerializeToString()
    loaded = engine.load(network, 2)
    padding = loaded.signature.padding
    assert padding.properties == {"sizes": "input_ids:0=16,24,32,40"}
    assert padding.dimensions[0].inputs == {"input_ids": (1,), "attention_mask": (1,)}
    inputs = request(2, 31)
    found = answers(loaded, padded(inputs, padding))
    tokens, pooled = onnxruntime.InferenceSession(network).run(["tokens", "pooled"], inputs)
    np.testing.assert_allclose(found["tokens"][:, :31], tokens, atol=1e-5)
    np.testing.assert_allclose(found["pooled"], pooled, atol=1e-5)
    loaded.close()


def test_numbers_of_the_configuration_are_not_padded(tmp_path: Path) -> None:
    inputs = tuple(given(name, 8, datatype=DataType.INT64) for name in ("input_ids", "attention_mask"))
    engine = Engine(tmp_path, tmp_path / "cache")
    loaded = engine.load(NETWORK, 1, inputs=inputs, outputs=(wanted("tokens", 8, 16), wanted("pooled", 16)))
    assert not loaded.signature.padding.dimensions
    loaded.close()


MEAN = "g (float[n, time, 4] x) => (float[n, 4] y) { y = ReduceMean<axes = [1], keepdims = 0>(x) }"
DYNAMIC = """g (float[n, time, 4] x) => (float[n, time, 3] y) {
    q, s, z = DynamicQuantizeLinear(x) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }"""


@pytest.mark.parametrize(
    "graph, weights, reason",
    [
        (MEAN, {}, "dimension 'time' must not be padded: output 'y' changes by "),
        (
            DYNAMIC,
            {"w": normal(4, 3)},
            "dimension 'time' must not be padded: DynamicQuantizeLinear takes one scale from all rows, and from added"
            " elements; give it a number",
        ),
    ],
    ids=["without a mask", "dynamic quantisation"],
)
def test_what_must_not_be_padded_needs_a_number(
    tmp_path: Path, graph: str, weights: dict[str, Array], reason: str
) -> None:
    engine = Engine(tmp_path, tmp_path / "cache")
    start = (
        "model 'model': dimension 1 ('time') of input 'x' is left open by the model, and MIGraphX compiles fixed shapes"
        f" only; {reason}"
    )
    for _ in range(2):
        # The second time, the verdict is known.
        with pytest.raises(ServeError) as refusal:
            engine.load(model(graph, **weights).SerializeToString(), 2)
        assert refusal.value.text.startswith(start)


def test_without_time_nothing_is_padded(tmp_path: Path) -> None:
    engine = Engine(tmp_path, tmp_path / "cache")
    source = engine.source(NETWORK, 2)
    hurried = replace(source, settings=replace(source.settings, load_check_seconds=0.0))
    from rocserve.backends.migraphx.engine import load

    with pytest.raises(ServeError, match="padding of dimension 'sequence' not checked: 0 s are too few"):
        load(hurried)
