"""What an ONNX graph says about inputs and rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from support.load_check import load, model, normal

from rocserve.load_check.facts import NO_FACTS
from rocserve.load_check.onnx_facts import onnx_facts

_TABLE = {"t": normal(40, 4)}
_LAST = {"p": np.array(-1)}
_ONE = {"one": np.array([1])}


@pytest.mark.parametrize(
    ("text", "weights", "ends"),
    [
        ("g (int64[N] x) => (float[N, 4] y) { y = Gather(t, x) }", _TABLE, {"x": 40}),
        ("g (int64[N] x) => (float[40, N] y) { y = Gather<axis = 1>(t, x) }", _TABLE, {"x": 4}),
        ("g (int64[N] x) => (float[N, 4] y) { c = Cast<to = 6>(x) y = Gather(t, c) }", _TABLE, {"x": 40}),
        ("g (float[N] x) => (float[N, 4] y) { c = Cast<to = 7>(x) y = Gather(t, c) }", _TABLE, {"x": 40}),
        ("g (int64[N] x) => (float[N, 1, 4] y) { u = Unsqueeze(x, one) y = Gather(t, u) }", _TABLE | _ONE, {"x": 40}),
        ("g (int64[N] x) => (float[N, 4] y) { a = Add(x, one) y = Gather(t, a) }", _TABLE | _ONE, {"x": 39}),
        ("g (int64[N] x) => (float[N, 4] y) { a = Sub(x, one) y = Gather(t, a) }", _TABLE | _ONE, {"x": 41}),
        (
            "g (int64[N] x) => (float[N, 4] y) { u = Gather(small, x) z = Gather(t, x) y = Add(u, z) }",
            _TABLE | {"small": normal(7, 4)},
            {"x": 7},
        ),
        (
            "g (int64[N, T] x) => (float[N, 4] y) { i = Gather<axis = 1>(x, p) y = Gather(t, i) }",
            _TABLE | _LAST,
            {"x": 40},
        ),
        (
            "g (int64[N] x) => (float[N, 9] y) { y = OneHot(x, d, v) }",
            {"d": np.array(9), "v": np.array([0, 1], np.float32)},
            {"x": 9},
        ),
        ("g (int64[N, M] x) => (bool[N, 6] y) { y = Equal(x, r) }", {"r": np.arange(6)[None]}, {"x": 6}),
        (
            "g (int64[N] x) => (float[N, 4] y) { f = DequantizeLinear(q, s, z) y = Gather(f, x) }",
            {"q": np.zeros((30, 4), np.uint8), "s": np.array(0.1, np.float32), "z": np.array(3, np.uint8)},
            {"x": 30},
        ),
        ("g (int64[N] x) => (float[4, N] y) { f = Transpose(t) y = Gather<axis = 1>(f, x) }", _TABLE, {"x": 40}),
        ("g (int64[N] x, float[N, 4] z) => (float[N, 4] y) { y = Gather(z, x) }", {}, {}),
        ("g (int64[N] x) => (int64[N] y) { y = Neg(x) }", {}, {}),
    ],
)
def test_finds_the_ends_of_indices(text: str, weights: dict[str, np.ndarray], ends: dict[str, int]) -> None:
    assert onnx_facts(model(text, **weights)).ends == ends


def test_finds_the_ends_of_embedding_layers() -> None:
    text = """g (int32[N, T] ids, int32[N, T] kinds) => (float[N, T, 4] y, int32[N] m) {
        y, m = com.microsoft.EmbedLayerNormalization(ids, kinds, words, places, segments, gamma, beta) }"""
    parsed = model(
        text, words=normal(99, 4), places=normal(16, 4), segments=normal(2, 4), gamma=normal(4), beta=normal(4)
    )
    assert onnx_facts(parsed).ends == {"ids": 99, "kinds": 2}


def test_a_branch_may_index_the_table() -> None:
    text = """g (bool b, int64[N] x) => (float[N, 4] y) {
        y = If(b)<then_branch = p () => (float[N, 4] u) { u = Gather(t, x) },
                  else_branch = q () => (float[N, 4] v) { v = Gather(t, x) }> }"""
    assert onnx_facts(model(text, **_TABLE)).ends == {"x": 40}


def test_one_scale_of_all_rows_couples_them_unless_it_is_of_weights() -> None:
    rows = model("g (float[N, 4] x) => (uint8[N, 4] y) { y, s, z = DynamicQuantizeLinear(x) }")
    assert onnx_facts(rows).couples_rows == "DynamicQuantizeLinear takes one scale from all rows"
    weights = model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            q, s, z = DynamicQuantizeLinear(w) d = DequantizeLinear(q, s, z) y = MatMul(x, d) }""",
        w=normal(4, 4),
    )
    assert not onnx_facts(weights).couples_rows


