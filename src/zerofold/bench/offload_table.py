"""The rows of `zerofold bench offload` on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerofold.bench.offload_engines import OFFLOAD_ENGINES
from zerofold.bench.offload_rows import OffloadRow
from zerofold.placement import Tier

TIMES = ("\ns/step", "\nmedian", "over\nplain", "tokens\n/s", "start\ns", "clip\nbinds", "first\nloss", "last\nloss")
MEMORY = ("GPU\npeak", "over\nactiv.", "re-\nserved", "host\npeak", "at the\nstart", "host B\n/param", "\ndisk")


def print_tables(console: Console, rows: Sequence[OffloadRow], title: str) -> None:
    """Times, then memory; below, what only some engines have: traffic of the disk, tiers, errors."""
    times = _table(title, TIMES)
    memory = _table("memory in GiB", MEMORY)
    for row in rows:
        style = "red" if row.error else None
        times.add_row(
            row.engine,
            _cell(row.step_s, ".3f"),
            _cell(row.median_s, ".3f"),
            _cell(row.over_plain, ".2f"),
            _cell(row.tokens_per_s, ".0f"),
            _cell(row.start_s, ".1f"),
            _cell(row.bind_rate, ".0%"),
            _cell(row.losses[0] if row.losses else None, ".3f"),
            _cell(row.losses[-1] if row.losses else None, ".3f"),
            style=style,
        )
        memory.add_row(
            row.engine,
            _cell(row.device_peak_gib, ".1f"),
            _cell(row.device_over_activations_gib, ".1f"),
            _cell(row.device_reserved_gib, ".1f"),
            _cell(row.host_peak_gib, ".1f"),
            _cell(row.host_start_gib, ".1f"),
            _cell(row.host_bytes_per_parameter, ".1f"),
            _cell(row.disk_file_gib or None, ".1f"),
            style=style,
        )
    console.print(times, memory)
    for row in rows:
        for line in details(row):
            console.print(f"{row.engine}  {escape(line)}", soft_wrap=True)
        if row.error:
            console.print(f"[red]{row.engine}[/red]  {escape(row.error)}", soft_wrap=True)


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))  # fits 80 columns
    table.add_column("\nengine", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def details(row: OffloadRow) -> list[str]:
    """What one row has to tell beside its figures in the table."""
    is_large = OFFLOAD_ENGINES[row.engine.partition("@")[0]].is_large
    lines = [row.model] if is_large else []
    if row.disk_read_per_parameter is not None:
        lines.append(
            f"disk: {row.disk_read_per_parameter:.1f} bytes read and {row.disk_written_per_parameter:.1f} written per "
            f"parameter and step, {row.disk_gb_per_s:.2f} GB/s over the whole step, {row.disk_file_gib:.2f} GiB held"
        )
    if row.disk_update_gb_per_s and row.disk_raw_gb_per_s and row.disk_turns:
        lines.append(
            f"disk: {row.disk_update_gb_per_s:.2f} GB/s over an update, "
            f"{row.disk_update_gb_per_s / row.disk_raw_gb_per_s:.0%} of the {row.disk_raw_gb_per_s:.2f} GB/s that it "
            f"does alone, half read and half written in the faster order; medians of {len(row.disk_turns)} turns"
        )
    for tier, both in (row.tiers or {}).items():
        predicted, measured = both["predicted_gib"], both["measured_gib"]
        if tier == Tier.DEVICE.value and not is_large:  # of which activations and room to be faster are most
            lines.append(
                f"{tier}: {predicted:.2f} GiB predicted for states and the update, {measured:.2f} GiB at the peak"
            )
            continue
        over = f" ({measured / predicted - 1:+.1%})" if predicted else ""
        lines.append(f"{tier}: {predicted:.2f} GiB predicted, {measured:.2f} GiB measured{over}")
    update = (row.books or {}).get("offload", {}).get("update")
    if update:
        lines.append("update: " + ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in update.items()))
    return lines


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
