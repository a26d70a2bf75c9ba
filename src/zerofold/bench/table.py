"""The result of a bench: one row per engine, as JSON or as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One line of the result. Times and ratios are None where the engine failed."""

    engine: str
    over_ddp: float | None = None
    over_ddp_min: float | None = None
    over_ddp_max: float | None = None
    over_none: float | None = None
    step_ms: float | None = None
    peak_mib: float | None = None
    peak_over_start_mib: float | None = None
    device_peak_mib: float | None = None
    loss: float | None = None
    loss_diff_ddp: float | None = None
    error: str | None = None


def print_table(console: Console, rows: Sequence[Row], title: str) -> None:
    """Ratios first, in 80 columns; what failed is listed below, where a long reason has room."""
    on_device = any(row.device_peak_mib is not None for row in rows)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("\nengine", no_wrap=True)
    memory = ("GPU\nMiB", "host\nMiB") if on_device else ("peak\nMiB", "over\nstart")
    for heading in ("over\nddp", "\nmin-max", "over\nnone", "step\nms", *memory, "\nloss", "off\nddp"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        peaks = (row.device_peak_mib, row.peak_mib) if on_device else (row.peak_mib, row.peak_over_start_mib)
        table.add_row(
            row.engine,
            _cell(row.over_ddp, ".3f"),
            "" if row.over_ddp is None else f"{row.over_ddp_min:.2f}-{row.over_ddp_max:.2f}",
            _cell(row.over_none, ".3f"),
            _cell(row.step_ms, ".1f"),
            *(_cell(peak, ".0f") for peak in peaks),
            _cell(row.loss, ".4f"),
            _cell(row.loss_diff_ddp, ".0e"),
            style="red" if row.error else None,
        )
    console.print(table)
    for row in rows:
        if row.error:
            console.print(f"[red]{row.engine}[/red]  {escape(row.error)}")


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
