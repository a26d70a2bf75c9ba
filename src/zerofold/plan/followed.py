"""Numbers that remember how they were made: `zerofold.plan.formulas` runs the plan on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, reduce, wraps
from typing import Any, NoReturn, ParamSpec, SupportsIndex, TypeVar

COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    "==": lambda a, b: a == b,
}
COMPUTE: Mapping[str, Callable[..., Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "/": lambda a, b: a / b,
    "neg": lambda a: -a,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "max": max,
    "min": min,
    "gcd": math.gcd,
}


P = ParamSpec("P")
R = TypeVar("R")
N = TypeVar("N", bound=float)


class NotAFormulaError(TypeError):
    """The function does something with its inputs that cannot be followed."""


class _NoHashError(NotAFormulaError):
    pass


@dataclass(frozen=True)
class Guard:
    """A comparison of two nodes, and how it came out."""

    compare: str
    left: int
    right: int
    outcome: bool


@dataclass
class Tape:
    """Nodes, each computed from earlier ones: ("+", 3, 4), ("input", "devices"), ("value", 16). Equal ones are one."""

    nodes: list[tuple[Any, ...]] = field(default_factory=list)
    guards: dict[Guard, None] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], int] = field(default_factory=dict)

    def node(self, *parts: Any) -> int:
        key = (*parts, type(parts[1]))  # 1 and 1.0 are equal keys and other numbers
        if key not in self._known:
            self._known[key] = len(self.nodes)
            self.nodes.append(parts)
        return self._known[key]

    def input(self, name: str, value: int) -> Any:
        return Followed(value, self, self.node("input", name))

    def number_of(self, value: Any) -> int:
        if isinstance(value, Followed):
            return value.number
        return self.node("value", value + 0)  # True is 1

    def made(self, operation: str, *operands: Any) -> Any:
        values = [plain(each) for each in operands]
        number = self.node(operation, *map(self.number_of, operands))
        return Followed(COMPUTE[operation](*values), self, number)

    def compared(self, compare: str, left: Any, right: Any) -> bool:
        outcome = COMPARE[compare](plain(left), plain(right))
        self.guards.setdefault(Guard(compare, self.number_of(left), self.number_of(right), outcome))
        return outcome


class Followed:
    """A number and its node. No subclass of int, or a plain float would add it up without asking."""

    def __init__(self, value: float, tape: Tape, number: int) -> None:
        self.value, self.tape, self.number = value, tape, number

    def __add__(self, other: Any) -> Any:
        return self._with("+", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._with("+", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._with("-", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._with("-", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._with("*", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._with("*", other, self)

    def __floordiv__(self, other: Any) -> Any:
        return self._whole("//", self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return self._whole("//", other, self)

    def __mod__(self, other: Any) -> Any:
        return self._whole("%", self, other)

    def __rmod__(self, other: Any) -> Any:
        return self._whole("%", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._with("/", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._with("/", other, self)

    def __pow__(self, power: Any, modulo: None = None) -> Any:
        if type(power) is not int or power < 1 or modulo is not None:
            _refuse("a power that is no positive whole number")
        return self if power == 1 else self * self ** (power - 1)

    def __neg__(self) -> Any:
        return self.tape.made("neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return -self if self < 0 else self

    def __round__(self, digits: SupportsIndex | None = None) -> Any:
        if digits is not None:
            _refuse("round() to digits")
        return self.tape.made("round", self)

    def __floor__(self) -> Any:
        return self.tape.made("floor", self)

    def __ceil__(self) -> Any:
        return self.tape.made("ceil", self)

    def __trunc__(self) -> Any:
        return self.tape.made("trunc", self)

    # Python turns what these return into plain numbers, and the formula would be lost without a word.
    def __int__(self) -> NoReturn:
        _refuse("int()", "round, math.floor, math.ceil or math.trunc can be followed")

    def __index__(self) -> NoReturn:
        _refuse("range(), an index or a function of math")

    def __float__(self) -> NoReturn:
        _refuse("float() or a function of math")

    def __format__(self, form: str) -> str:
        return format(self.value, form)

    def __repr__(self) -> str:
        return repr(self.value)

    def __bool__(self) -> bool:
        return not self.tape.compared("==", self, 0)

    def __lt__(self, other: Any) -> bool:
        return self.tape.compared("<", self, other)

    def __le__(self, other: Any) -> bool:
        return self.tape.compared("<=", self, other)

    def __gt__(self, other: Any) -> bool:
        return self.tape.compared("<", other, self)

    def __ge__(self, other: Any) -> bool:
        return self.tape.compared("<=", other, self)

    def __eq__(self, other: object) -> bool:
        return _is_number(other) and self.tape.compared("==", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    # What is remembered by value would come back without its comparisons, or into another run.
    def __hash__(self) -> NoReturn:
        raise _NoHashError("a hash cannot be followed: cache with zerofold.plan.followed.remembered")

    def _with(self, operation: str, left: Any, right: Any) -> Any:
        if not _is_number(left) or not _is_number(right):
            return NotImplemented
        return self.tape.made(operation, left, right)

    def _whole(self, operation: str, left: Any, right: Any) -> Any:
        if isinstance(plain(left), float) or isinstance(plain(right), float):
            _refuse(f"{operation} of a float")
        return self._with(operation, left, right)


def plain(value: Any) -> Any:
    """The number alone.

    >>> tape = Tape()
    >>> made = 2 * tape.input("devices", 8) + 1
    >>> plain(made), tape.nodes
    (17, [('input', 'devices'), ('value', 2), ('*', 1, 0), ('value', 1), ('+', 2, 3)])
    """
    return value.value if isinstance(value, Followed) else value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Followed)


def _refuse(what: str, instead: str = "use whole-number arithmetic") -> NoReturn:
    raise NotAFormulaError(f"{what} of a number that a slider moves cannot be followed: {instead}")


def remembered(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`lru_cache(most)` for arithmetic that may be followed: it is computed anew then.

    >>> @remembered(8)
    ... def twice(number):
    ...     return 2 * number
    >>> tape = Tape()
    >>> twice(4), plain(twice(tape.input("devices", 4))), len(tape.nodes)
    (8, 8, 3)
    """

    def around(function: Callable[P, R]) -> Callable[P, R]:
        cached = lru_cache(most)(function)

        @wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return cached(*args, **kwargs)  # type: ignore[arg-type]  # whatever has no hash raises
            except _NoHashError:
                return function(*args, **kwargs)

        return called

    return around


