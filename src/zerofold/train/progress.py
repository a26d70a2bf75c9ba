"""What a person sees of a run: a progress bar or plain lines."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

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
    step_seconds: float | None = None
    """Of the mean step since the last line; evaluations and checkpoints are no part of one. Measured, as what follows,
    by `zf.Run`."""
    mfu: float | None = None
    time: dict[str, float] = field(default_factory=dict)
    """Of that step, by what it was spent on."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """By memory, since the start."""

    @property
    def seconds_left(self) -> float | None:
        return self.seconds / self.progress * (1 - self.progress) if self.progress else None


class Reporter:
    """Shows each status; only rank 0 has one."""

    def __init__(self, *, plain: bool, steps: int | None, output: TextIO | None = None) -> None:
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

    def say(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def show(self, status: Status) -> None:
        if self._bar is not None:
            self._bar.update(status.progress, _learning(status, self._steps), _resources(status))
        elif status.progress >= 1 or time.monotonic() - self._last_line >= PLAIN_LINE_EVERY_S:
            self._last_line = time.monotonic()
            left = "" if status.seconds_left is None else f", {timedelta(seconds=round(status.seconds_left))} left"
            self.say(f"{_learning(status, self._steps)}{left}, {_resources(status)}")

    def end_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class _Bar:
    """A bar with two lines under it, redrawn in place."""

    def __init__(self, console: Console) -> None:
        columns = TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        self._progress = Progress(BarColumn(bar_width=None), *columns, expand=True)
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
    utilised = "" if status.mfu is None else f", MFU {status.mfu:.1%}"
    return f"step {status.step}{of}, loss {status.loss:.3f}{validation}{skipped}, {speed}{utilised}"


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
