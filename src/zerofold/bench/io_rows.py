"""The result of `zerofold bench io`: one row per rate, as JSON or as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


@dataclass(frozen=True)
class Rate:
    """Bytes moved a second, read and written together where both happen."""

    part: str
    name: str
    gb_per_s: float
    share: float | None = None
    """Of the ceiling named in `ceiling`, the name of another row of the same part."""
    ceiling: str | None = None
    note: str = ""


def with_shares(rates: Sequence[Rate], ceiling: Rate) -> list[Rate]:
    """The same rates, each with its share of one of them."""
    return [
        Rate(rate.part, rate.name, rate.gb_per_s, rate.gb_per_s / ceiling.gb_per_s, ceiling.name, rate.note)
        for rate in rates
    ]


def print_rates(console: Console, rates: Sequence[Rate], skipped: Mapping[str, str], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("part", no_wrap=True)
    table.add_column("what", no_wrap=True)
    for heading in ("GB/s", "share"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    table.add_column("")
    last = None
    for rate in rates:
        table.add_row(
            "" if rate.part == last else rate.part,
            rate.name,
            f"{rate.gb_per_s:.1f}" if rate.gb_per_s >= 10 else f"{rate.gb_per_s:.2f}",
            "" if rate.share is None else f"{rate.share:.0%}",
            rate.ceiling or "",
            escape(rate.note),
        )
        last = rate.part
    console.print(table)
    for part, reason in skipped.items():
        console.print(f"{part}: {escape(reason)}")
