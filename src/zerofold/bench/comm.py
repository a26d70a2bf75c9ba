"""`zerofold bench comm`: every collective over sizes, in zerofold's form and in torch's own.

    round 0   [ours][torch's]        each turn a few calls after each other, all ranks at once;
    round 1   [torch's][ours]        a ratio compares the two turns of a round

Bandwidths are those of nccl-tests: bytes over time (algorithm), and that times what makes it comparable with a link
whatever the number of ranks (bus).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import psutil
import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from zerofold.bench import figures
from zerofold.bench.comm_calls import COLLECTIVES, FORMS, OURS, TORCH, Pair, make_comm
from zerofold.bench.machine import choose_device, choose_world, describe_software
from zerofold.launch import RankFailed, init_ranks, run_ranks
from zerofold.observe.output import make_folder_of
from zerofold.offload.wishes import read_size

DEFAULT_SIZES = "1KiB,32KiB,1MiB,16MiB,64MiB,256MiB"
ITEMSIZE = 4
BYTES_OF_A_TURN = 32 * 2**20  # so many calls make a turn, within the bounds below
FEWEST_CALLS, MOST_CALLS = 2, 64
COPIES = 6  # of the largest size, that a rank holds at once


@dataclass(frozen=True)
class Task:
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    device_type: str


@dataclass(frozen=True)
class CommRow:
    """One collective at one size. Times are of a call, medians over the rounds."""

    collective: str
    nbytes: int
    zerofold_us: float
    torch_us: float
    algorithm_gb_per_s: float
    """Of zerofold's form."""
    bus_gb_per_s: float
    torch_bus_gb_per_s: float
    over_torch: float
    """Median of zerofold's time over torch's in the same round."""
    over_torch_min: float
    over_torch_max: float


RankTimes = list[list[dict[str, float]]]
"""By case and round: form → seconds of a call on this rank."""


