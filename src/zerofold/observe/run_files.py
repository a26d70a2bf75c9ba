"""The files of a run folder, each of them whole at any moment: who reads one while it is written finds the old one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
LEDGER_FILE = "ledger.json"
TIMELINE_FILE = "timeline.json"
CONFIG_FILE = "config.json"


class RunFiles:
    """Keeps the lines of metrics.jsonl up to step `after`: a run that goes on from there takes the others again.

    >>> import tempfile
    >>> files = RunFiles(Path(tempfile.mkdtemp()))
    >>> files.line({"step": 1, "loss": 2.0}); files.close()
    >>> print((files.folder / "metrics.jsonl").read_text(), end="")
    {"step": 1, "loss": 2.0}
    """

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        kept = _lines_until(folder / METRICS_FILE, after)
        _write(folder / METRICS_FILE, "".join(kept))
        self._last: dict[str, Any] = json.loads(kept[-1]) if kept else {}
        self._metrics = (folder / METRICS_FILE).open("a")

    def last_number(self, name: str) -> float:
        """Of the last line that was kept, for a run that goes on; 0 where there is none."""
        found = self._last.get(name)
        return found if isinstance(found, int | float) and math.isfinite(found) else 0.0

    def line(self, values: dict[str, Any]) -> None:
        path = self.folder / METRICS_FILE
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(self._metrics.fileno())):
            raise FileNotFoundError(f"{path} is gone: removed, or another run writes into this folder")
        # Flushed, so that a run that is stopped or killed keeps what it had shown.
        self._metrics.write(json.dumps(values, default=str) + "\n")
        self._metrics.flush()

    def config(self, config: dict[str, Any]) -> None:
        _write(self.folder / CONFIG_FILE, json.dumps(config, indent=2, default=str) + "\n")

    def ledger(self, book: dict[str, Any]) -> None:
        _write(self.folder / LEDGER_FILE, json.dumps(book, indent=1) + "\n")

    def timeline(self, events: dict[str, Any]) -> None:
        _write(self.folder / TIMELINE_FILE, json.dumps(events) + "\n")

    def close(self) -> None:
        self._metrics.close()


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a run that is killed here must find the old one when it goes on."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)


def _lines_until(path: Path, step: int) -> list[str]:
    """Lines of steps that are not taken again. The last one may have been cut off, if the run was killed."""
    kept = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() and step else []:
        try:
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    return kept
