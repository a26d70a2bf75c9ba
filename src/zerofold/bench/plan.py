"""`zerofold bench plan`: what the plan predicts against what runs take, on models that nothing was fitted to.

Rank 0 of 8 trains beside torch's fake process group, which answers at once: the values that arrive are wrong and the
sizes are right. A rank alone is timed as well.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerofold.bench.machine import check_folder_of, choose_device, describe_software, parse_stages
from zerofold.bench.plan_models import NAMES, plan_model
from zerofold.bench.plan_predicted import Compared, Failed, Rates, Run, peak_bytes, step_seconds
from zerofold.bench.plan_worker import Measured, PlanTask, Spent, measure_model, trace_models
from zerofold.bench.streams import Stream, StreamFailed
from zerofold.plan.shape import ModelShape

WORST, MEDIAN = 0.05, 0.02
"""Of peaks: as far as any may be off, and the median of all."""
TIME = 0.15
"""Of step times, which are measured on a GPU alone."""
BATCHES = {"cuda": (2, 8), "cpu": (2, 4)}
PRECISION = {"cuda": "bf16", "cpu": "fp32"}


def all_runs(stages: Sequence[int], world: int, batches: Sequence[int], *, alone: bool) -> tuple[Run, ...]:
    rows = [(world, stage) for stage in stages] + ([(1, 0)] if alone else [])
    return tuple(
        Run(stage=stage, world=ranks, batch=batch, checkpointing=checkpointing)
        for ranks, stage in rows
        for batch in batches
        for checkpointing in (False, True)
    )


def compare_models(names: Sequence[str], device: str, runs: tuple[Run, ...]) -> Iterator[Compared | Spent | Failed]:
    """One model after the other has the device to itself. Beside it another process traces, and the next one starts.

    tracer    imports | gpt | llama | t5 | vit | mixtral |
    gpt       imports | runs            |
    llama             | imports, waits  | runs            |
    t5                                  | imports, waits  | …
    """
    tasks = [PlanTask(model=name, device=device, precision=PRECISION[device], runs=runs) for name in names]
    with Stream(trace_models, names, device, PRECISION[device]) as tracer, ExitStack() as all_processes:
        tracer.begin()
        shapes = iter(tracer)
        measuring = all_processes.enter_context(Stream(measure_model, tasks[0]))
        for task, after in zip_longest(tasks, tasks[1:]):
            measuring.begin()
            following = all_processes.enter_context(Stream(measure_model, after)) if after else measuring
            try:
                yield from _compare_model(task, measuring, next(shapes))
            except StreamFailed as error:
                yield Failed(task.model, str(error))
            measuring.end()  # before the next one begins: its memory must be gone
            measuring = following


def _compare_model(
    task: PlanTask, measuring: Iterable[Rates | Measured | Spent], shape: ModelShape | Failed
) -> Iterator[Compared | Spent | Failed]:
    if isinstance(shape, Failed):
        yield shape
        return
    rates: Rates | None = None
    for news in measuring:
        if isinstance(news, Rates):
            rates = news
        elif isinstance(news, Spent):
            yield news
        else:
            predicted = None
            if news.step_s is not None and rates is not None:
                predicted = step_seconds(shape, news.run, task.precision, task.device, rates)
            yield Compared(
                model=task.model,
                parameters=shape.parameters,
                run=news.run,
                predicted_bytes=peak_bytes(shape, news.run, task.precision, task.device),
                measured_bytes=news.peak_bytes,
                predicted_s=predicted,
                measured_s=news.step_s,
            )


def summarise(
    results: Sequence[Compared],
    errors: dict[str, str],
    device: str,
    spent: dict[str, dict[str, float]] | None = None,
) -> dict[str, Any]:
    """The JSON object; `ok` is False where a run is missing or too far off. `spent`: what the bench itself took."""
    off = [abs(result.off) for result in results]
    time_off = [abs(result.time_off) for result in results if result.time_off is not None]
    is_close = bool(off) and max(off) <= WORST and statistics.median(off) <= MEDIAN
    is_in_time = all(value <= TIME for value in time_off)
    return {
        "machine": describe_software(device),
        "precision": PRECISION[device],
        "runs": [{**asdict(result), "off": result.off, "time_off": result.time_off} for result in results],
        "worst": max(off, default=None),
        "median": statistics.median(off) if off else None,
        "time_worst": max(time_off, default=None),
        "time_median": statistics.median(time_off) if time_off else None,
        "spent_s": spent or {},
        "errors": errors,
        "ok": is_close and is_in_time and not errors,
    }


def print_table(console: Console, results: Sequence[Compared], summary: dict[str, Any]) -> None:
    on_gpu = any(result.measured_bytes > 2**30 for result in results)
    unit, name = (2**30, "GiB") if on_gpu else (2**20, "MiB")
    table = Table(title="the plan against runs", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    headings = (f"predicted\n{name}", f"measured\n{name}", "\noff", "predicted\nms", "measured\nms", "\noff")
    for heading in ("\nmodel", "\nranks", "\nrow", "\nbatch", "recom-\nputed"):
        table.add_column(heading, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        run = result.run
        times = ("", "", "")
        if result.predicted_s is not None and result.measured_s is not None and result.time_off is not None:
            times = (f"{1e3 * result.predicted_s:.1f}", f"{1e3 * result.measured_s:.1f}", f"{result.time_off:+.1%}")
        table.add_row(
            result.model,
            str(run.world),
            str(run.stage),
            str(run.batch),
            "yes" if run.checkpointing else "no",
            f"{result.predicted_bytes / unit:.2f}",
            f"{result.measured_bytes / unit:.2f}",
            f"{result.off:+.2%}",
            *times,
            style="red" if abs(result.off) > WORST else None,
        )
    console.print(table)
    if results:
        console.print(
            f"{len(results)} runs; peaks off by {summary['median']:.2%} in the median (at most {MEDIAN:.0%}), "
            f"{summary['worst']:.2%} at worst (at most {WORST:.0%})",
            soft_wrap=True,
        )
    if summary["time_median"] is not None:
        console.print(
            f"step times off by {summary['time_median']:.1%} in the median, {summary['time_worst']:.1%} at worst",
            soft_wrap=True,
        )
    for model, error in summary["errors"].items():
        console.print(f"[red]{model}[/red]  {escape(error)}", soft_wrap=True)


def bench_plan_command(
    only: Annotated[str, typer.Option(help="Models, with commas; all five if left out.")] = ",".join(NAMES),
    stages: Annotated[str, typer.Option(help="Rows, with commas.")] = "0,1,2,3",
    world: Annotated[int, typer.Option(min=2, help="Ranks of the fake world, of which rank 0 is real.")] = 8,
    batches: Annotated[str, typer.Option(help="Samples in a step, with commas; 2,8 on a GPU, 2,4 on the CPU.")] = "",
    alone: Annotated[bool, typer.Option(help="A rank alone as well; on a GPU it is timed.")] = True,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file, after every run.")] = None,
) -> None:
    """Compare predicted with measured peaks and step times, over models, rows, batches and checkpointing.

    Each model runs in a process of its own: large on a GPU in bf16, where the allocator counts; tiny on the CPU in
    fp32, where torch's profiler does. The exit code is 1 when a peak is off by over 5%, the median of all by over 2%,
    or a step time by over 15%.

    \b
    Examples:
      zerofold bench plan
      zerofold bench plan --only gpt,llama --stages 3 --json
    """
    try:
        chosen = parse_stages(stages)
        device = choose_device(device)
        names = [name.strip() for name in only.split(",") if name.strip()]
        if not names:
            raise ValueError(f"--only names no model; the models are {', '.join(NAMES)}")
        for name in names:
            plan_model(name, device)
        samples = _parse_batches(batches) or BATCHES[device]
        check_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    runs = all_runs(chosen, world, samples, alone=alone)
    results: list[Compared] = []
    errors: dict[str, str] = {}
    spent: dict[str, dict[str, float]] = {}
    summary: dict[str, Any] = {}
    with Console(stderr=True).status("starting") as status:
        for news in compare_models(names, device, runs):
            if isinstance(news, Compared):
                results.append(news)
                status.update(f"{news.model}: {sum(each.model == news.model for each in results)} of {len(runs)} runs")
            elif isinstance(news, Spent):
                spent[news.model] = news.seconds
            else:
                errors[news.model] = news.message
            summary = summarise(results, errors, device, spent)
            if out is not None:
                _write_whole(out, json.dumps(summary, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        print_table(Console(), results, summary)
    if not summary["ok"]:
        raise typer.Exit(1)


def _parse_batches(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise ValueError(f"--batches has {part!r}; give numbers of samples, with commas")
    return tuple(int(part) for part in parts)


def _write_whole(path: Path, text: str) -> None:
    """A bench that is killed while it writes leaves what it had written before."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(path)
