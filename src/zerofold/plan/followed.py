"""Numbers that remember how they were made: `zerofold.plan.formulas` runs the plan on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, SupportsIndex

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
}


class NotAFormulaError(TypeError):
    """The function does something with its inputs that cannot be followed."""


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

    def input(self, name: str, value: int) -> FollowedInt:
        return FollowedInt(value, self, self.node("input", name))

    def number_of(self, value: Any) -> int:
        if isinstance(value, FollowedInt | FollowedFloat):
            return value.number
        return self.node("value", value + 0)  # True is 1

    def made(self, operation: str, *operands: Any) -> Any:
        values = [plain(each) for each in operands]
        number = self.node(operation, *map(self.number_of, operands))
        return self.followed(COMPUTE[operation](*values), number)

    def followed(self, value: float, number: int) -> Any:
        if isinstance(value, int):
            return FollowedInt(value, self, number)
        return FollowedFloat(value, self, number)

    def compared(self, compare: str, left: Any, right: Any) -> bool:
        outcome = COMPARE[compare](plain(left), plain(right))
        self.guards.setdefault(Guard(compare, self.number_of(left), self.number_of(right), outcome))
        return outcome


class _Followed:
    """What ints and floats share; both are numbers of Python too, so that any code takes them."""

    tape: Tape
    number: int

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

    def __float__(self) -> NoReturn:
        _refuse("float() or a function of math")

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
        return isinstance(other, int | float) and self.tape.compared("==", self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def _with(self, operation: str, left: Any, right: Any) -> Any:
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            return NotImplemented
        return self.tape.made(operation, left, right)

    def _whole(self, operation: str, left: Any, right: Any) -> Any:
        if isinstance(left, float) or isinstance(right, float):
            _refuse(f"{operation} of a float")
        return self._with(operation, left, right)


class FollowedInt(_Followed, int):  # type: ignore[misc]  # int's __pow__ takes a modulus
    def __new__(cls, value: int, tape: Tape, number: int) -> FollowedInt:
        made = int.__new__(cls, value)
        made.tape, made.number = tape, number
        return made

    __hash__ = int.__hash__


class FollowedFloat(_Followed, float):
    def __new__(cls, value: float, tape: Tape, number: int) -> FollowedFloat:
        made = float.__new__(cls, value)
        made.tape, made.number = tape, number
        return made

    __hash__ = float.__hash__


def plain(value: Any) -> Any:
    """The number alone.

    >>> tape = Tape()
    >>> made = 2 * tape.input("devices", 8) + 1
    >>> plain(made), tape.nodes
    (17, [('input', 'devices'), ('value', 2), ('*', 1, 0), ('value', 1), ('+', 2, 3)])
    """
    if isinstance(value, FollowedInt):
        return int.__pos__(value)
    if isinstance(value, FollowedFloat):
        return float.__pos__(value)
    return value


def _refuse(what: str, instead: str = "use whole-number arithmetic") -> NoReturn:
    raise NotAFormulaError(f"{what} of a number that a slider moves cannot be followed: {instead}")