# Python's own would leave a comparison behind, or forget how a number was made: a formula with many regions, or none.


def greatest(values: Iterable[N], *, default: Any = 0) -> N:
    """`max` of numbers, as one operation of a formula.

    >>> greatest([3, 5]), greatest([])
    (5, 0)
    """
    return _chosen(max, values, default)


def least(values: Iterable[N], *, default: Any = 0) -> N:
    """`min` of numbers, as one operation of a formula.

    >>> tape = Tape()
    >>> plain(least([tape.input("devices", 64), 8])), list(tape.guards), tape.nodes[-1]
    (8, [], ('min', 0, 1))
    """
    return _chosen(min, values, default)


def greatest_common_divisor(left: int, right: int) -> int:
    """`math.gcd`, as one operation of a formula.

    >>> greatest_common_divisor(8, 12)
    4
    """
    tape = _tape_of([left, right])
    return math.gcd(left, right) if tape is None else tape.made("gcd", left, right)


def _chosen(choose: Callable[..., Any], values: Iterable[Any], default: Any) -> Any:
    found = list(values)
    tape = _tape_of(found)
    if tape is None:
        return choose(found, default=default)
    return reduce(lambda one, other: tape.made(choose.__name__, one, other), found)


def _tape_of(values: Iterable[Any]) -> Tape | None:
    for value in values:  # the search comes here a million times: no generator
        if value.__class__ is Followed:
            return value.tape
    return None
