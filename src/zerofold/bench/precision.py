"""`zerofold bench precision`: the loss after some hundred steps in every precision and stage, against fp32 DDP.

All runs see the same weights first and the same batches; what differs is the arithmetic. Stages of the same
precision should not differ at all, so the bits of their final weights are compared too.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from zerofold.bench.machine import choose_device, choose_world, describe_software, parse_stages
from zerofold.bench.precision_runs import Case, Outcome, PrecisionTask, relative, train_cases
from zerofold.launch import RankFailed, run_ranks
from zerofold.observe.output import make_folder_of
from zerofold.train.gpt import GPTConfig
from zerofold.train.options import DEFAULT_BATCH, TrainOptions

BAD_INPUT = 2
TOLERANCE = 0.01
# A third of the job's own: with that, a difference in the last bit of fp32 grows to 0.5% of the loss in 200 steps.
LEARNING_RATE = TrainOptions.lr / 3
REFERENCE = Case("fp32", None)
NAMED = ("fp32", "tf32", "bf16", "fp16")
CUT_STAGES = (1, 2, 3)
STATES = "states"  # the rows with optimizer states in bf16
STATES_STAGE = 2
BF16_STATES = {
    "moments bf16": {"moments": "bfloat16"},
    "master bf16": {"master": "bfloat16"},
    "both bf16": {"master": "bfloat16", "moments": "bfloat16"},
}
# fp16 products on a CPU without instructions for them take ten times as long as fp32, hence the small one.
SIZES = {"cuda": GPTConfig(), "cpu": GPTConfig(layers=3, hidden=64, heads=2, seq=64)}


@dataclass(frozen=True, kw_only=True)
class PrecisionRow:
    """One line of the result."""

    precision: str
    stage: int | None
    loss: float
    """Mean over the last steps and all ranks."""
    loss_off: float
    """Of the reference's, 0.01 being one per cent."""
    validation_loss: float
    validation_off: float
    digest: str
    skipped: int | None
    seconds: float
    ok: bool


def make_cases(precisions: Sequence[str], stages: Sequence[int]) -> tuple[Case, ...]:
    cases = [Case(name, stage) for name in NAMED if name in precisions for stage in stages]
    if STATES in precisions:
        cases += [
            Case(name, STATES_STAGE, {"parameters": "bfloat16", **states}) for name, states in BF16_STATES.items()
        ]
    return (REFERENCE, *cases)


def make_row(case: Case, by_rank: Sequence[Outcome], reference: Outcome) -> PrecisionRow:
    first = by_rank[0]
    loss_off = relative(first.loss, reference.loss)
    validation_off = relative(first.validation_loss, reference.validation_loss)
    is_close = max(abs(loss_off), abs(validation_off)) <= TOLERANCE
    return PrecisionRow(
        precision=case.precision,
        stage=case.stage,
        loss=first.loss,
        loss_off=loss_off,
        validation_loss=first.validation_loss,
        validation_off=validation_off,
        digest=first.digest,
        skipped=first.skipped,
        seconds=round(max(outcome.seconds for outcome in by_rank), 1),
        # Ranks that ended with different weights have not trained one model.
        ok=is_close and len({outcome.digest for outcome in by_rank}) == 1,
    )


def same_bits(rows: Sequence[PrecisionRow]) -> dict[str, bool]:
    """By precision: whether stages 1, 2 and 3, as far as they ran, ended with the same weights to the bit."""
    digests: dict[str, list[str]] = {}
    for row in rows:
        if row.stage in CUT_STAGES:
            digests.setdefault(row.precision, []).append(row.digest)
    return {name: len(set(found)) == 1 for name, found in digests.items() if len(found) > 1}


def headings_and_cells(rows: Sequence[PrecisionRow]) -> tuple[list[str], list[list[str]]]:
    """One form for the terminal and for the page."""
    headings = ["precision", "stage", "loss", "off", "held-out", "off", "weights", "skipped", "", "s"]
    cells = [
        [
            row.precision,
            "DDP" if row.stage is None else str(row.stage),
            f"{row.loss:.4f}",
            f"{100 * row.loss_off:+.2f}%",
            f"{row.validation_loss:.4f}",
            f"{100 * row.validation_off:+.2f}%",
            row.digest[:8],
            "" if row.skipped is None else str(row.skipped),
            "✓" if row.ok else "✗",
            f"{row.seconds:.0f}",
        ]
        for row in rows
    ]
    return headings, cells


def markdown(rows: Sequence[PrecisionRow], command: str, introduction: str) -> str:
    headings, cells = headings_and_cells(rows)
    table = [headings, ["---"] * len(headings), *cells]
    lines = [
        "# Precision and the loss",
        f"Made by `{command}`.",
        "",
        introduction,
        "`off` is relative to fp32 under torch's DistributedDataParallel, the first row; `weights` is the start of a",
        "hash of all final weights in fp32; `skipped` counts steps left out because a gradient was not finite. Compute",
        f"is in bf16 in the rows with bf16 states. ✓: losses at most {TOLERANCE:.0%} off, the same weights on all",
        "ranks.",
        "",
        *("| " + " | ".join(line) + " |" for line in table),
        "",
        *_bits_in_words(rows),
    ]
    return "\n".join(lines) + "\n"


