"""What a run folder holds, read with care: a run may have been killed, may be an old one, may hold any text."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

CONFIG, METRICS, LEDGER, TIMELINE = "config.json", "metrics.jsonl", "ledger.json", "timeline.json"

_HOW_TO_GET = {
    CONFIG: "`zerofold train` writes it at the start of a run, and zf.Run in a loop of your own does not",
    LEDGER: "`zerofold train` writes it with the lines of metrics.jsonl",
    TIMELINE: "`zerofold train` writes it when a run ends; one that was killed has none until it goes on with --resume",
}


T = TypeVar("T")


class NoRunError(ValueError):
    """The folder is not one that a run wrote."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    name: str
    config: dict[str, Any]
    metrics: list[dict[str, Any]]
    """In the order of steps, unreadable lines left out."""
    ledger: dict[str, Any] | None
    timeline: list[dict[str, Any]] | None
    """The events."""
    missing: list[str]
    """Sentences: which file is not there or not readable, and how to get it."""


def read_run(folder: Path) -> RunFiles:
    """All that the folder has. Only one without metrics is refused: there would be nothing to show.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     written = Path(name, "metrics.jsonl").write_text('{"step": 1, "loss": NaN}\\n{"step": 2, "lo')
    ...     run = read_run(Path(name))
    >>> [line["step"] for line in run.metrics], run.ledger, run.missing[1].split(":")[0]
    ([1], None, 'ledger.json is missing')
    """
    if not folder.is_dir():
        raise NoRunError(f"{folder} is not a folder: name the one that `zerofold train --out` wrote")
    try:
        text = (folder / METRICS).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        reason = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise NoRunError(f"{folder / METRICS} {reason}: name a folder that `zerofold train --out` wrote") from error
    missing: list[str] = []
    ledger = _read(folder / LEDGER, _as_object, missing)
    timeline = _read(folder / TIMELINE, _as_events, missing)
    config = _read(folder / CONFIG, _as_object, missing)
    if config is None:  # what the page is about comes first
        missing.insert(0, missing.pop())
    return RunFiles(
        name=folder.resolve().name,
        config=config or {},
        metrics=list(_metrics(text.splitlines())),
        ledger=ledger,
        timeline=timeline,
        missing=missing,
    )


def number(value: object) -> float | None:
    """A finite number as it is; anything else, infinities and NaN among them, is None.

    >>> number(3), number(2.5), number(float("nan")), number("7"), number(True)
    (3, 2.5, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if math.isfinite(value) else None


def numbers_in(value: object) -> dict[str, float]:
    """Those entries of an object that are numbers.

    >>> numbers_in({"compute": 0.5, "mfu": None, 3: 4}), numbers_in([1])
    ({'compute': 0.5, '3': 4}, {})
    """
    if not isinstance(value, dict):
        return {}
    read = {str(key): number(each) for key, each in value.items()}
    return {key: each for key, each in read.items() if each is not None}


def objects_in(value: object) -> list[dict[str, Any]]:
    """Those entries of a list that are objects."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def text_of(value: object) -> str:
    return "" if value is None else str(value)


def _metrics(lines: Iterable[str]) -> Iterable[dict[str, Any]]:
    for line in lines:
        try:
            read = json.loads(line)
        except ValueError:  # the half line of a run that was killed
            continue
        if isinstance(read, dict) and number(read.get("step")) is not None:
            yield read


def _read(path: Path, shape: Callable[[Any], T], missing: list[str]) -> T | None:
    try:
        return shape(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        missing.append(f"{path.name} is missing: {_HOW_TO_GET[path.name]}.")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        missing.append(f"{path.name} cannot be read ({reason}): {_HOW_TO_GET[path.name]}.")
    return None


def _as_object(read: Any) -> dict[str, Any]:
    if not isinstance(read, dict):
        raise ValueError("it holds no JSON object")
    return read


def _as_events(read: Any) -> list[dict[str, Any]]:
    events = read.get("traceEvents") if isinstance(read, dict) else read  # Chrome reads both forms
    if not isinstance(events, list):
        raise ValueError("it holds no traceEvents")
    return objects_in(events)
