"""The events of some steps, small enough for a page: when each unit was gathered, computed, reduced and updated."""

from __future__ import annotations

import math
from typing import Any

from zerofold.observe.report_files import number, numbers_in, text_of

KINDS = ("gather", "forward", "backward", "reduce", "update", "host", "disk", "wait", "other")
_EVENTS_SHOWN = 6000
_MEMORY_POINTS_SHOWN = 2000


def timeline_of(events: list[dict[str, Any]], states: tuple[str, ...]) -> dict[str, Any]:
    """One process's spans and memory, in microseconds from the first span shown; of too many, the last ones.

    >>> span = {"ph": "X", "name": "g", "cat": "gather", "ts": 5, "dur": 2, "pid": 0, "args": {"unit": "block.0"}}
    >>> found = timeline_of([span], ("parameters",))
    >>> found["names"], found["spans"]
    (['block.0'], [{'kind': 'gather', 'name': 0, 'start': 0, 'length': 2, 'bytes': None}])
    """
    # Pages compare rows with rows of the same clock: of several processes the first one is shown.
    process = min((text_of(each.get("pid")) for each in events if each.get("ph") == "X"), default="")
    own = [each for each in events if text_of(each.get("pid")) == process]
    spans = sorted((each for each in own if each.get("ph") == "X" and _timed(each)), key=lambda each: each["ts"])
    shown = spans[-_EVENTS_SHOWN:]
    begin = shown[0]["ts"] if shown else 0
    end = max((each["ts"] + each["dur"] for each in shown), default=0)
    names: dict[str, int] = {}
    return {
        "process": process,
        "steps": _steps(own),
        "left_out": len(spans) - len(shown),
        "length": _rounded(end - begin),
        "spans": [_span(each, begin, names) for each in shown],
        "names": list(names),  # filled by the line above
        "memory": _memory(own, states, begin, end if shown else math.inf),
    }


def _steps(events: list[dict[str, Any]]) -> list[float]:
    """Which ones of the recording are shown, where the file says so."""
    named = next((each.get("args") for each in events if each.get("ph") == "M" and each.get("name") == "steps"), None)
    listed = named.get("steps") if isinstance(named, dict) else None
    found = [number(each) for each in listed] if isinstance(listed, list) else []
    return [each for each in found if each is not None]


def _timed(event: dict[str, Any]) -> bool:
    start, length = number(event.get("ts")), number(event.get("dur"))
    return start is not None and length is not None and length >= 0


def _span(event: dict[str, Any], begin: float, names: dict[str, int]) -> dict[str, Any]:
    arguments = event.get("args") if isinstance(event.get("args"), dict) else {}
    assert isinstance(arguments, dict)
    kind = text_of(event.get("cat"))
    unit = arguments.get("unit")
    name = text_of(event.get("name") if unit is None else unit)
    return {
        "kind": kind if kind in KINDS else "other",
        "name": names.setdefault(name, len(names)),
        "start": _rounded(event["ts"] - begin),
        "length": _rounded(event["dur"]),
        "bytes": number(arguments.get("bytes")),
    }


def _memory(events: list[dict[str, Any]], states: tuple[str, ...], begin: float, end: float) -> dict[str, Any]:
    """Bytes by state whenever they changed. Of too many points each bucket keeps its highest, so the peak is true."""
    counted = [
        (each["ts"], numbers_in(each.get("args")))
        for each in events
        if each.get("ph") == "C" and each.get("name") == "memory" and number(each.get("ts")) is not None
    ]
    counted = sorted(((at, sizes) for at, sizes in counted if at <= end), key=lambda point: point[0])
    before = [sizes for at, sizes in counted if at < begin][-1:]  # what was held when the first span began
    counted = [(begin, sizes) for sizes in before] + [point for point in counted if point[0] >= begin]
    size = max(1, math.ceil(len(counted) / _MEMORY_POINTS_SHOWN))
    kept = [
        max(counted[start : start + size], key=lambda point: sum(point[1].values()))
        for start in range(0, len(counted), size)
    ]
    known = {name for _, sizes in kept for name in sizes}
    shown = [name for name in states if name in known] + sorted(known - set(states))
    return {
        "at": [_rounded(at - begin) for at, _ in kept],
        "bytes": {name: [sizes.get(name, 0) for _, sizes in kept] for name in shown},
    }


def _rounded(microseconds: float) -> float:
    return microseconds if isinstance(microseconds, int) else round(microseconds, 1)
