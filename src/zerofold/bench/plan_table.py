"""The table of `zerofold bench plan`, and how far off its numbers may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerofold.bench.plan_predicted import Compared

WORST, MEDIAN = 0.05, 0.02
"""Of peaks: as far as any may be off, and the median of all."""
TIME = 0.15
"""Of step times, any."""


def print_table(console: Console, results: Sequence[Compared], summary: dict[str, Any]) -> None:
    on_gpu = any(result.predicted_bytes > 2**30 for result in results)
    unit, name = (2**30, "GiB") if on_gpu else (2**20, "MiB")
    table = Table(title="the plan against runs", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    headings = (f"plan\n{name}", f"run\n{name}", "\noff", "plan\nms", "run\nms", "\noff")  # fits 80 columns
    for heading in ("\nmodel", "\nranks", "\nrow", "\nbatch", "recom-\nputed"):
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        run = result.run
        peaks, times = ("", ""), ("", "", "")
        if result.measured_bytes is not None and result.off is not None:
            peaks = (f"{result.measured_bytes / unit:.2f}", f"{result.off:+.2%}")
        if result.predicted_s is not None and result.measured_s is not None and result.time_off is not None:
            times = (f"{1e3 * result.predicted_s:.1f}", f"{1e3 * result.measured_s:.1f}", f"{result.time_off:+.1%}")
        table.add_row(
            result.model,
            str(run.world),
            str(run.stage),
            str(run.batch),
            "yes" if run.checkpointing else "no",
            f"{result.predicted_bytes / unit:.2f}",
            *peaks,
            *times,
            style="red" if abs(result.off or 0) > WORST or abs(result.time_off or 0) > TIME else None,
        )
    console.print(table)
    if summary["median"] is not None:
        console.print(
            f"{len(results)} runs; peaks off by {summary['median']:.2%} in the median (at most {MEDIAN:.0%}), "
            f"{summary['worst']:.2%} at worst (at most {WORST:.0%})",
            soft_wrap=True,
        )
    if summary["time_median"] is not None:
        console.print(
            f"step times off by {summary['time_median']:.1%} in the median, {summary['time_worst']:.1%} at worst "
            f"(at most {TIME:.0%})",
            soft_wrap=True,
        )
    for model, error in summary["errors"].items():
        console.print(f"[red]{model}[/red]  {escape(error)}", soft_wrap=True)
