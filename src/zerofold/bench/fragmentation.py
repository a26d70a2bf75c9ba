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
from zerofold.bench.fragmentation_worker import WAYS, FragmentationTask, Outcome
from zerofold.bench.gpt import GPTSize
from zerofold.bench.machine import check_folder_of, choose_device, describe_software

SIZES = {
    "cuda": GPTSize(vocab=32768, width=1024, layers=24, heads=16, seq=4096),
    "cpu": GPTSize(vocab=128, width=32, layers=3, heads=2, seq=64),
}
BATCHES, STEPS = {"cuda": 16, "cpu": 2}, {"cuda": 100, "cpu": 4}
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
    for heading in ("reserved\nGiB", "peak\nGiB", "reserved\nover peak", "\nloss"):
        table.add_column(heading, justify="right", no_wrap=True)
    for way, outcome in outcomes.items():
        over = "n/a" if outcome.fragmentation is None else f"{outcome.fragmentation:.3f}"
        table.add_row(way, _gib(outcome.peak_reserved), _gib(outcome.peak_allocated), over, f"{outcome.loss:.3f}")
    console.print(table)
    for way, error in errors.items():
        console.print(f"[red]{way}[/red]  {escape(error)}", soft_wrap=True)


def _gib(nbytes: int | None) -> str:
    return "n/a" if nbytes is None else f"{nbytes / 2**30:.2f}"


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
    steps: Annotated[int | None, typer.Option(min=1, help="Of each way; 100 on a GPU, 4 on the CPU.")] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="Micro-batches of a step, each of another length.")] = 2,
    d: Annotated[
        int | None, typer.Option("--d", min=1, help="Width of the model; 1024 on a GPU, 32 on the CPU.")
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks; 24, or 3.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; 16, or 2.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of the longest sequence; 4096, or 64.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences in a micro-batch; 16, or 2.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds for one way.")] = 300,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file, after every way.")] = None,
) -> None:
    """Train on sequences of many lengths, with and without long-lived tensors in memory of their own (M_d).

    "reserved over peak" is the most that torch's allocator took of the device over the most that was in use, over the
    whole run; without gaps it is 1. The CPU has no such books, and shows n/a. The exit code is 1 when it is 1.1 or
    more with M_d.

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
        check_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    batch, steps = batch or BATCHES[device], steps or STEPS[device]
    outcomes: dict[str, Outcome] = {}
    errors: dict[str, str] = {}
    result: dict[str, Any] = {}
    with Console(stderr=True).status("starting") as status:
        for way in chosen:
            status.update(way)
            task = FragmentationTask(way=way, size=size, batch=batch, steps=steps, accumulate=accumulate, device=device)
            worker = "zerofold.bench.fragmentation_worker:measure"
            try:
                outcomes[way] = run_alone(worker, task, timeout=timeout, environment=WAYS[way].environment)
            except AloneError as error:
                errors[way] = str(error)
            result = {
                "machine": describe_software(device),
                "model": {"psi": size.parameters, **asdict(size), "batch": batch},
                "method": {"steps": steps, "accumulate": accumulate},
                **summarise(outcomes, errors),
            }
            if out is not None:
                out.write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        title = f"{size.parameters / 1e6:.1f}M parameters, {device}, {steps} steps of {accumulate} x {batch} sequences "
        title += f"of {max(1, size.seq // 8)} to {size.seq} tokens"
        print_table(Console(), title, outcomes, errors)
    if not result["ok"]:
        raise typer.Exit(1)
