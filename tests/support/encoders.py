"""A small encoder of texts, as ids with a mask: attention among the real tokens, a vector for each and one for all."""

from __future__ import annotations

import numpy as np
import onnx

from support.load_check import model, normal

VOCABULARY = 200
WIDTH = 16
LONGEST = 64

_LAYER = """
            q{n} = MatMul(x{n}, wq{n}) k{n} = MatMul(x{n}, wk{n}) v{n} = MatMul(x{n}, wv{n})
            kt{n} = Transpose<perm = [0, 2, 1]>(k{n}) s{n} = MatMul(q{n}, kt{n}) h{n} = Add(s{n}, hidden)
            p{n} = Softmax<axis = -1>(h{n}) a{n} = MatMul(p{n}, v{n}) r{n} = Add(x{n}, a{n})
            x{m} = LayerNormalization<axis = -1>(r{n}, scale)"""


def encoder(layers: int = 2, width: int = WIDTH, longest: int = 512) -> onnx.ModelProto:
    """input_ids and attention_mask [batch, sequence] -> tokens [batch, sequence, width], pooled [batch, width]. It has
    a table of so many positions."""
    body = "".join(_LAYER.format(n=number, m=number + 1) for number in range(layers))
    weights = {
        f"w{part}{number}": normal(width, width, seed=10 * number + place) / np.float32(width**0.5)
        for number in range(layers)
        for place, part in enumerate("qkv")
    }
    return model(
        f"""g (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask) =>
              (float[batch, sequence, {width}] tokens, float[batch, {width}] pooled) {{
            shape = Shape(input_ids) length = Gather(shape, one_number) place = Range(zero, length, one_number)
            e = Gather(table, input_ids) w = Gather(places, place) x0 = Add(e, w)
            m = Cast<to = 1>(attention_mask) row = Unsqueeze(m, one) away = Sub(unit, row) hidden = Mul(away, least)
            {body}
            tokens = Identity(x{layers}) column = Unsqueeze(m, two) real = Mul(tokens, column)
            sum = ReduceSum<keepdims = 0>(real, one) count = ReduceSum<keepdims = 1>(m, one)
            pooled = Div(sum, count) }}""",
        table=normal(VOCABULARY, width, seed=98),
        places=normal(longest, width, seed=99) / np.float32(4),
        scale=np.ones(width, np.float32),
        zero=np.array(0),
        one_number=np.array(1),
        one=np.array([1]),
        two=np.array([2]),
        unit=np.array(1, np.float32),
        least=np.array(-1e9, np.float32),
        **weights,
    )


def demanding() -> onnx.ModelProto:
    """input_ids and attention_mask, of which the file does not tell that they are equally long -> tokens. It looks for
    the first real element, and so refuses a mask of zeros."""
    return model(
        f"""g (int64[batch, a] input_ids, int64[batch, b] attention_mask) => (float[batch, c, {WIDTH}] tokens) {{
            e = Gather(table, input_ids) m = Cast<to = 1>(attention_mask) u = Unsqueeze(m, two) real = Mul(e, u)
            found = NonZero(attention_mask) places = Transpose<perm = [1, 0]>(found) first = Gather(places, zero)
            sum = ReduceSum<keepdims = 0>(first) number = Cast<to = 1>(sum) nothing = Mul(number, none)
            tokens = Add(real, nothing) }}""",
        table=normal(VOCABULARY, WIDTH, seed=98),
        two=np.array([2]),
        zero=np.array(0),
        none=np.array(0, np.float32),
    )


def with_own_names(proto: onnx.ModelProto, name: str = "unk__{}") -> onnx.ModelProto:
    """The model as tf2onnx writes it: each open dimension has its own name. `name`: "" = no name."""
    sizes = [
        size
        for value in (*proto.graph.input, *proto.graph.output)
        for size in value.type.tensor_type.shape.dim
        if not size.HasField("dim_value")
    ]
    for number, size in enumerate(sizes, 1):
        if name:
            size.dim_param = name.format(number)
        else:
            size.ClearField("dim_param")
    return proto
