"""From what `zerofold bench activation` measured to its figures: pure functions, and the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerofold.bench.activation_worker import WAYS, Fitting, Long, Turn

STEP, CLOSE = 1.1, 0.05
"""The most that a step with checkpoints on the host may take over one with them on the device, and how far off bytes
may be that were told before."""


@dataclass(frozen=True, kw_only=True)
class WayRow:
    """One way at a length where all fit."""

    way: str
    peak_bytes: int
    predicted_bytes: int
    kept_bytes: int | None
    step_s: float | None
    over_device: float | None
    """Median over rounds of its step over the one with checkpoints on the device, in the same round."""
    loss: float

    @property
    def off(self) -> float:
        return self.predicted_bytes / self.peak_bytes - 1


@dataclass(frozen=True)
class Told:
    """Bytes that were told before, and those that were measured."""

    what: str
    told: float
    measured: float
    is_asked: bool = True
    """False: shown beside, and may be far off."""

    @property
    def off(self) -> float:
        return self.told / self.measured - 1 if self.measured else float("inf")

    @property
    def ok(self) -> bool:
        return not self.is_asked or abs(self.off) <= CLOSE


@dataclass(frozen=True, kw_only=True)
class LongRows:
    """At a length whose checkpoints do not fit the device."""

    length: int | None
    batch: int
    ways: Mapping[str, Long] = field(default_factory=dict)
    error: str | None = None

    @property
    def ok(self) -> bool:
        """It runs out of memory wherever checkpoints are on the device, and trains where they are on the host."""
        host = self.ways.get("host")
        if host is None or host.ran_out or not host.losses:
            return False
        others = [long for name, long in self.ways.items() if name != "host"]
        return bool(others) and all(long.ran_out for long in others) and host.losses[-1] < host.losses[0]


def way_rows(fitting: Fitting, predicted: Mapping[str, int]) -> list[WayRow]:
    rows = []
    for way in WAYS:
        turns = [turn for turn in fitting.turns if turn.way == way]
        seconds = [second for turn in turns for second in turn.seconds or ()]
        rows.append(
            WayRow(
                way=way,
                peak_bytes=max(turn.peak_bytes for turn in turns),
                predicted_bytes=predicted[way],
                kept_bytes=turns[0].kept_bytes,
                step_s=statistics.median(seconds) if seconds else None,
                over_device=_over(turns, [turn for turn in fitting.turns if turn.way == "device"]),
                loss=turns[-1].loss,
            )
        )
    return rows


def _over(turns: Sequence[Turn], reference: Sequence[Turn]) -> float | None:
    ratios = [
        statistics.median(mine.seconds) / statistics.median(its.seconds)
        for mine, its in zip(turns, reference, strict=True)
        if mine.seconds and its.seconds
    ]
    return statistics.median(ratios) if ratios else None


def kept_by_allocator(fitting: Fitting) -> int | None:
    """Bytes of all checkpoints: what a forward leaves on the device with them there, less what it leaves with them on
    the host, and the few that are on the device all the same.
    """
    last = {turn.way: turn for turn in fitting.turns}
    device, host = last["device"], last["host"]
    if device.after_forward_bytes is None or host.after_forward_bytes is None:
        return None
    return device.after_forward_bytes - host.after_forward_bytes + host.on_device_bytes


def is_ok(rows: Sequence[WayRow], told: Sequence[Told], long: LongRows | None) -> bool:
    """On a GPU all that was asked for; on the CPU, which has no clock for it and no end of memory, the bytes."""
    host = next(row for row in rows if row.way == "host")
    in_time = host.over_device is None or host.over_device <= STEP
    return in_time and all(each.ok for each in told) and (long is None or long.ok)


def as_json(rows: Sequence[WayRow], told: Sequence[Told], long: LongRows | None) -> dict[str, Any]:
    return {
        "ways": [{**asdict(row), "off": row.off} for row in rows],
        "bytes": [{**asdict(each), "off": each.off, "ok": each.ok} for each in told],
        "long": None if long is None else {**asdict(long), "ok": long.ok},
        "ok": is_ok(rows, told, long),
    }


def print_tables(console: Console, title: str, rows: Sequence[WayRow], told: Sequence[Told], long: LongRows) -> None:
    on_gpu = any(row.step_s is not None for row in rows)
    unit, name = (2**30, "GiB") if on_gpu else (2**20, "MiB")
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("\ncheckpoints", no_wrap=True)
    for heading in (f"peak\n{name}", f"plan\n{name}", "\noff", f"kept\n{name}", "\ns/step", "over\ndevice", "\nloss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            _SHOWN[row.way],
            f"{row.peak_bytes / unit:.2f}",
            f"{row.predicted_bytes / unit:.2f}",
            f"{row.off:+.1%}",
            "" if row.kept_bytes is None else f"{row.kept_bytes / unit:.2f}",
            "n/a" if row.step_s is None else f"{row.step_s:.3f}",
            "n/a" if row.over_device is None else f"{row.over_device:.3f}",
            f"{row.loss:.3f}",
        )
    console.print(table)
    table = Table(title="bytes told before", title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("what")
    for heading in ("told", "measured", "off"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in told:
        style = None if each.ok else "red"
        table.add_row(
            each.what, f"{each.told / unit:.2f}", f"{each.measured / unit:.2f}", f"{each.off:+.1%}", style=style
        )
    console.print(table)
    _print_long(console, long)


def _print_long(console: Console, long: LongRows) -> None:
    if long.error is not None:
        console.print(f"[red]a longer sequence[/red]  {escape(long.error)}", soft_wrap=True)
    if long.length is None:
        return
    console.print(f"{long.batch} sequences of {long.length} tokens", soft_wrap=True)
    for way, found in long.ways.items():
        if found.ran_out:
            console.print(f"  {_SHOWN[way]}: out of memory", soft_wrap=True)
            continue
        losses = ", ".join(f"{loss:.3f}" for loss in found.losses)
        peak = "n/a" if found.peak_bytes is None else f"{found.peak_bytes / 2**30:.1f} GiB"
        seconds = min(found.seconds)
        console.print(
            f"  {_SHOWN[way]}: trains, losses {losses}; peak {peak}, {found.host_bytes / 2**30:.2f} GiB on the host, "
            f"{seconds:.2f} s a step",
            soft_wrap=True,
        )


_SHOWN = {
    "logits": "device, whole logits",
    "device": "device",
    "contiguous": "device, contiguous",
    "host": "host",
}
