"""What is said of an argument of the wrong kind, wherever it is given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def check_flags(**flags: object) -> None:
    """Text is true whatever it says, so "no" would be taken for yes.

    >>> check_flags(overlap="no")
    Traceback (most recent call last):
    TypeError: overlap='no' must be True or False
    """
    for name, flag in flags.items():
        if not isinstance(flag, (bool, int)):
            raise TypeError(f"{name}={flag!r} must be True or False")


def check_number(name: str, number: object, fix: str, *, positive: bool = True) -> None:
    """
    >>> check_number("max_norm", "1.0", "give the largest norm")
    Traceback (most recent call last):
    TypeError: max_norm='1.0' must be a number: give the largest norm
    >>> check_number("max_norm", -1, "give the largest norm")
    Traceback (most recent call last):
    ValueError: max_norm=-1 must be positive: give the largest norm
    """
    # A tensor of one element is a number too, and so are numpy's.
    if isinstance(number, (str, bytes, bool)) or not hasattr(number, "__float__"):
        raise TypeError(f"{name}={number!r} must be a number: {fix}")
    value: Any = number
    if not (value > 0 if positive else value >= 0):
        raise ValueError(f"{name}={number} must be {'positive' if positive else 'at least 0'}: {fix}")


def path_of(name: str, path: str | os.PathLike[str]) -> Path:
    """
    >>> path_of("path", 3)
    Traceback (most recent call last):
    TypeError: path=3 must be a path, text or a pathlib.Path
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"{name}={path!r} must be a path, text or a pathlib.Path")
    return Path(path)
