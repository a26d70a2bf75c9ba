"""What a person and a program see of a run: a progress bar or plain lines, and metrics as JSON lines."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn
from rich.text import Text

from zerofold.train.options import CONFIG_FILE, METRICS_FILE

PLAIN_LINE_EVERY_S = 5.0
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Status:
    """Where a run stands after a step. One line of metrics.jsonl each."""

    step: int
    progress: float
    seconds: float
    loss: float
    """Mean over all ranks, and over the steps since the last line."""
    validation_loss: float | None
    """The latest one."""
    lr: float
    tokens: int
    """Read so far, by all ranks."""
    tokens_per_second: float
    state_bytes: dict[str, int]
    """On rank 0."""
    comm_bytes: dict[str, int]
    """Sent by rank 0 since the start, by operation."""
    skipped_steps: int = 0
    """For gradients that were infinite or NaN."""


class Reporter:
    """Shows each status and writes it down, after those up to step `after`; only rank 0 has one."""

    def __init__(
        self, folder: Path, *, plain: bool, steps: int | None, after: int = 0, output: TextIO | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        kept = _lines_until(folder / METRICS_FILE, after)
        _write(folder / METRICS_FILE, "".join(kept))
        self._metrics = (folder / METRICS_FILE).open("a")
        self._folder = folder
        self._steps = steps
        self._console = Console(file=output or sys.stdout, markup=False, highlight=False)
        self._bar = None if plain or not self._console.is_terminal else _Bar(self._console)
        self._last_line = -PLAIN_LINE_EVERY_S

    def __enter__(self) -> Reporter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_bar()
        self._metrics.close()

    def config(self, config: dict[str, Any]) -> None:
        _write(self._folder / CONFIG_FILE, json.dumps(config, indent=2, default=str) + "\n")

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def show(self, status: Status) -> None:
        # Flushed, so that a run that is stopped or killed keeps what it had shown.
        self._metrics.write(json.dumps(asdict(status)) + "\n")
        self._metrics.flush()
        if self._bar is not None:
            self._bar.update(status.progress, _learning(status, self._steps), _resources(status))
        elif status.progress >= 1 or time.monotonic() - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.say(f"{_learning(status, self._steps)}, {_resources(status)}")

    def end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def _write(path: Path, text: str) -> None:
    """All of it or nothing: a run that is killed here must find the old one when it goes on."""
    new = path.with_name(f".{path.name}")
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


class _Bar:
    """A bar with two lines under it, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(BarColumn(bar_width=None), TaskProgressColumn(), TimeElapsedColumn(), expand=True)
        self._task = self._progress.add_task("train", total=1.0)
        self._live = Live(self._progress, console=console, refresh_per_second=4)
        self._live.start()

    def update(self, progress: float, *lines: str) -> None:
        self._progress.update(self._task, completed=progress)
        self._live.update(Group(self._progress, *(Text(line, overflow="ellipsis") for line in lines)))

    def stop(self) -> None:
        self._live.stop()


def _learning(status: Status, steps: int | None) -> str:
    of = f"/{steps}" if steps else ""
    validation = "" if status.validation_loss is None else f", val {status.validation_loss:.3f}"
    speed = f"{status.tokens_per_second:,.0f} tokens/s"
    skipped = f", {status.skipped_steps} skipped" if status.skipped_steps else ""
    return f"step {status.step}{of}, loss {status.loss:.3f}{validation}{skipped}, {speed}"


def _resources(status: Status) -> str:
    states = ", ".join(f"{name} {size / MIB:.1f}" for name, size in status.state_bytes.items())
    return f"MiB per rank: {states}; sent {readable_bytes(sum(status.comm_bytes.values()))}"


def readable_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def printable(text: bytes) -> str:
    """Model output for a terminal: no control character may reach it."""
    shown = text.decode("utf-8", "replace").expandtabs(4)
    return "".join(char if char.isprintable() or char == "\n" else "·" for char in shown)
