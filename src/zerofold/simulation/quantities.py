"""Rates, times and lists of numbers as people write them."""

from __future__ import annotations

import math
import re

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_NUMBER = r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*"


_LEAST_RATE = 1e6


def bytes_per_second(option: str, text: str) -> float:
    """
    >>> [bytes_per_second("--rate", each) for each in ("50GB/s", "400Gb/s", "1e9")]
    [50000000000.0, 50000000000.0, 1000000000.0]
    """
    found = re.fullmatch(_NUMBER + r"(?:([kKmMgGtT]?)([bB])(?:it)?(?:/s|ps)?)?", text)
    number = _number(found)
    if found is None or not number:
        raise ValueError(f"{option} {text!r} is no rate: write 50GB/s, 400Gb/s (bits), or bytes a second")
    bits = 8 if found[3] == "b" else 1
    rate = number * _PREFIX[(found[2] or "").lower()] / bits
    if rate < _LEAST_RATE:
        raise ValueError(f"{option} {text} is {rate:g} bytes a second, less than any link: write a unit, as in 50GB/s")
    return rate


def seconds(option: str, text: str) -> float:
    """
    >>> seconds("--latency", "5us"), seconds("--latency", "0.001")
    (5e-06, 0.001)
    """
    found = re.fullmatch(_NUMBER + r"(s|ms|us|µs|ns)?", text)
    number = _number(found)
    if found is None or number is None:
        raise ValueError(f"{option} {text!r} is no time: write 5us, 0.1ms or seconds")
    return float(f"{number * _TIMES[found[2] or '']:.12g}")


def counts(option: str, text: str) -> list[int]:
    """
    >>> counts("--worlds", "1,8, 64")
    [1, 8, 64]
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"{option} {text!r}: write whole numbers with commas, such as 1,8,64")
    return [int(part) for part in parts]


def _number(found: re.Match[str] | None) -> float | None:
    """None where it is none, or has no end."""
    try:
        number = math.nan if found is None else float(found[1])
    except ValueError:
        return None
    return number if math.isfinite(number) else None