def _bits_in_words(rows: Sequence[PrecisionRow]) -> list[str]:
    sentences = []
    for name, same in same_bits(rows).items():
        stages = ", ".join(str(row.stage) for row in rows if row.precision == name and row.stage in CUT_STAGES)
        sentences.append(f"- {name}: stages {stages} ended with {'the same' if same else 'DIFFERENT'} bits.")
    return sentences


def print_table(console: Console, rows: Sequence[PrecisionRow], title: str) -> None:
    headings, cells = headings_and_cells(rows)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for index, heading in enumerate(headings[:-1]):  # without the seconds it fits 80 columns
        table.add_column(heading, justify="left" if index == 0 else "right", no_wrap=True)
    for row, line in zip(rows, cells, strict=True):
        table.add_row(*line[:-1], style=None if row.ok else "red")
    console.print(table)
    for sentence in _bits_in_words(rows):
        console.print(sentence)


def _parse_precisions(text: str, device: str) -> list[str]:
    """tf32 is a mode of NVIDIA's matrix units: on the CPU it would be fp32 by another name."""
    possible = [name for name in (*NAMED, STATES) if device == "cuda" or name != "tf32"]
    wanted = [name.strip() for name in text.split(",") if name.strip()] or possible
    for name in wanted:
        if name not in possible:
            raise ValueError(f"there is no precision {name!r} on {device}; choose from {', '.join(possible)}")
    return wanted


def bench_precision_command(
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks. Every GPU, or 2 on the CPU, if left out.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each run.")] = 200,
    precisions: Annotated[
        str, typer.Option(help=f"With commas: {', '.join(NAMED)}, {STATES} (bf16 optimizer states). All if left out.")
    ] = "",
    stages: Annotated[str, typer.Option(help="Stages, with commas.")] = "0,1,2,3",
    layers: Annotated[int | None, typer.Option(min=1, help="Blocks; 4 on a GPU, 3 on the CPU.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width; 192, or 64.")] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads; 6, or 2.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Bytes in a sequence; 128, or 64.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per rank and step.")] = DEFAULT_BATCH,
    lr: Annotated[float, typer.Option(min=0.0, help="Highest learning rate.")] = LEARNING_RATE,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and batches.")] = TrainOptions.seed,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    write: Annotated[Path | None, typer.Option(help="Write the table as Markdown to this file as well.")] = None,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of a failure.")] = False,
) -> None:
    """Train the built-in GPT in every precision and stage, and compare its loss with fp32 under torch DDP.

    The exit code is 1 when a training or validation loss is more than 1% off, or ranks end with different weights.

    \b
    Examples:
      zerofold bench precision
      zerofold bench precision --precisions bf16,states --steps 400 --write docs/precision.md
    """
    try:
        device = choose_device(device)
        world = choose_world(nproc, device, on_cpu=2)
        default = SIZES[device]
        task = PrecisionTask(
            cases=make_cases(_parse_precisions(precisions, device), parse_stages(stages)),
            gpt=GPTConfig(
                layers=layers or default.layers,
                hidden=hidden or default.hidden,
                heads=heads or default.heads,
                seq=seq or default.seq,
            ),
            steps=steps,
            batch=batch,
            lr=lr,
            seed=seed,
            device=device,
        )
        make_folder_of(write, "--write")
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(BAD_INPUT) from None
    try:
        by_rank: list[list[Outcome]] = run_ranks(train_cases, world, task, debug=debug)
    except RankFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None

    reference = by_rank[0][0]
    by_case = zip(task.cases, zip(*by_rank, strict=True), strict=True)
    rows = [make_row(case, outcomes, reference) for case, outcomes in by_case]
    machine = describe_software(device)
    title = f"{steps} steps of a GPT with {task.gpt.layers} blocks of width {task.gpt.hidden}, {world} rank(s)"
    title += f" on {machine['device']}, torch {machine['torch']}"
    if write is not None:
        command = shlex.join(["zerofold", *sys.argv[1:]])
        write.write_text(markdown(rows, command, f"{title}, batch {batch} of {task.gpt.seq} bytes a rank."))
    if as_json:
        summary: dict[str, Any] = {"machine": machine, "world": world, "steps": steps, "gpt": asdict(task.gpt)}
        typer.echo(json.dumps({**summary, "rows": [asdict(row) for row in rows], "same_bits": same_bits(rows)}))
    else:
        print_table(Console(), rows, title)
    if not all(row.ok for row in rows):
        raise typer.Exit(1)
