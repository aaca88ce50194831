"""Small models whose rows are known to be independent or not, each for a kind that was met in real ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import onnx

from support.load_check import model, normal

Make = Callable[[], onnx.ModelProto]

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
}