def measure_on_rank(task: Task) -> RankTimes:
    """What each process runs: the same calls in the same order on all."""
    with init_ranks(task.device_type) as (rank, world, device):
        comm = make_comm(device)
        found = []
        for nbytes, name in cases(task):
            pair = COLLECTIVES[name].make(comm, elements(nbytes, world))
            _check(pair, f"{name} of {nbytes} bytes on rank {rank}")
            calls = min(MOST_CALLS, max(FEWEST_CALLS, BYTES_OF_A_TURN // nbytes))
            found.append([_round(pair, number, calls, device) for number in range(task.rounds)])
        return found


def cases(task: Task) -> list[tuple[int, str]]:
    return [(nbytes, name) for name in task.names for nbytes in task.sizes]


def elements(nbytes: int, world: int) -> int:
    """The nearest count below that every rank has an equal part of; at least one each."""
    return max(1, nbytes // ITEMSIZE // world) * world


def _check(pair: Pair, what: str) -> None:
    """Both forms leave the same: a bandwidth of something else would say nothing. It also warms both up."""
    pair.fill()
    for form in FORMS:
        pair.calls[form]()
    if not torch.equal(pair.results[OURS], pair.results[TORCH]):
        raise RuntimeError(f"{what}: zerofold's result is not torch's")


def _round(pair: Pair, number: int, calls: int, device: torch.device) -> dict[str, float]:
    found = {}
    for form in figures.rotated(FORMS, number):
        pair.fill()  # sums in place would grow without end
        _synchronise(device)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            pair.calls[form]()
        _synchronise(device)
        found[form] = (time.perf_counter() - start) / calls
    return found


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def make_rows(task: Task, by_rank: Sequence[RankTimes], world: int) -> list[CommRow]:
    """A collective takes as long as its slowest rank."""
    rows = []
    for index, (asked, name) in enumerate(cases(task)):
        rounds = [
            {form: max(times[index][number][form] for times in by_rank) for form in FORMS}
            for number in range(task.rounds)
        ]
        nbytes = elements(asked, world) * ITEMSIZE
        ours, torchs = (statistics.median(each[form] for each in rounds) for form in FORMS)
        spread = figures.ratios(rounds, OURS, TORCH)
        assert spread is not None
        bus = COLLECTIVES[name].bus(world)
        rows.append(
            CommRow(
                name,
                nbytes,
                round(1e6 * ours, 2),
                round(1e6 * torchs, 2),
                round(nbytes / ours / 1e9, 4),
                round(bus * nbytes / ours / 1e9, 4),
                round(bus * nbytes / torchs / 1e9, 4),
                *(round(each, 4) for each in spread),
            )
        )
    return rows


def print_table(console: Console, rows: Sequence[CommRow], title: str) -> None:
    """In 80 columns; torch's bandwidths are in the JSON."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\ncollective", no_wrap=True)
    for heading in ("\nsize", "\nµs", "torch\nµs", "alg\nGB/s", "bus\nGB/s", "over\ntorch", "\nmin-max"):
        table.add_column(heading, justify="right", no_wrap=True)
    last = None
    for row in rows:
        table.add_row(
            "" if row.collective == last else row.collective,
            size_text(row.nbytes),
            f"{row.zerofold_us:.0f}",
            f"{row.torch_us:.0f}",
            f"{row.algorithm_gb_per_s:.2f}",
            f"{row.bus_gb_per_s:.2f}",
            f"{row.over_torch:.2f}",
            f"{row.over_torch_min:.2f}-{row.over_torch_max:.2f}",
        )
        last = row.collective
    console.print(table)


def size_text(nbytes: int) -> str:
    """
    >>> size_text(1024), size_text(256 * 2**20), size_text(1000)
    ('1 KiB', '256 MiB', '1000 B')
    """
    for name, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor and not nbytes % factor:
            return f"{nbytes // factor} {name}"
    return f"{nbytes} B"


def _read(collectives: str, sizes: str, nproc: int | None, rounds: int, device: str) -> tuple[Task, int]:
    names = tuple(name.strip() for name in collectives.split(",") if name.strip()) or tuple(COLLECTIVES)
    for name in names:
        if name not in COLLECTIVES:
            raise ValueError(f"there is no collective {name!r}; they are {', '.join(COLLECTIVES)}")
    parts = [part.strip() for part in sizes.split(",") if part.strip()]
    found = tuple(int(part) if part.isdecimal() else read_size("--sizes", part) for part in parts)
    if not found or min(found) < ITEMSIZE:
        raise ValueError(f"--sizes {sizes!r}: give one or more sizes of {ITEMSIZE} bytes or more, as 1KiB,1MiB")
    if device == "auto" and torch.cuda.device_count() < max(2, nproc or 2):
        device = "cpu"  # a rank needs a GPU of its own, and one rank has nobody to send to
    kind = choose_device(device)
    world = choose_world(nproc, kind, on_cpu=2)
    if kind == "cpu":
        needed, free = COPIES * world * max(found), psutil.virtual_memory().available
        if needed > free:
            raise ValueError(
                f"--sizes {sizes!r}: {world} ranks need {needed / 2**30:.1f} GiB of memory for the largest, "
                f"{free / 2**30:.1f} GiB are available; leave out the largest"
            )
    return Task(names, found, rounds, kind), world


def bench_comm_command(
    collectives: Annotated[
        str, typer.Option(help=f"Which, with commas: {', '.join(COLLECTIVES)}. All of them if left out.")
    ] = "",
    sizes: Annotated[str, typer.Option(help="Bytes of the whole tensor, with commas.")] = DEFAULT_SIZES,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks. Every GPU if there are several, else 2 on the CPU.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds.")] = 7,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON object to this file as well.")] = None,
) -> None:
    """Time every collective over sizes, in zerofold's form and in torch's own, side by side.

    Bandwidths are defined as in nccl-tests. NCCL where there are several GPUs, gloo on the CPU.

    \b
    Examples:
      zerofold bench comm
      zerofold bench comm --collectives all_gather,reduce_scatter --sizes 1MiB,64MiB --nproc 4 --json
    """
    try:
        task, world = _read(collectives, sizes, nproc, rounds, device)
        make_folder_of(out)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    try:
        by_rank: list[RankTimes] = run_ranks(measure_on_rank, world, task)
    except RankFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    rows = make_rows(task, by_rank, world)
    backend = "nccl" if task.device_type == "cuda" else "gloo"
    result = {
        "machine": {**describe_software(task.device_type), "backend": backend, "world": world},
        "method": {"rounds": rounds, "sizes": list(task.sizes)},
        "rows": [asdict(row) for row in rows],
    }
    if out is not None:
        out.write_text(json.dumps(result, indent=2) + "\n")
    if as_json:
        typer.echo(json.dumps(result))
    else:
        print_table(Console(), rows, f"{world} ranks, {backend}, fp32, {rounds} rounds")