@pytest.mark.parametrize(
    ("text", "weights", "thresholds"),
    [
        ("{ m = ReduceMax<keepdims = 0>(x) c = Greater(m, t) n = Neg(x) y = Where(c, n, x) }", {"t": 7.5}, (7.5,)),
        ("{ c = Greater(x, t) n = Neg(x) y = Where(c, n, x) }", {"t": 7.5}, ()),
        (
            """{ m = ReduceMax<keepdims = 0>(x) l = ReduceMin<keepdims = 0>(x) p = Greater(m, t) q = Less(l, u)
                c = And(p, q) n = Neg(x) y = Where(c, n, x) }""",
            {"t": 7.5, "u": -2.0},
            (7.5, -2.0),
        ),
        (
            """{ m = ReduceMax<keepdims = 0>(x) c = Greater(m, t)
                y = If(c)<then_branch = a () => (float[N, 4] p) { p = Neg(x) },
                          else_branch = b () => (float[N, 4] q) { q = Identity(x) }> }""",
            {"t": 3.0},
            (3.0,),
        ),
    ],
)
def test_finds_what_a_number_of_the_batch_is_compared_with(
    text: str, weights: dict[str, float], thresholds: tuple[float, ...]
) -> None:
    arrays = {name: np.array(value, np.float32) for name, value in weights.items()}
    assert onnx_facts(model(f"g (float[N, 4] x) => (float[N, 4] y) {text}", **arrays)).thresholds == thresholds


@pytest.mark.parametrize(
    ("text", "exposed"),
    [
        ("(int64[N] y) { s = MatMul(x, w) y = ArgMax<axis = 1, keepdims = 0>(s) }", ("s",)),
        ("(int64[N] y) { s = MatMul(x, w) a = ArgMax<axis = 1>(s) y = Squeeze(a) }", ("s",)),
        ("(int64[N] y) { s = MatMul(x, w) a = ArgMax<axis = 1, keepdims = 0>(s) y = Gather(labels, a) }", ("s",)),
        ("(bool[N, 3] y) { s = MatMul(x, w) y = Greater(s, zero) }", ("s",)),
        ("(int32[N, 3] y) { s = MatMul(x, w) y = Cast<to = 6>(s) }", ("s",)),
        ("(int64[N] y, float[N, 3] s) { s = MatMul(x, w) y = ArgMax<axis = 1, keepdims = 0>(s) }", ()),
        ("(int64[N] y) { y = ArgMax<axis = 1, keepdims = 0>(x) }", ()),
        ("(float[N, 3] y) { y = MatMul(x, w) }", ()),
    ],
)
def test_exposes_what_labels_are_chosen_from(text: str, exposed: tuple[str, ...]) -> None:
    given = {"w": normal(4, 3), "labels": np.arange(3), "zero": np.array(0, np.float32)}
    used = {name: values for name, values in given.items() if name in text}
    parsed = model(f"g (float[N, 4] x) => {text}", **used)
    assert onnx_facts(parsed).exposed == exposed
    assert load(parsed).outputs == [*(value.name for value in parsed.graph.output)]


@pytest.mark.parametrize(
    ("text", "precision"),
    [
        ("(float[N] x) => (float[N] y) { y = Neg(x) }", "fp32"),
        ("(float16[N] x) => (float16[N] y) { y = Neg(x) }", "fp16"),
        ("(float[N] x) => (float[N] y) { h = Cast<to = 10>(x) n = Neg(h) y = Cast<to = 1>(n) }", "fp16"),
        ("(float[N] x) => (float[N] y) { h = Cast<to = 16>(x) y = Cast<to = 1>(h) }", "bf16"),
        ("(float[N] x) => (uint8[N] y) { y, s, z = DynamicQuantizeLinear(x) }", "quantised"),
    ],
)
def test_finds_the_precision(text: str, precision: str) -> None:
    assert onnx_facts(model("g " + text)).precision == precision


