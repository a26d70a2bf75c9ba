"""The kinds of values a key takes. Each says in words what it wants, for the message when something else comes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

AUTO = "auto"


class Mismatch(Exception):
    """The value is not of the kind; the text, if any, says more than the kind's words."""


class Kind(NamedTuple):
    """`take` gives the value as the code wants it, or raises a Mismatch.

    >>> whole(1).take(2e8), number().take(3), choice("cpu", "none").take("CPU")
    (200000000, 3.0, 'cpu')
    """

    words: str
    take: Callable[[Any], Any]


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Mismatch
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_number(value: Any) -> None:
    if isinstance(value, str) and _reads_as_number(value):
        raise Mismatch("write the number without quotes")
    if not _is_number(value):
        raise Mismatch


def _reads_as_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if not isinstance(value, str):
        raise Mismatch
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise Mismatch
    return dict(value)


FLAG = Kind("true or false", _flag)
TEXT = Kind("text", _text)
MAPPING = Kind("a section, {...}", _mapping)
ANYTHING = Kind("anything", lambda value: value)


def whole(least: int = 0, most: int | None = None) -> Kind:
    """Whole numbers; 2e8 counts as one."""

    def take(value: Any) -> int:
        _check_number(value)
        if not math.isfinite(value) or value != int(value) or value < least or (most is not None and value > most):
            raise Mismatch
        return int(value)

    upper = "" if most is None else f" to {most}"
    return Kind(
        f"a whole number from {least}{upper}" if most is not None else f"a whole number, at least {least}", take
    )


def number(least: float = 0.0, *, above: float | None = None, most: float | None = None) -> Kind:
    """Finite numbers from `least`, or greater than `above`, up to `most`."""

    def take(value: Any) -> float:
        _check_number(value)
        too_low = value <= above if above is not None else value < least
        if not math.isfinite(value) or too_low or (most is not None and value > most):
            raise Mismatch
        return float(value)

    lower = f"greater than {above:g}" if above is not None else f"at least {least:g}"
    lower = "" if least == -math.inf and above is None else f", {lower}"
    return Kind(f"a number{lower}" + ("" if most is None else f", at most {most:g}"), take)


REAL = number(-math.inf)


def choice(*names: str) -> Kind:
    """One of some names, whatever their case."""

    def take(value: Any) -> str:
        found = [name for name in names if isinstance(value, str) and value.lower() == name.lower()]
        if not found:
            raise Mismatch
        return found[0]

    return Kind(f"one of {', '.join(names)}", take)


def list_of(kind: Kind, length: int | None = None) -> Kind:
    def take(value: Any) -> list[Any]:
        if not isinstance(value, (list, tuple)) or (length is not None and len(value) != length):
            raise Mismatch
        return [kind.take(item) for item in value]

    count = "" if length is None else f" of {length}"
    return Kind(f"a list{count}, each {kind.words}", take)


def either(*kinds: Kind) -> Kind:
    """The first of several kinds that takes the value."""

    def take(value: Any) -> Any:
        for kind in kinds:
            try:
                return kind.take(value)
            except Mismatch:
                continue
        raise Mismatch

    return Kind(", or ".join(kind.words for kind in kinds), take)
