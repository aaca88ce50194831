"""Describes the varying sizes of a program's inputs, and checks that the inputs' sizes agree."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rocserve.core.errors import invalid_argument

UNBOUNDED = 1 << 31
"""torch.export gives a size without an upper bound at least this one."""
LEAST_TRIED = 2
"""torch.export's lower bound of a size for which it has not tried 0 and 1; both work."""


@dataclass(frozen=True, slots=True)
class OpenSize:
    """A varying size: `factor` times a number, plus `offset`. `least` and `most` bound the number; None = no limit."""

    number: str
    """The number's name. All sizes of the program with this name have the same number."""
    factor: int
    offset: int
    least: int
    most: int | None

    @property
    def is_plain(self) -> bool:
        """Whether the size is the number itself."""
        return (self.factor, self.offset) == (1, 0)

    def admits(self, size: int) -> bool:
        number, rest = divmod(size - self.offset, self.factor)
        return not rest and self.least <= number and (self.most is None or number <= self.most)


def open_size(size: Any, bounds: Mapping[Any, Any]) -> OpenSize | None:
    """Describe PyTorch's size. `bounds`: symbol -> range. None = fixed, or not linear and growing in one number."""
    if isinstance(size, int) or len(size.node.expr.free_symbols) != 1:
        return None
    expression = size.node.expr
    (symbol,) = expression.free_symbols
    own = bounds.get(symbol)
    least = 0 if own is None or own.lower <= LEAST_TRIED else int(own.lower)
    most = None if own is None or not own.upper < UNBOUNDED else int(own.upper)
    factor, offset = expression.coeff(symbol), expression.subs(symbol, 0)
    if not (factor.is_Integer and factor > 0 and expression == factor * symbol + offset):
        return None
    return OpenSize(str(symbol), int(factor), int(offset), least, most)


def check_sizes(
    names: Sequence[str],
    sizes: Sequence[Sequence[OpenSize | None]],
    conditions: Iterable[SizeCondition],
    values: Sequence[Any],
    made: str = "exported",
) -> None:
    """Check the inputs' sizes, like the program itself does: Inductor's compiled code would read beyond the inputs'
    ends. `names`: the inputs' names. `sizes`: for each dimension of each input how it varies. `conditions`: further
    conditions of the sizes. `made`: the verb for how the program got its bounds. Raises ServeError (INVALID_ARGUMENT)
    if sizes do not agree, or exceed the bounds of the program."""
    numbers: dict[str, tuple[int, str]] = {}
    for name, open_sizes, value in zip(names, sizes, values, strict=True):
        for dimension, (own, size) in enumerate(zip(open_sizes, value.shape, strict=True)):
            if own is None:
                continue
            number = (size - own.offset) // own.factor
            what = f"dimension {dimension} of input '{name}' is {size}"
            if not own.admits(size):
                raise invalid_argument(f"{what}; its program was {made} for {bounds_text(own)}")
            before, other = numbers.setdefault(own.number, (number, what))
            if before != number:
                raise invalid_argument(f"{other}, but {what}; its program was {made} for matching sizes")
    for condition in conditions:
        condition.check(names, values, made)


def bounds_text(own: OpenSize) -> str:
    most = "" if own.most is None else f", at most {own.factor * own.most + own.offset}"
    steps = f", in steps of {own.factor}" if own.factor > 1 else ""
    return f"{own.factor * own.least + own.offset} at least{most}{steps}"


_OPERATORS: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "max": max, "Max": max, "min": min, "Min": min, "FloorDiv": operator.floordiv, "Mod": operator.mod,
    "PythonMod": operator.mod,
}  # fmt: skip
_SIZE = re.compile(r"\bsize_(\d+)_(\d+)\b")


class SizeCondition:
    """A condition of the sizes of a program's inputs, e.g. `size_0_0 == (size_1_0 + 1) // 2`. `size_1_0` is dimension 0
    of the second input. A condition consists of integer arithmetic, comparisons, `and` and `or`. It is parsed, and
    never executed."""

    def __init__(self, text: str) -> None:
        """Raises ValueError if the text holds anything else."""
        if len(text) > 10_000:
            raise ValueError(f"a condition of {len(text)} characters")
        self._text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
            self._value(self._tree, lambda name: LEAST_TRIED)
        except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
            raise ValueError(f"not a condition of sizes: {text}") from error
        except ZeroDivisionError:
            pass

    @property
    def excludes_only_0_and_1(self) -> bool:
        """Whether the condition only excludes sizes of 0 and 1, which torch.export has not tried, and which work."""
        match self._tree:
            case ast.Compare(tested, [ast.NotEq()], [ast.Constant(value=0 | 1)]):
                pass
            case ast.Compare(tested, [ast.GtE()], [ast.Constant(value=0 | 1 | 2)]):
                pass
            case ast.Compare(ast.Constant(value=0 | 1 | 2), [ast.LtE()], [tested]):
                pass
            case _:
                return False
        return not any(isinstance(node, ast.Mod) for node in ast.walk(tested))

    def right_side(self, shapes: Sequence[Sequence[int]]) -> int:
        """Return the value of the right side of `==` for inputs of these shapes."""
        match self._tree:
            case ast.Compare(_, [ast.Eq()], [right]):
                return int(self._value(right, lambda name: _size_in(shapes, name)))
        raise ValueError(f"not an equation: {self._text}")

    def check(self, names: Sequence[str], values: Sequence[Any], made: str) -> None:
        """Check inputs like `check_sizes`. Raises ServeError (INVALID_ARGUMENT) if the condition is false."""
        shapes = [value.shape for value in values]

        def size(name: str) -> int:
            return _size_in(shapes, name)

        def shown(found: re.Match[str]) -> str:
            return f"dimension {found[2]} of input '{names[int(found[1])]}' ({size(found[0])})"

        try:
            if self._value(self._tree, size):
                return
        except ZeroDivisionError:
            pass
        raise invalid_argument(
            f"sizes of the inputs do not match; its program was {made} for {_SIZE.sub(shown, self._text)}"
        )

    def _value(self, node: ast.AST, size: Callable[[str], int]) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.Name(id=name) if _SIZE.fullmatch(name):
                return size(name)
            case ast.BinOp(left, operation, right) if type(operation) in _OPERATORS:
                return _OPERATORS[type(operation)](self._value(left, size), self._value(right, size))
            case ast.BinOp(left, ast.Pow(), ast.Constant(value=int() as power)) if 0 <= power <= 8:
                return self._value(left, size) ** power
            case ast.Call(ast.Name(id=name), parts, []) if name in _FUNCTIONS:
                return _FUNCTIONS[name](*(self._value(part, size) for part in parts))
            case ast.UnaryOp(ast.USub(), operand):
                return -self._value(operand, size)
            case ast.Compare(left, [comparison], [right]) if type(comparison) in _OPERATORS:
                return _OPERATORS[type(comparison)](self._value(left, size), self._value(right, size))
            case ast.BoolOp(operation, parts):
                values = [self._value(part, size) for part in parts]
                return all(values) if isinstance(operation, ast.And) else any(values)
            case _:
                raise ValueError(f"no condition of sizes: {self._text}")


def _size_in(shapes: Sequence[Sequence[int]], name: str) -> int:
    tensor, dimension = map(int, name.removeprefix("size_").split("_"))
    return int(shapes[tensor][dimension])