def test_names_operators_that_draw_random_numbers() -> None:
    drawn = model("g (float[N] x) => (float[N] y) { r = RandomNormalLike(x) y = Add(x, r) }")
    assert onnx_facts(drawn).is_random == "RandomNormalLike"
    idle = model("g (float[N] x) => (float[N] y) { y = Dropout(x) }")
    assert onnx_facts(idle).is_random == ""


def test_reads_a_file_without_its_weights(tmp_path: Path) -> None:
    parsed = model("g (int64[N] x) => (float[N, 400] y) { y = Gather(t, x) }", t=normal(40, 400))
    path = tmp_path / "model.onnx"
    onnx.save(parsed, path, save_as_external_data=True, location="weights", size_threshold=0)
    (tmp_path / "weights").unlink()
    assert onnx_facts(path).ends == {"x": 40}


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x08"])
def test_another_file_has_no_facts(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.onnx").write_bytes(content)
    assert onnx_facts(tmp_path / "model.onnx") == NO_FACTS


def test_a_missing_file_has_no_facts(tmp_path: Path) -> None:
    assert onnx_facts(tmp_path / "model.onnx") == NO_FACTS


def test_a_cycle_ends() -> None:
    node = onnx.helper.make_node("Cast", ["a"], ["b"], to=7)
    back = onnx.helper.make_node("Cast", ["b"], ["a"], to=7)
    gather = onnx.helper.make_node("Gather", ["t", "a"], ["y"])
    add = onnx.helper.make_node("Add", ["c", "one"], ["c"])
    other = onnx.helper.make_node("Gather", ["t", "c"], ["z"])
    parsed = model("g (int64[N] x) => (float[N, 4] y) { y = Gather(t, x) }", **_TABLE, one=np.array(1))
    del parsed.graph.node[:]
    parsed.graph.node.extend([node, back, gather, add, other])
    assert onnx_facts(parsed).ends == {}


def test_a_damaged_node_has_no_facts() -> None:
    parsed = model("g (int64[N] x) => (float[N, 4] y) { y = Gather(t, x) }", **_TABLE)
    del parsed.graph.node[0].input[1]
    assert onnx_facts(parsed) == NO_FACTS


def test_texts_that_operators_know() -> None:
    known = ", ".join(f'"word{number:03}"' for number in range(600))
    graph = f"""g (string[N] x) => (int64[N] y) {{
        y = ai.onnx.ml.LabelEncoder<keys_strings = [{known}], values_int64s = [{", ".join(["1"] * 600)}]>(x) }}"""
    words = onnx_facts(model(graph)).words
    assert len(words) == 200 and words[:2] == ("word000", "word003") and words[-1] == "word597"
    assert onnx_facts(model("g (float[N] x) => (float[N] y) { y = Abs(x) }")).words == ()


@pytest.mark.parametrize(
    ("text", "compared"),
    [
        ("a = Greater(x, seven) y = Where(a, x, n)", (7,)),
        ("a = Less(far, x) y = Where(a, x, n)", ()),
        # Exporters compare sizes with -1 where they expand a tensor.
        ("s = Shape(x) k = Cast <to = 1> (s) a = Equal(k, minus) b = Cast <to = 1> (a) y = Mul(x, b)", ()),
        (
            "s = Shape(x) k = Cast <to = 1> (s) v = ReduceMax(x) m = Mul(k, v) a = Equal(m, minus) y = Where(a, x, n)",
            (-1,),
        ),
        ("a = Greater(minus, seven) y = Where(a, x, n)", ()),
    ],
)
def test_numbers_that_values_are_compared_with(text: str, compared: tuple[float, ...]) -> None:
    numbers = {"seven": np.float32(7), "far": np.float32(1e6), "minus": np.float32(-1)}
    facts = onnx_facts(model(f"g (float[N, 4] x) => (float[N, 4] y) {{ n = Neg(x) {text} }}", **numbers))
    assert facts.compared == compared
