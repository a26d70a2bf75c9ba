"""`zerofold bench fragmentation`: the memory that a long run of varying shapes reserves over what it ever needs.

step 0   [ 812 tokens][1790 tokens]     short-lived tensors of other sizes in every micro-batch; between them
step 1   [ 344 tokens][ 967 tokens]     checkpoints that live until backward and gradients that live until the step
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerofold.bench.alone import AloneError, run_alone
from zerofold.bench.fragmentation_worker import WAYS, FragmentationTask, Outcome, Progress
from zerofold.bench.gpt import GPTSize
from zerofold.bench.machine import choose_device, describe_software
from zerofold.observe.output import make_folder_of

SIZES = {
    "cuda": GPTSize(vocab=32768, width=1024, layers=24, heads=16, seq=4096),
    "cpu": GPTSize(vocab=128, width=32, layers=3, heads=2, seq=64),
}
BATCHES, STEPS = {"cuda": 8, "cpu": 2}, {"cuda": 60, "cpu": 4}
"""About a minute for each way on an H200."""
MOST = 1.1
"""Reserved over the most that was allocated, with M_d."""


def summarise(outcomes: Mapping[str, Outcome], errors: Mapping[str, str]) -> dict[str, Any]:
    """`ok` is False where a way failed, or where M_d reserves too much; nobody knows on the CPU."""
    found = outcomes.get("M_d")
    too_much = found is not None and found.fragmentation is not None and found.fragmentation >= MOST
    return {
        "ways": {way: asdict(outcome) for way, outcome in outcomes.items()},
        "errors": dict(errors),
        "most": MOST,
        "ok": not errors and not too_much,
    }


def print_table(console: Console, title: str, outcomes: Mapping[str, Outcome], errors: Mapping[str, str]) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("\nway", no_wrap=True)
    for heading in ("reserved\nGiB", "peak\nGiB", "reserved\nover peak", "cache\ngiven back", "s a\nstep", "\nloss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way, outcome in outcomes.items():
        over = "n/a" if outcome.fragmentation is None else f"{outcome.fragmentation:.3f}"
        memory = _gib(outcome.peak_reserved), _gib(outcome.peak_allocated), over
        table.add_row(way, *memory, str(outcome.given_back), f"{outcome.seconds_per_step:.3f}", f"{outcome.loss:.3f}")
    console.print(table)
    for way, error in errors.items():
        console.print(f"[red]{way}[/red]  {escape(error)}", soft_wrap=True)


def _gib(nbytes: int | None) -> str:
    return "n/a" if nbytes is None else f"{nbytes / 2**30:.2f}"


class Watched:
    """Says on stderr how far a run is: in one line of a terminal, and elsewhere in ten lines for each way."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        self._steps, self._console = steps, console or Console(stderr=True)
        self._status = self._console.status("starting")

    def __enter__(self) -> Watched:
        self._status.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._status.stop()

    def show(self, way: str, progress: Progress) -> None:
        line = f"{way}: step {progress.step} of {self._steps}, {progress.seconds:.0f} s"
        if progress.peak_reserved is not None and progress.peak_allocated:
            line += f", reserved over peak {progress.peak_reserved / progress.peak_allocated:.3f}"
        if self._console.is_terminal:
            self._status.update(line)
        elif progress.step % max(1, self._steps // 10) == 0:
            self._console.print(line, soft_wrap=True)


def parse_ways(text: str) -> list[str]:
    """
    >>> parse_ways("without, M_d")
    ['without', 'M_d']
    """
    ways = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    for way in ways:
        if way not in WAYS:
            raise ValueError(f"there is no way {way!r}; the ways are {', '.join(WAYS)}")
    if not ways:
        raise ValueError(f"--ways names none; the ways are {', '.join(WAYS)}")
    return ways


def bench_fragmentation_command(
    ways: Annotated[str, typer.Option(help=f"With commas, from: {', '.join(WAYS)}.")] = ",".join(WAYS),
    steps: Annotated[int | None, typer.Option(min=1, help="Of each way; 60 on a GPU, 4 on the CPU.")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step, each of another length.")] = 2,
    d: Annotated[
        int | None, typer.Option("--d", min=1, help="Width of the model; 1024 on a GPU, 32 on the CPU.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks; 24, or 3.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; 16, or 2.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest sequence; 4096, or 64.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a micro-batch; 8, or 2.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one way.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON object to this file, and again after every step.")
    ] = None,
) -> None:
    """Train on sequences of many lengths, with and without long-lived tensors in memory of their own (M_d).

    "reserved over peak" is the most that torch's allocator took of the device over the most that was in use, over the
    whole run; without gaps it is 1. The CPU has no such books, and shows n/a. "cache given back" is how often M_d made
    the allocator give back what it held. The exit code is 1 when reserved over peak is 1.1 or more with M_d.

    \b
    Examples:
      zerofold bench fragmentation
      zerofold bench fragmentation --ways without,M_d --steps 300 --out result.json
    """
    try:
        chosen = parse_ways(ways)
        device = choose_device(device)
        default = SIZES[device]
        size = GPTSize(
            vocab=default.vocab,
            width=d or default.width,
            layers=layers or default.layers,
            heads=heads or default.heads,
            seq=seq or default.seq,
        )
        make_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    batch, steps = batch or BATCHES[device], steps or STEPS[device]
    outcomes: dict[str, Outcome] = {}
    errors: dict[str, str] = {}
    method = {"steps": steps, "accumulate": accumulate}
    known = {"machine": describe_software(device), "model": {"psi": size.parameters, **asdict(size), "batch": batch}}

    def result(running: dict[str, Any] | None = None) -> dict[str, Any]:
        found = {**known, "method": method, "running": running, **summarise(outcomes, errors)}
        if out is not None:
            out.write_text(json.dumps(found, indent=2) + "\n")
        return found

    with Watched(steps) as watched:
        for way in chosen:

            def hear(progress: Progress, way: str = way) -> None:
                watched.show(way, progress)
                result({"way": way, **asdict(progress)})

            task = FragmentationTask(way=way, size=size, batch=batch, steps=steps, accumulate=accumulate, device=device)
            worker, environment = "zerofold.bench.fragmentation_worker:measure", WAYS[way].environment
            try:
                outcomes[way] = run_alone(worker, task, timeout=timeout, environment=environment, hear=hear)
            except AloneError as error:
                errors[way] = str(error)
    ended = result()
    if as_json:
        typer.echo(json.dumps(ended))
    else:
        title = f"{size.parameters / 1e6:.1f}M parameters, {device}, {steps} steps of {accumulate} x {batch} sequences "
        title += f"of {max(1, size.seq // 8)} to {size.seq} tokens"
        print_table(Console(), title, outcomes, errors)
    if not ended["ok"]:
        raise typer.Exit(1)
