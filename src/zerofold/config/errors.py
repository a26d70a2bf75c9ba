"""What a config says wrong, in one line: the key, its value, the fix."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from typing import Any

_LONGEST_VALUE = 80
_MOST_NAMES = 24  # that a message lists


class ConfigError(ValueError):
    """A config that cannot be followed as it stands. Always one line that names the key, its value and the fix.

    >>> print(wrong("zero_optimization.stage", 4, "choose one of 0, 1, 2, 3"))
    zero_optimization.stage: 4 is not possible; choose one of 0, 1, 2, 3
    """


def wrong(path: str, value: object, fix: str, *, why: str = "is not possible") -> ConfigError:
    return ConfigError(f"{path}: {shown(value)} {why}; {fix}")


def shown(value: object) -> str:
    """A value as it stands in a config, shortened where it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant; None where nothing is close.

    >>> nearest("zero_optimisation", ["zero_optimization", "optimizer"])
    'zero_optimization'
    """
    by_lower = {other.lower(): other for other in names}
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def unknown(
    path: str, name: str, value: Any, names: Iterable[str], *, what: str = "key", meant: str | None = None
) -> ConfigError:
    """For a name that does not exist at this place; `meant` where something better is known than the nearest name."""
    names = sorted(names)
    meant = meant or nearest(name, names)
    if name.startswith("_") or name.lower().startswith("comment"):
        fix = "take it out, and write comments as // to the end of a line"
    elif meant:
        fix = f'did you mean "{meant}"?'
    elif len(names) > _MOST_NAMES:
        fix = "take it out; no name here is like it"
    else:
        fix = f"there are: {', '.join(names)}"
    return wrong(path, value, fix, why=f"is given, but there is no {what} of this name here")
