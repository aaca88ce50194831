"""Small models whose rows are known to be independent or not, each for a kind that was met in real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx
from onnx import helper

from support.load_check import model, normal

Make = Callable[[], onnx.ModelProto]


def _tree(threshold: float) -> onnx.ModelProto:
    text = """g (float[N, 2] x) => (float[N, 1] y) {
        y = ai.onnx.ml.TreeEnsembleRegressor<n_targets = 1, nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2],
            nodes_featureids = [0, 0, 0], nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"],
            nodes_values = [%s, 0.0, 0.0], nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0],
            target_ids = [0, 0], target_nodeids = [1, 2], target_treeids = [0, 0], target_weights = [1.0, 7.0]>(x) }"""
    return model(text % threshold)


def _by_rows(condition: str, number: int) -> onnx.ModelProto:
    """Change the sign where a condition holds for the number of rows n and the constant k."""
    text = """g (float[N, 4] x) => (float[N, 4] y) {
        s = Shape(x) n = Gather(s, zero) %s q = Neg(x) y = Where(c, q, x) }"""
    return model(text % condition, zero=np.array(0), k=np.array(number))


def _with_row_before(lag: int) -> onnx.ModelProto:
    """Add to each row the one that is `lag` rows before it."""
    text = """g (float[N, 4] x) => (float[N, 4] y) {
        t = Transpose<perm = [1, 0]>(x) u = Unsqueeze(t, zero)
        c = Conv<kernel_shape = [2], dilations = [%d], pads = [%d, 0]>(u, w)
        s = Squeeze(c, zero) y = Transpose<perm = [1, 0]>(s) }"""
    return model(text % (lag, lag), zero=np.array([0]), w=normal(4, 4, 2))


def _dynamic_function() -> onnx.ModelProto:
    """Quantise in a function of the model; saturated outputs hide the scale."""
    made = model(
        "g (float[N, 4] x) => (float[N, 3] y) { d = Identity(x) m = MatMul(d, w) y = Clip(m, low, high) }",
        w=normal(4, 3),
        low=np.array(-0.001, np.float32),
        high=np.array(0.001, np.float32),
    )
    made.graph.node[0].op_type, made.graph.node[0].domain = "Rounded", "own"
    nodes = [
        helper.make_node("DynamicQuantizeLinear", ["a"], ["q", "s", "z"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["b"]),
    ]
    versions = [helper.make_opsetid("", 17)]
    made.functions.append(helper.make_function("own", "Rounded", ["a"], ["b"], nodes, versions))
    made.opset_import.append(helper.make_opsetid("own", 1))
    return made


INDEPENDENT: Mapping[str, Make] = {
    "linear": lambda: model("g (float[N, 4] x) => (float[N, 3] y) { y = MatMul(x, w) }", w=normal(4, 3)),
    "softmax of columns": lambda: model("g (float[N, 4] x) => (float[N, 4] y) { y = Softmax<axis = 1>(x) }"),
    "convolution with open sides": lambda: model(
        "g (float[N, 3, H, W] x) => (float[N, 4, A, B] y) { c = Conv<strides = [2, 2]>(x, w) y = Relu(c) }",
        w=normal(4, 3, 3, 3),
    ),
    "layer normalisation": lambda: model(
        "g (float[N, T, 4] x) => (float[N, T, 4] y) { y = LayerNormalization<axis = -1>(x, s) }", s=normal(4)
    ),
    "attention within a row": lambda: model(
        """g (float[N, T, 4] x) => (float[N, T, 4] y) {
            t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) p = Softmax<axis = -1>(s) y = MatMul(p, x) }"""
    ),
    "GRU over the second dimension": lambda: model(
        """g (float[N, T, 4] x) => (float[N, T, 3] y) {
            t = Transpose<perm = [1, 0, 2]>(x) h, l = GRU<hidden_size = 3>(t, w, r)
            s = Squeeze(h, one) y = Transpose<perm = [1, 0, 2]>(s) }""",
        w=normal(1, 9, 4),
        r=normal(1, 9, 3, seed=1),
        one=np.array([1]),
    ),
    "embedding with a mask": lambda: model(
        """g (int64[N, T] input_ids, int64[N, T] attention_mask) => (float[N, 4] y) {
            e = Gather(table, input_ids) m = Cast<to = 1>(attention_mask) u = Unsqueeze(m, last)
            h = Mul(e, u) s = ReduceSum<keepdims = 0>(h, one) n = ReduceSum<keepdims = 1>(m, one) y = Div(s, n) }""",
        table=normal(40, 4),
        one=np.array([1]),
        last=np.array([2]),
    ),
    "classes by ArgMax": lambda: model(
        "g (float[N, 4] x) => (int64[N] y) { s = MatMul(x, w) y = ArgMax<axis = 1, keepdims = 0>(s) }", w=normal(4, 5)
    ),
    "texts": lambda: model("g (string[N, 2] x) => (string[N, 2] y) { y = Identity(x) }"),
    "one-hot": lambda: model(
        "g (int64[N] x) => (float[N, 6] y) { y = OneHot(x, depth, values) }",
        depth=np.array(6),
        values=np.array([0, 1], np.float32),
    ),
    "ids as floats": lambda: model(
        """g (float[N, 6] x) => (float[N, 4] y) {
            i = Cast<to = 7>(x) e = Gather(t, i) s = ReduceSum<keepdims = 0>(e, one) y = Tanh(s) }""",
        t=normal(40, 4) * 1000,
        one=np.array([1]),
    ),
    "best of many equal boxes": lambda: model(
        """g (float[N, 64] x) => (float[N, 3] y) {
            m = MatMul(x, w) b, i = TopK<axis = 1>(m, k) y = Cast<to = 1>(i) }""",
        w=np.repeat(normal(64, 1), 300, axis=1) + normal(64, 300, seed=1) * np.float32(1e-7),
        k=np.array([3]),
    ),
    "calibrated int8": lambda: model(
        """g (float[N, 4] x) => (float[N, 3] y) {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }""",
        s=np.array(0.05, np.float32),
        z=np.array(0, np.int8),
        w=normal(4, 3),
    ),
    "cumulative sum of columns": lambda: model(
        "g (float[N, 4] x) => (float[N, 4] y) { y = CumSum(x, axis) }", axis=np.array(1)
    ),
    "a threshold for each value": lambda: model(
        "g (float[N, 4] x) => (float[N, 4] y) { c = Greater(x, t) z = Mul(x, t) y = Where(c, z, x) }",
        t=np.array(0.5, np.float32),
    ),
    "two inputs": lambda: model("g (float[N, 4] a, float[N, 4] b) => (float[N, 4] y) { y = Sub(a, b) }"),
    "LSTM with lengths": lambda: model(
        """g (float[N, T, 4] x, int32[N] lengths) => (float[N, 3] y) {
            t = Transpose<perm = [1, 0, 2]>(x) h, l = LSTM<hidden_size = 3>(t, w, r, , lengths)
            y = Squeeze(l, zero) }""",
        w=normal(1, 12, 4),
        r=normal(1, 12, 3, seed=1),
        zero=np.array([0]),
    ),
    "last token by length": lambda: model(
        """g (float[N, T, 4] x, int64[N] lengths) => (float[N, 4] y) {
            last = Sub(lengths, one) i = Unsqueeze(last, place) y = GatherND<batch_dims = 1>(x, i) }""",
        one=np.array(1),
        place=np.array([1]),
    ),
    "attention to earlier places": lambda: model(
        """g (float[N, 8, 4] x) => (float[N, 8, 4] y) {
            t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) m = Add(s, hidden) p = Softmax<axis = -1>(m)
            y = MatMul(p, x) }""",
        hidden=np.triu(np.full((8, 8), -1e9, np.float32), 1),
    ),
    "half precision": lambda: model(
        "g (float16[N, 4] x) => (float16[N, 3] y) { m = MatMul(x, w) y = Tanh(m) }", w=normal(4, 3).astype(np.float16)
    ),
    "anchors of a detector": lambda: model(
        """g (float[N, 3, H, W] x) => (float[N, A, 4] y) {
            c = Conv(x, w) f = Reshape(c, shape) y = Transpose<perm = [0, 2, 1]>(f) }""",
        w=normal(4, 3, 3, 3),
        shape=np.array([0, 4, -1]),
    ),
    "mean of points": lambda: model(
        """g (float[N, P, 3] x) => (float[N, 5] y) {
            m = MatMul(x, w) r = Relu(m) y = ReduceMax<axes = [1], keepdims = 0>(r) }""",
        w=normal(3, 5),
    ),
    "images of bytes": lambda: model(
        """g (uint8[N, 8, 8, 3] x) => (float[N, 3] y) {
            f = Cast<to = 1>(x) y = ReduceMean<axes = [1, 2], keepdims = 0>(f) }"""
    ),
    "words of a text": lambda: model(
        """g (string[N] x) => (float[N, 3] y) {
            y = TfIdfVectorizer<mode = "TF", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0,
                ngram_counts = [0], ngram_indexes = [0, 1, 2], pool_strings = ["cat", "Rome", "red"]>(u)
            u = Unsqueeze(x, one) }""",
        one=np.array([1]),
    ),
    "words of another vocabulary": lambda: model(
        """g (string[N] x) => (float[N, 3] y) {
            y = TfIdfVectorizer<mode = "TF", min_gram_length = 1, max_gram_length = 1, max_skip_count = 0,
                ngram_counts = [0], ngram_indexes = [0, 1, 2], pool_strings = ["apple", "pear", "plum"]>(u)
            u = Unsqueeze(x, one) }""",
        one=np.array([1]),
    ),
    "decision tree": lambda: _tree(0.5),
    "decision tree of a far threshold": lambda: _tree(20.0),
    "a vocabulary compared with all numbers": lambda: model(
        """g (int64[N, 6] x) => (int64[N] y) {
            u = Unsqueeze(x, last) e = Equal(u, numbers) f = Cast<to = 1>(e) m = MatMul(f, w) s = ReduceSum(m, middle)
            q = Squeeze(s, middle) y = ArgMax<axis = 1, keepdims = 0>(q) }""",
        last=np.array([2]),
        middle=np.array([1]),
        numbers=np.arange(257).reshape(1, 1, -1),
        w=normal(257, 4),
    ),
    "two inputs of one open size": lambda: model(
        "g (float[N, S] x, float[N, S] z) => (float[N, S] y) { y = Mul(x, z) }"
    ),
    "another sign with a special id": lambda: model(
        """g (int64[N, 6] x) => (float[N, 4] y) {
            e = Gather(table, x) s = ReduceSum<keepdims = 0>(e, one) q = Equal(x, special) i = Cast<to = 7>(q)
            m = ReduceMax<axes = [1]>(i) c = Cast<to = 9>(m) n = Neg(s) y = Where(c, n, s) }""",
        table=normal(3000, 4),
        one=np.array([1]),
        special=np.array(2),
    ),
    "missing values": lambda: model(
        "g (float[N, 4] x) => (float[N, 4] y) { c = IsNaN(x) y = Where(c, zero, x) }", zero=np.array(0, np.float32)
    ),
    "categories by number": lambda: model(
        """g (int64[N] x) => (string[N] y) {
            y = ai.onnx.ml.LabelEncoder<keys_int64s = [100, 200, 300], values_strings = ["cat", "dog", "cow"],
                default_string = "?">(x) }"""
    ),
    "one-hot of numbers": lambda: model(
        """g (int64[N] x) => (float[N, 3] y) {
            u = Unsqueeze(x, one) h = ai.onnx.ml.OneHotEncoder<cats_int64s = [100, 200, 300]>(u)
            y = Squeeze(h, one) }""",
        one=np.array([1]),
    ),
    "numbers compared with categories": lambda: model(
        "g (int64[N, 1] x) => (float[N, 3] y) { c = Equal(x, known) y = Cast<to = 1>(c) }",
        known=np.array([[100, 250, 7000]]),
    ),
    "texts compared with categories": lambda: model(
        "g (string[N, 1] x) => (float[N, 3] y) { c = Equal(x, known) y = Cast<to = 1>(c) }",
        opset=19,
        known=np.array([["amber", "teal", "ochre"]], object),
    ),
}

DEPENDENT: Mapping[str, Make] = {
    "softmax of rows": lambda: model("g (float[N, 4] x) => (float[N, 4] y) { y = Softmax<axis = 0>(x) }"),
    "mean of rows": lambda: model(
        "g (float[N, 4] x) => (float[N, 4] y) { m = ReduceMean<axes = [0]>(x) y = Sub(x, m) }"
    ),
    "cumulative sum of rows": lambda: model(
        "g (float[N, 4] x) => (float[N, 4] y) { y = CumSum(x, axis) }", axis=np.array(0)
    ),
    "GRU over the first dimension": lambda: model(
        """g (float[N, T, 4] x) => (float[N, T, 3] y) {
            h, l = GRU<hidden_size = 3>(x, w, r) y = Squeeze(h, one) }""",
        w=normal(1, 9, 4),
        r=normal(1, 9, 3, seed=1),
        one=np.array([1]),
    ),
    "time first in the output": lambda: model(
        "g (float[N, T, 4] x) => (float[S, M, 4] y) { y = Transpose<perm = [1, 0, 2]>(x) }"
    ),
    "attention between rows": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            t = Transpose<perm = [1, 0]>(x) s = MatMul(x, t) p = Softmax<axis = -1>(s) y = MatMul(p, x) }"""
    ),
    "peaked attention between rows": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            t = Transpose<perm = [1, 0]>(x) s = MatMul(x, t) k = Mul(s, f)
            p = Softmax<axis = -1>(k) y = MatMul(p, x) }""",
        f=np.array(30, np.float32),
    ),
    "similarities of all pairs": lambda: model(
        "g (float[N, 4] a, float[N, 4] b) => (float[N, M] y) { t = Transpose<perm = [1, 0]>(b) y = MatMul(a, t) }"
    ),
    "boxes that are left": lambda: model(
        """g (float[N, 8, 4] boxes, float[N, 1, 8] scores) => (int64[K, 3] y) {
            y = NonMaxSuppression(boxes, scores, most, overlap, least) }""",
        most=np.array([4]),
        overlap=np.array([0.5], np.float32),
        least=np.array([-9], np.float32),
    ),
    "row number": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            s = Shape(x) n = Gather(s, zero) r = Range(zero, n, one) f = Cast<to = 1>(r) u = Unsqueeze(f, first)
            y = Add(x, u) }""",
        zero=np.array(0),
        one=np.array(1),
        first=np.array([1]),
    ),
    "number of rows": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            s = Shape(x) n = Gather(s, zero) f = Cast<to = 1>(n) y = Div(x, f) }""",
        zero=np.array(0),
    ),
    "floor below the loudest of all": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            a = Abs(x) b = Add(a, e) l = Log(b) m = ReduceMax<keepdims = 0>(l) f = Sub(m, span) y = Max(l, f) }""",
        e=np.array(1e-10, np.float32),
        span=np.array(8, np.float32),
    ),
    "scale of the whole batch": lambda: model(
        """g (float[N, 4] x) => (float[N, 3] y) {
            q, s, z = DynamicQuantizeLinear(x) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }""",
        w=normal(4, 3),
    ),
    "classes of the scale of the whole batch": lambda: model(
        """g (float[N, 4] x) => (int64[N] y) {
            q, s, z = DynamicQuantizeLinear(x) d = DequantizeLinear(q, s, z) m = MatMul(d, w)
            y = ArgMax<axis = 1, keepdims = 0>(m) }""",
        w=normal(4, 3),
    ),
    "classes that hide a mean of rows": lambda: model(
        """g (float[N, 4] x) => (int64[N] y) {
            m = MatMul(x, w) c = ReduceMean<axes = [0]>(m) h = Mul(c, small) s = Add(m, h) b = Add(s, bias)
            y = ArgMax<axis = 1, keepdims = 0>(b) }""",
        w=normal(4, 3),
        small=np.array(0.01, np.float32),
        bias=np.array([1e4, 0, 0], np.float32),
    ),
    "batch normalisation in training mode": lambda: model(
        """g (float[N, 3, 8] x) => (float[N, 3, 8] y) {
            y, m, v = BatchNormalization<training_mode = 1>(x, s, b, s, s) }""",
        s=np.ones(3, np.float32),
        b=np.zeros(3, np.float32),
    ),
    "another branch above a sum": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            m = ReduceMax<keepdims = 0>(x) c = Greater(m, t)
            y = If(c)<then_branch = a () => (float[N, 4] p) { p = Neg(x) },
                      else_branch = b () => (float[N, 4] q) { q = Identity(x) }> }""",
        t=np.array(1e6, np.float32),
    ),
    "another value below a minimum": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            m = ReduceMin<keepdims = 0>(x) c = Less(m, t) n = Neg(x) y = Where(c, n, x) }""",
        t=np.array(-1e6, np.float32),
    ),
    "another sign by the sign of a sum": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            s = ReduceSum<keepdims = 0>(x) n = Neg(s) c = Greater(s, n) m = Neg(x) y = Where(c, m, x) }"""
    ),
    "another sign by a sum beyond what the file tells": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            s = ReduceSum<keepdims = 0>(x) q = Add(t, t) c = Greater(s, q) m = Neg(x) y = Where(c, m, x) }""",
        t=np.array(5e3, np.float32),
    ),
    "another branch above eight rows": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            s = Shape(x) n = Gather(s, zero) c = Greater(n, eight)
            y = If(c)<then_branch = a () => (float[N, 4] p) { p = Neg(x) },
                      else_branch = b () => (float[N, 4] q) { q = Identity(x) }> }""",
        zero=np.array(0),
        eight=np.array(8),
    ),
    "sorted rows": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            s = Shape(x) n = Slice(s, zero, one) v, i = TopK<axis = 0>(x, n) y = Identity(v) }""",
        zero=np.array([0]),
        one=np.array([1]),
    ),
    "difference to the row before": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            h = Slice(x, zero, one, zero) l = Slice(x, zero, end, zero) b = Concat<axis = 0>(h, l) y = Sub(x, b) }""",
        zero=np.array([0]),
        one=np.array([1]),
        end=np.array([-1]),
    ),
    "two rows of each": lambda: model("g (float[N, 4] x) => (float[M, 4] y) { y = Concat<axis = 0>(x, x) }"),
    "lengths cut to the longest": lambda: model(
        """g (float[N, 4] x, int64[N] lengths) => (float[N, M] y) {
            m = ReduceMax<keepdims = 1>(lengths) y = Slice(x, zero, m, one) }""",
        zero=np.array([0]),
        one=np.array([1]),
    ),
    "attention over the first dimension": lambda: model(
        """g (float[N, B, 4] x) => (float[N, B, 4] y) {
            b = Transpose<perm = [1, 0, 2]>(x) t = Transpose<perm = [1, 2, 0]>(x) s = MatMul(b, t)
            p = Softmax<axis = -1>(s) m = MatMul(p, b) y = Transpose<perm = [1, 0, 2]>(m) }"""
    ),
    "nodes of a graph": lambda: model(
        """g (float[N, 4] x, float[N, N] edges) => (float[N, 4] y) { y = MatMul(edges, x) }"""
    ),
    "points beside the centre of all": lambda: model(
        """g (float[N, 3] x) => (float[N, 5] y) {
            c = ReduceMean<axes = [0]>(x) d = Sub(x, c) m = MatMul(d, w) y = Relu(m) }""",
        w=normal(3, 5),
    ),
    "share of all rows": lambda: model(
        "g (float[N, 4] x) => (float[N, 4] y) { a = Abs(x) s = ReduceSum<keepdims = 0>(a) y = Div(x, s) }"
    ),
    "normalised by all rows": lambda: model(
        "g (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) { y = MeanVarianceNormalization(x) }"
    ),
    "difference to the first row": lambda: model(
        "g (float[N, 4] x) => (float[N, 4] y) { f = Gather(x, zero) y = Sub(x, f) }", zero=np.array([0])
    ),
    "rank among all rows": lambda: model(
        """g (float[N] x) => (int64[N] y) {
            a = Unsqueeze(x, one) b = Unsqueeze(x, zero) c = Less(b, a) i = Cast<to = 7>(c)
            y = ReduceSum<keepdims = 0>(i, one) }""",
        zero=np.array([0]),
        one=np.array([1]),
    ),
    "LSTM over the first dimension": lambda: model(
        """g (float[N, 1, 4] x) => (float[N, 1, 3] y) {
            h, l, c = LSTM<hidden_size = 3>(x, w, r) y = Squeeze(h, one) }""",
        w=normal(1, 12, 4),
        r=normal(1, 12, 3, seed=1),
        one=np.array([1]),
    ),
    "any row that is large": lambda: model(
        """g (float[N, 4] x) => (bool[N] y) {
            m = ReduceMax<axes = [1], keepdims = 0>(x) l = ReduceMax<axes = [0]>(m) y = GreaterOrEqual(m, l) }"""
    ),
    "texts of all rows": lambda: model(
        """g (string[N] x) => (bool[N] y) {
            f = Gather(x, zero) y = Equal(x, f) }""",
        opset=19,
        zero=np.array([0]),
    ),
    "ids counted in all rows": lambda: model(
        """g (int64[N] x) => (float[N, 9] y) {
            o = OneHot(x, depth, values) m = ReduceMean<axes = [0]>(o) y = Sub(o, m) }""",
        depth=np.array(9),
        values=np.array([0, 1], np.float32),
    ),
    "unique values": lambda: model("g (int64[N] x) => (int64[M] y) { y = Unique(x) }"),
    "places that are not zero": lambda: model(
        "g (float[N, 4] x) => (int64[M, 2] y) { n = NonZero(x) y = Transpose<perm = [1, 0]>(n) }"
    ),
    "a row far behind": lambda: _with_row_before(16),
    "an even number of rows": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            s = Shape(x) n = Gather(s, zero) m = Mod(n, two) f = Cast<to = 1>(m) y = Mul(x, f) }""",
        zero=np.array(0),
        two=np.array(2),
    ),
    "a number of rows that eight divides": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            s = Shape(x) n = Gather(s, zero) m = Mod(n, eight) q = Equal(m, zero)
            f = Cast<to = 1>(q) y = Add(x, f) }""",
        zero=np.array(0),
        eight=np.array(8),
    ),
    "another sign with a special id in any row": lambda: model(
        """g (int64[N, 6] x) => (float[N, 4] y) {
            e = Gather(table, x) s = ReduceSum<keepdims = 0>(e, one) q = Equal(x, special) i = Cast<to = 7>(q)
            m = ReduceMax<keepdims = 0>(i) c = Cast<to = 9>(m) n = Neg(s) y = Where(c, n, s) }""",
        table=normal(3000, 4),
        one=np.array([1]),
        special=np.array(2),
    ),
    "another sign with an id in any row that the file does not tell": lambda: model(
        """g (int64[N, 6] x) => (float[N, 4] y) {
            e = Gather(table, x) s = ReduceSum<keepdims = 0>(e, one) two = Add(one, one) q = Equal(x, two)
            i = Cast<to = 7>(q) m = ReduceMax<keepdims = 0>(i) c = Cast<to = 9>(m) n = Neg(s) y = Where(c, n, s) }""",
        table=normal(3000, 4),
        one=np.array([1]),
    ),
    "bytes by the largest of all": lambda: model(
        """g (uint8[N, 8, 8, 3] x) => (float[N, 8, 8, 3] y) {
            f = Cast<to = 1>(x) m = ReduceMax<keepdims = 0>(f) y = Div(f, m) }"""
    ),
    "another sign with any flag": lambda: model(
        """g (float[N, 4] x, bool[N] flag) => (float[N, 4] y) {
            i = Cast<to = 7>(flag) m = ReduceMax<keepdims = 0>(i) c = Cast<to = 9>(m) n = Neg(x) y = Where(c, n, x) }"""
    ),
    "cut at five times the mean of all": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            a = Abs(x) m = ReduceMean<keepdims = 0>(a) l = Mul(m, five) y = Min(x, l) }""",
        five=np.array(5, np.float32),
    ),
    "missing values from other rows": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            c = IsNaN(x) f = Where(c, zero, x) m = ReduceMean<axes = [0]>(f) y = Where(c, m, x) }""",
        zero=np.array(0, np.float32),
    ),
    "values below a limit from other rows": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            c = Less(x, limit) m = ReduceMean<axes = [0]>(x) y = Where(c, m, x) }""",
        limit=np.array(-5, np.float32),
    ),
    "another sign with NaN in any row": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            c = IsNaN(x) i = Cast<to = 7>(c) m = ReduceMax<keepdims = 0>(i) b = Cast<to = 9>(m) w = Where(c, zero, x)
            n = Neg(w) y = Where(b, n, w) }""",
        zero=np.array(0, np.float32),
    ),
    "another sign with infinity in any row": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            c = IsInf(x) i = Cast<to = 7>(c) m = ReduceMax<keepdims = 0>(i) b = Cast<to = 9>(m)
            w = Clip(x, low, high) n = Neg(w) y = Where(b, n, w) }""",
        low=np.array(-5, np.float32),
        high=np.array(5, np.float32),
    ),
    "rows weighted by how often they are there": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            own = Unsqueeze(x, one) others = Unsqueeze(x, zero) e = Equal(own, others) f = Cast<to = 1>(e)
            all_equal = ReduceMin<axes = [2], keepdims = 0>(f) n = ReduceSum(all_equal, one) y = Mul(x, n) }""",
        one=np.array([1]),
        zero=np.array([0]),
    ),
    "zeros in place of a row that is there before": lambda: model(
        """g (float[N, 4] x) => (float[N, 4] y) {
            own = Unsqueeze(x, one) others = Unsqueeze(x, zero) e = Equal(own, others) f = Cast<to = 1>(e)
            all_equal = ReduceMin<axes = [2], keepdims = 0>(f) before = Trilu<upper = 0>(all_equal, below)
            seen = ReduceMax<axes = [1], keepdims = 1>(before) new = Sub(w, seen) y = Mul(x, new) }""",
        one=np.array([1]),
        zero=np.array([0]),
        below=np.array(-1),
        w=np.float32(1),
    ),
    "another sign with four rows": lambda: _by_rows("c = Equal(n, k)", 4),
    "another sign with two rows": lambda: _by_rows("c = Equal(n, k)", 2),
    "another sign with a number of rows that five divides": lambda: _by_rows("m = Mod(n, k) c = Equal(m, zero)", 5),
    "another sign with 21 to 29 rows": lambda: _by_rows(
        "a = Add(k, k) b = Add(a, k) l = Less(n, b) h = Greater(n, a) c = And(l, h)", 10
    ),
    "a row far behind, at the largest lag of a usual batch": lambda: _with_row_before(62),
    "another sign with a text in any row": lambda: model(
        """g (string[N] t, float[N, 4] x) => (float[N, 4] y) {
            c = Equal(t, known) i = Cast<to = 7>(c) m = ReduceMax<keepdims = 0>(i) b = Cast<to = 9>(m)
            n = Neg(x) y = Where(b, n, x) }""",
        opset=19,
        known=np.array("<end of text>", object),
    ),
    "rows without a text left out": lambda: model(
        "g (string[N] x) => (string[M] y) { c = Equal(x, none) k = Not(c) y = Compress<axis = 0>(x, k) }",
        opset=19,
        none=np.array("", object),
    ),
    "scale of the whole batch within a function": _dynamic_function,
    "another value with a byte of 255": lambda: model(
        """g (uint8[N, 8] x) => (int32[N, 8] y) {
            i = Cast<to = 6>(x) m = ReduceMax<keepdims = 0>(i) c = Equal(m, most) s = Cast<to = 6>(c)
            y = Sub(i, s) }""",
        most=np.array(255, np.int32),
    ),
    "another value with an integer below 0 in any row": lambda: model(
        """g (int32[N, 8] x) => (float[N, 8] y) {
            f = Cast<to = 1>(x) m = ReduceMin<keepdims = 0>(f) c = Less(m, zero) s = Cast<to = 1>(c) y = Sub(f, s) }""",
        zero=np.array(0, np.float32),
    ),
    "another sign unless all flags are set": lambda: model(
        """g (float[N, 4] x, bool[N, 8] flags) => (float[N, 4] y) {
            i = Cast<to = 7>(flags) m = ReduceMin<keepdims = 0>(i) c = Cast<to = 9>(m) n = Neg(x)
            y = Where(c, n, x) }"""
    ),
}

NEVER_INDEPENDENT: Mapping[str, Make] = {
    "regions of the first image": lambda: model(
        """g (float[N, 2, 8, 8] x, float[N, 4] boxes) => (float[N, 2, 2, 2] y) {
            s = Shape(boxes) n = Slice(s, zero, one) i = ConstantOfShape<value = int64[1] v {0}>(n)
            y = RoiAlign<output_height = 2, output_width = 2>(x, boxes, i) }""",
        zero=np.array([0]),
        one=np.array([1]),
    )
}
"""Models whose rows depend on each other, which made-up inputs do not always show: the check may be undecided."""
