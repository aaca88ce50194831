"""Small models of which it is known whether an open dimension may be padded, each for a kind that was met in real
ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from rocserve.core.padding import PaddedDimension, Padding
from rocserve.load_check.length_trials import LengthTrials
from rocserve.load_check.padding import check_padding
from rocserve.load_check.padding_verdict import PaddingVerdict
from rocserve.load_check.tensors import Feed
from support.encoders import encoder
from support.load_check import Loaded, load, model, normal, unhurried
from support.row_models import Make

SIZES = (8, 16, 32)
_T = np.float32


@dataclass(frozen=True)
class Padded:
    """A model, and how its dimensions are to be padded."""

    make: Make
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {"T": SIZES})
    values: Mapping[str, float] = field(default_factory=dict)
    written: frozenset[str] = frozenset()
    found: Mapping[str, float] = field(default_factory=dict)
    """The values that the check finds."""
    has_company: bool = True

    def check(self, seed: int, samples: Sequence[Feed] = ()) -> PaddingVerdict:
        loaded = load(self.make())
        trials = LengthTrials(
            loaded.run,
            loaded.inputs,
            loaded.outputs,
            loaded.facts,
            unhurried(),
            seed,
            samples,
            has_company=self.has_company,
        )
        return check_padding(trials, self.padding(loaded), self.written)

    def padding(self, loaded: Loaded) -> Padding:
        inputs = {
            given.name: tuple(given.symbol(place) for place in range(len(given.shape))) for given in loaded.inputs
        }
        outputs = {
            node.name: tuple(map(str, node.shape)) for node in loaded.session.get_outputs() if node.name not in inputs
        }
        return Padding(
            tuple(
                PaddedDimension(label, sizes, _places(inputs, label), _places(outputs, label))
                for label, sizes in self.sizes.items()
            ),
            self.values,
        )


def _places(tensors: Mapping[str, tuple[str, ...]], label: str) -> Mapping[str, tuple[int, ...]]:
    found = {name: tuple(place for place, own in enumerate(names) if own == label) for name, names in tensors.items()}
    return {name: places for name, places in found.items() if places}


def _attention(hidden: str, outputs: str, end: str, inputs: str = "", **weights: np.ndarray) -> onnx.ModelProto:
    """Attention over `ids`, to whose scores `hidden` [N, 1, T] is added; `end` makes the outputs of `a` [N, T, 4]."""
    return model(
        f"""g (int64[N, T] ids{inputs}) => ({outputs}) {{
            e = Gather(table, ids) t = Transpose<perm = [0, 2, 1]>(e) s = MatMul(e, t)
            {hidden}
            h = Add(s, hidden) p = Softmax<axis = -1>(h) m = MatMul(p, e) a = Add(m, e)
            {end} }}""",
        table=normal(40, 4),
        zero=np.array(0, _T),
        unit=np.array(1, _T),
        least=np.array(-1e9, _T),
        one=np.array([1]),
        two=np.array([2]),
        **weights,
    )


_STEPS = "float[N, T, 4] y"
_POOLED = "float[N, 4] y"
_ALL = "y = Identity(a)"
_NOTHING = "hidden = Identity(zero)"
_MASK = "f = Cast<to = 1>(mask) u = Unsqueeze(f, one) w = Sub(unit, u) hidden = Mul(w, least)"
_MASK_OF_ONES = "f = Cast<to = 1>(mask) u = Unsqueeze(f, one) hidden = Mul(u, least)"
_MEAN = "y = ReduceMean<axes = [1], keepdims = 0>(a)"
_MASKED_MEAN = """g1 = Cast<to = 1>(mask) c = Unsqueeze(g1, two) r = Mul(a, c) q = ReduceSum<keepdims = 0>(r, one)
    n = ReduceSum<keepdims = 1>(g1, one) y = Div(q, n)"""
_BY_ID = "x = Equal(ids, special) f = Cast<to = 1>(x) u = Unsqueeze(f, one) hidden = Mul(u, least)"
_CAUSAL = """z = Shape(ids) n = Slice(z, one, two) k = Squeeze(n) r = Range(first, k, step)
    i = Unsqueeze(r, one) j = Unsqueeze(r, start) g1 = Greater(j, i) f = Cast<to = 1>(g1) hidden = Mul(f, least)"""
_CAUSAL_WEIGHTS = {"first": np.array(0), "step": np.array(1), "start": np.array([0])}
_BY_LENGTH = """z = Shape(ids) n = Slice(z, one, two) k = Squeeze(n) r = Range(first, k, step)
    v = Cast<to = 7>(given) i = Unsqueeze(v, one) o = GreaterOrEqual(r, i) f = Cast<to = 1>(o) u = Unsqueeze(f, one)
    hidden = Mul(u, least)"""
_LAST = "y = Gather<axis = 1>(a, last)"


def _recurrent(direction: str, lengths: str, outputs: str, end: str) -> onnx.ModelProto:
    directions = 2 if direction == "bidirectional" else 1
    given = ", int32[N] lengths" if lengths else ""
    return model(
        f"""g (float[N, T, 3] x{given}) => ({outputs}) {{
            t = Transpose<perm = [1, 0, 2]>(x)
            h, l = GRU<hidden_size = 2, direction = "{direction}">(t, w, r, b{f", {lengths}" if lengths else ""})
            {end} }}""",
        w=normal(directions, 6, 3),
        r=normal(directions, 6, 2, seed=1),
        b=normal(directions, 12, seed=2),
        shape=np.array([0, 0, 2 * directions]),
    )


_GRU_STEPS = "d = Transpose<perm = [2, 0, 1, 3]>(h) y = Reshape(d, shape)"
_GRU_LAST = "y = Transpose<perm = [1, 0, 2]>(l)"


def _convolutions(body: str, outputs: str = "float[N, 4, L] y", **weights: np.ndarray) -> onnx.ModelProto:
    return model(
        f"g (float[N, 3, T] x) => ({outputs}) {{ {body} }}",
        w1=normal(4, 3, 3),
        b1=normal(4, seed=1),
        w2=normal(4, 4, 3, seed=2),
        **weights,
    )


ALLOWED: Mapping[str, Padded] = {
    "encoder": Padded(encoder, {"sequence": SIZES}),
    "each element by itself": Padded(
        lambda: model("g (float[N, T, 4] x) => (float[N, T, 3] y) { m = MatMul(x, w) y = Tanh(m) }", w=normal(4, 3))
    ),
    "mask": Padded(lambda: _attention(_MASK, _STEPS, _ALL, ", int64[N, T] mask")),
    "mask of floats": Padded(lambda: _attention(_MASK, _STEPS, _ALL, ", float[N, T] mask")),
    "mask of flags": Padded(lambda: _attention(_MASK, _STEPS, _ALL, ", bool[N, T] mask")),
    "mask under another name": Padded(
        lambda: _attention(_MASK.replace("mask", "keep"), _STEPS, _ALL, ", bool[N, T] keep")
    ),
    "mean of what a mask shows": Padded(lambda: _attention(_MASK, _POOLED, _MASKED_MEAN, ", int64[N, T] mask")),
    "mask that hides with 1": Padded(
        lambda: _attention(_MASK_OF_ONES, _STEPS, _ALL, ", int64[N, T] mask"), found={"mask": 1.0}
    ),
    "mask that hides with 1, as somebody knew": Padded(
        lambda: _attention(_MASK_OF_ONES, _STEPS, _ALL, ", int64[N, T] mask"),
        values={"mask": 1.0},
        written=frozenset({"mask"}),
        found={"mask": 1.0},
    ),
    "flags that hide": Padded(
        lambda: _attention(_MASK_OF_ONES.replace("mask", "is_pad"), _STEPS, _ALL, ", bool[N, T] is_pad"),
        found={"is_pad": 1.0},
    ),
    "hides 0": Padded(lambda: _attention(_BY_ID, _STEPS, _ALL, special=np.array(0))),
    "hides 1, padded with 1": Padded(
        lambda: _attention(_BY_ID, _STEPS, _ALL, special=np.array(1)),
        values={"ids": 1.0},
        written=frozenset({"ids"}),
        found={"ids": 1.0},
    ),
    "causal": Padded(lambda: _attention(_CAUSAL, _STEPS, _ALL, **_CAUSAL_WEIGHTS)),
    "lengths": Padded(
        lambda: _attention(
            _BY_LENGTH.replace("given", "lengths"), _STEPS, _ALL, ", int32[N] lengths", **_CAUSAL_WEIGHTS
        )
    ),
    "lengths under another name": Padded(
        lambda: _attention(_BY_LENGTH.replace("given", "frames"), _STEPS, _ALL, ", int32[N] frames", **_CAUSAL_WEIGHTS)
    ),
    "recurrent": Padded(lambda: _recurrent("forward", "", "float[N, T, 2] y", _GRU_STEPS)),
    "recurrent both ways with lengths": Padded(
        lambda: _recurrent(
            "bidirectional",
            "lengths",
            "float[N, T, 4] y, float[N, D, 2] z",
            f"{_GRU_STEPS} z = Transpose<perm = [1, 0, 2]>(l)",
        )
    ),
    "last state with lengths": Padded(lambda: _recurrent("forward", "lengths", "float[N, D, 2] y", _GRU_LAST)),
    "one convolution": Padded(lambda: _convolutions("y = Conv<pads = [1, 1]>(x, w1, b1)")),
    "causal convolutions": Padded(
        lambda: _convolutions("a = Conv<pads = [2, 0]>(x, w1, b1) b = Relu(a) y = Conv<pads = [2, 0]>(b, w2)")
    ),
    "sum of rows of a table without a row 0": Padded(
        lambda: model(
            "g (int64[N, T] x) => (float[N, 4] y) { e = Gather(table, x) y = ReduceSum<keepdims = 0>(e, one) }",
            table=np.concatenate([np.zeros((1, 4), _T), normal(39, 4)]),
            one=np.array([1]),
        )
    ),
    "classes of each element": Padded(
        lambda: _attention(_MASK, "int64[N, T] y", "y = ArgMax<axis = 2, keepdims = 0>(a)", ", int64[N, T] mask")
    ),
    "half precision": Padded(
        lambda: model(
            """g (float16[N, T, 8] x, float16[N, T] mask) => (float16[N, T, 8] y) {
            t = Transpose<perm = [0, 2, 1]>(x) s = MatMul(x, t) d = Mul(s, tenth) u = Unsqueeze(mask, one)
            w = Sub(unit, u) l = Mul(w, least) h = Add(d, l) p = Softmax<axis = -1>(h) y = MatMul(p, x) }""",
            one=np.array([1]),
            tenth=np.array(0.1, np.float16),
            unit=np.array(1, np.float16),
            least=np.array(-6e4, np.float16),
        )
    ),
    "calibrated int8": Padded(
        lambda: model(
            """g (float[N, T, 4] x) => (float[N, T, 3] y) {
            q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }""",
            s=np.array(0.05, _T),
            z=np.array(0, np.int8),
            w=normal(4, 3),
        )
    ),
    "both sides of an image": Padded(
        lambda: model(
            "g (float[N, 3, H, W] x) => (float[N, 2, A, B] y) { c = Conv(x, w) y = Relu(c) }", w=normal(2, 3, 1, 1)
        ),
        {"H": (96, 128), "W": (80, 160)},
    ),
    "two lengths": Padded(
        lambda: model(
            """g (float[N, S, 4] source, float[N, T, 4] target, float[N, S] source_mask) => (float[N, T, 4] y) {
            t = Transpose<perm = [0, 2, 1]>(source) s = MatMul(target, t) u = Unsqueeze(source_mask, one)
            w = Sub(unit, u) l = Mul(w, least) h = Add(s, l) p = Softmax<axis = -1>(h) y = MatMul(p, source) }""",
            one=np.array([1]),
            unit=np.array(1, _T),
            least=np.array(-1e9, _T),
        ),
        {"S": (8, 24), "T": (4, 16)},
    ),
    "no names": Padded(lambda: _attention(_MASK, _STEPS, _ALL, ", int64[N, ?] mask"), {"T": SIZES, "mask[1]": SIZES}),
    "sum from the end": Padded(
        lambda: model("g (float[N, T] x) => (float[N, T] y) { y = CumSum<reverse = 1>(x, a) }", a=np.array(1))
    ),
}

REFUSED: Mapping[str, Padded] = {
    "attention without a mask": Padded(lambda: _attention(_NOTHING, _STEPS, _ALL)),
    "attention without a mask beside a large constant": Padded(
        lambda: _attention(
            _NOTHING,
            "float[N, T, 8] y, float[N, T, 4] z",
            "c = Mul(e, zero) l = Add(c, least) y = Concat<axis = -1>(a, l) z = Identity(e)",
        )
    ),
    "mean": Padded(lambda: _attention(_MASK, _POOLED, _MEAN, ", int64[N, T] mask")),
    "mean, if a value is above a number": Padded(
        lambda: model(
            """g (float[N, T, 4] x) => (float[N, T, 4] y) {
                m = ReduceMax<axes = [1, 2], keepdims = 1>(x) g = Greater(m, limit) f = Cast<to = 1>(g)
                a = ReduceMean<axes = [1], keepdims = 1>(x) p = Mul(f, a) y = Add(x, p) }""",
            limit=np.array(1000, _T),
        )
    ),
    "mask in the mean alone": Padded(lambda: _attention(_NOTHING, _POOLED, _MASKED_MEAN, ", int64[N, T] mask")),
    "mask that hides with 1, as nobody knew": Padded(
        lambda: _attention(_MASK_OF_ONES, _STEPS, _ALL, ", int64[N, T] mask"), written=frozenset({"mask"})
    ),
    "mask that hides the own answer alone": Padded(
        lambda: _attention(
            _NOTHING,
            _STEPS,
            "f = Cast<to = 1>(mask) c = Unsqueeze(f, two) r = Mul(m, c) y = Add(r, e)",
            ", int64[N, T] mask",
        )
    ),
    "hides 1": Padded(lambda: _attention(_BY_ID, _STEPS, _ALL, special=np.array(1))),
    "last of causal": Padded(lambda: _attention(_CAUSAL, _POOLED, _LAST, last=np.array(-1), **_CAUSAL_WEIGHTS)),
    "recurrent both ways": Padded(lambda: _recurrent("bidirectional", "", "float[N, T, 4] y", _GRU_STEPS)),
    "last state": Padded(lambda: _recurrent("forward", "", "float[N, D, 2] y", _GRU_LAST)),
    "two convolutions": Padded(
        lambda: _convolutions("a = Conv<pads = [1, 1]>(x, w1, b1) b = Relu(a) y = Conv<pads = [1, 1]>(b, w2)")
    ),
    "convolution with steps": Padded(lambda: _convolutions("y = Conv<pads = [1, 1], strides = [2]>(x, w1)")),
    "convolution that shortens": Padded(lambda: _convolutions("y = Conv(x, w1)")),
    "largest of all": Padded(
        lambda: _convolutions("a = Conv<pads = [1, 1]>(x, w1) y = GlobalMaxPool(a)", "float[N, 4, L] y")
    ),
    "largest of all that are positive": Padded(
        lambda: _convolutions("a = Conv<pads = [1, 1]>(x, w1, b1) b = Relu(a) y = GlobalMaxPool(b)")
    ),
    "largest element": Padded(
        lambda: model("g (float[N, T] x) => (float[N] y) { y = ReduceMax<axes = [1], keepdims = 0>(x) }")
    ),
    "best three": Padded(
        lambda: model("g (float[N, T] x) => (float[N, 3] y, int64[N, 3] i) { y, i = TopK(x, k) }", k=np.array([3]))
    ),
    "scale of the whole input": Padded(
        lambda: model(
            """g (float[N, T, 4] x) => (float[N, T, 3] y) {
            q, s, z = DynamicQuantizeLinear(x) d = DequantizeLinear(q, s, z) y = MatMul(d, w) }""",
            w=normal(4, 3),
        )
    ),
    "normalised along the length": Padded(
        lambda: model(
            "g (float[N, 3, T] x) => (float[N, 3, T] y) { y = InstanceNormalization(x, o, z) }",
            o=np.ones(3, _T),
            z=np.zeros(3, _T),
        )
    ),
    "softmax along the length": Padded(
        lambda: model("g (float[N, T] x) => (float[N, T] y) { y = Softmax<axis = 1>(x) }")
    ),
    "divided by the length": Padded(
        lambda: model(
            """g (float[N, T, 4] x) => (float[N, T, 4] y) {
            s = Shape(x) n = Gather(s, one) f = Cast<to = 1>(n) y = Div(x, f) }""",
            one=np.array(1),
        )
    ),
    "places from the end": Padded(
        lambda: model(
            """g (float[N, T] x) => (float[N, T] y) {
            s = Shape(x) n = Gather(s, one) r = Range(zero, n, one)
            b = Sub(n, r) f = Cast<to = 1>(b) y = Mul(x, f) }""",
            one=np.array(1),
            zero=np.array(0),
        )
    ),
    "sorted": Padded(
        lambda: model(
            """g (float[N, T] x) => (float[N, T] y) {
            s = Shape(x) n = Slice(s, one, two) v, i = TopK(x, n) y = Identity(v) }""",
            one=np.array([1]),
            two=np.array([2]),
        )
    ),
    "a mask that hides a little": Padded(
        lambda: _attention(
            _MASK.replace("least", "little"), _STEPS, _ALL, ", int64[N, T] mask", little=np.array(-5, _T)
        )
    ),
    "places up to 20": Padded(
        lambda: model(
            """g (float[N, T, 4] x) => (float[N, T, 4] y) {
            s = Shape(x) n = Gather(s, one) r = Range(zero, n, one) p = Gather(places, r) y = Add(x, p) }""",
            one=np.array(1),
            zero=np.array(0),
            places=normal(20, 4),
        )
    ),
    "outputs as long as lengths say": Padded(
        lambda: model(
            """g (float[N, T] x, int64[N] lengths) => (float[N, M] y) {
            m = ReduceMax<keepdims = 1>(lengths) y = Slice(x, zero, m, one) }""",
            zero=np.array([0]),
            one=np.array([1]),
        )
    ),
    "ids counted": Padded(
        lambda: model(
            """g (int64[N, T] x) => (float[N, 9] y) {
            o = OneHot(x, depth, values) y = ReduceSum<keepdims = 0>(o, one) }""",
            depth=np.array(9),
            values=np.array([0, 1], _T),
            one=np.array([1]),
        )
    ),
    "an image beside its mean": Padded(
        lambda: model(
            """g (float[N, 3, H, W] x) => (float[N, 3, A, B] y) {
            m = ReduceMean<axes = [2, 3]>(x) y = Sub(x, m) }"""
        ),
        {"H": (96, 128), "W": (80, 160)},
    ),
}

UNDECIDED: Mapping[str, Padded] = {
    "noise": Padded(
        lambda: model("g (float[N, T, 4] x) => (float[N, T, 4] y) { r = RandomNormalLike(x) y = Add(x, r) }")
    ),
    "a constant": Padded(
        lambda: model(
            "g (float[N, T] x) => (float[N, 1] y) { m = ReduceMax<axes = [1]>(x) y = Mul(m, z) }", z=np.array(0, _T)
        )
    ),
    "texts for numbers": Padded(
        lambda: model(
            """g (string[N] s, float[N, T] x) => (float[N, T] y) {
            f = Cast<to = 1>(s) u = Unsqueeze(f, o) y = Add(x, u) }""",
            o=np.array([1]),
        )
    ),
}
