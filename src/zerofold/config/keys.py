"""What the tables of keys are made of: for each key its kind of value, its default, and what becomes of it here.

honoured    does what it says
mapped      has another form here, or no counterpart; the text says what happens instead
refused     cannot be done; the text says why and what to use instead. Switched off it is accepted
old         a name of earlier versions; read as the new one
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from zerofold.config.kinds import AUTO, Kind


@dataclass(frozen=True)
class Note:
    """What became of one key: `fate` is "honoured" or "mapped", `text` says how."""

    key: str
    value: Any
    fate: str
    text: str


@dataclass(frozen=True)
class Key:
    kind: Kind
    default: Any = None
    mapped: str = ""
    """What zerofold does instead; empty where the key is honoured."""
    auto: bool = False
    """Whether "auto" is accepted: there is a place where the value can be found."""
    silent: tuple[Any, ...] = ()
    """Values of a mapped key that ask for nothing, so that nothing is said about them."""


@dataclass(frozen=True)
class Old:
    """An earlier name: the value goes to `new`, a dotted path from the top, by way of `turn`."""

    new: str
    kind: Kind
    turn: Callable[[Any], Any] = lambda value: value


@dataclass(frozen=True)
class Refused:
    why: str
    is_off: Callable[[Any], bool]


@dataclass(frozen=True)
class Section:
    keys: Mapping[str, Key | Old | Refused | Section]
    example: str = '{"enabled": true}'
    short: Callable[[bool], dict[str, Any]] | None = None
    """What a plain true or false instead of the section stands for."""


Spec = Key | Old | Refused | Section


def honoured(kind: Kind, default: Any = None, *, auto: bool = False) -> Key:
    return Key(kind, default, auto=auto)


def mapped(kind: Kind, text: str, default: Any = None, *, auto: bool = False, silent: tuple[Any, ...] = ()) -> Key:
    return Key(kind, default, text, auto, silent)


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or value == AUTO or value in (0, "", [], {})


def refused(why: str, *, off: Callable[[Any], bool] = _says_nothing) -> Refused:
    """A key whose value is refused unless it says "no": null, false, 0 or something empty."""
    return Refused(why, off)


def refused_section(why: str) -> Refused:
    """A feature with a section of its own, on only where an "enabled" in it is true."""

    def is_on(section: Any) -> bool:
        if not isinstance(section, Mapping):
            return not _says_nothing(section)
        if "enabled" in section:
            return not _says_nothing(section["enabled"])
        return any(is_on(value) for value in section.values() if isinstance(value, Mapping))

    return Refused(why, lambda value: not is_on(value))
