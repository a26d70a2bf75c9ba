"""`zerofold bench save`: what a checkpoint costs, beside a plain writer on the same disk.

    round   [plain writer][plain writer, many threads][save][steps | save in the background, steps until it is done]

The stall is what the steps from the call to the end of the save took longer than as many steps without one.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import zerofold as zf
from zerofold.bench.gpt import GPT, Block, GPTSize
from zerofold.bench.machine import choose_device, choose_world, describe_software
from zerofold.checkpoint.files import CHUNK_BYTES, threads_here
from zerofold.launch import RankFailed, init_ranks, run_ranks

SIZES = {
    "cuda": GPTSize(vocab=32768, width=2048, layers=18, heads=16, seq=1024),
    "cpu": GPTSize(vocab=4096, width=256, layers=6, heads=4, seq=64),
}
BATCHES = {"cuda": 8, "cpu": 2}
STEPS_BEFORE = 10


@dataclass(frozen=True)
class SaveRound:
    """Seconds on the slowest rank, of one round."""

    plain: float
    plain_threads: float
    save: float
    call: float
    """Until zf.save(background=True) returned."""
    background: float
    """Until that save was complete."""
    step: float
    """The median step before it."""
    stall: float
    """What the steps meanwhile took longer, with the call."""
    steps: int
    """Meanwhile."""


def plain_write(path: Path, nbytes: int, threads: int) -> float:
    """The same bytes from one buffer, with a sync at the end and nothing else."""
    buffer = os.urandom(CHUNK_BYTES)
    start = time.monotonic()
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    offsets = range(0, nbytes, CHUNK_BYTES)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda at: os.pwrite(descriptor, memoryview(buffer)[: nbytes - at], at), offsets))
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.monotonic() - start
    path.unlink()
    return seconds


class Trial:
    """One rank's part of the measurement."""

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        size = SIZES[device.type]
        torch.manual_seed(0)
        with torch.device(device):
            model = GPT(size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        precision = "bf16" if device.type == "cuda" else None
        self.model, self.optimizer = zf.prepare(model, optimizer, stage=3, units=Block, precision=precision)
        self.tokens = torch.randint(0, size.vocab, (BATCHES[device.type], size.seq), device=device)
        self.folder, self.rank, self.device = folder, rank, device
        self.step()
        zf.stage(self.model, self.optimizer)
        self.nbytes = zf.save(self.model, self.optimizer, folder).total
        self.clear()

    def step(self) -> float:
        start = time.monotonic()
        self.model(self.tokens, self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.monotonic() - start

    def clear(self) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(self.folder)
        dist.barrier()

    def run(self) -> SaveRound:
        self.folder.mkdir(exist_ok=True)
        dist.barrier()
        path = self.folder / f"plain-{self.rank}"
        plain = plain_write(path, self.nbytes, 1)
        many = plain_write(path, self.nbytes, threads_here())
        dist.barrier()
        start = time.monotonic()
        zf.save(self.model, self.optimizer, self.folder)
        save = time.monotonic() - start
        self.clear()
        usual = statistics.median(self.step() for _ in range(STEPS_BEFORE))
        start = time.monotonic()
        saving = zf.save(self.model, self.optimizer, self.folder, background=True)
        call = time.monotonic() - start
        taken = []
        while not self._all_done(saving):
            taken.append(self.step())
        background = time.monotonic() - start
        saving.wait()
        stall = call + sum(taken) - usual * len(taken)
        self.clear()
        return SaveRound(plain, many, save, call, background, usual, stall, len(taken))

    def _all_done(self, saving: zf.Saving) -> bool:
        done = torch.tensor([float(saving.is_done)], device=self.device)
        dist.all_reduce(done, op=dist.ReduceOp.MIN)
        return bool(done.item())


def measure_on_rank(folder: Path, device_type: str, rounds: int) -> dict[str, Any] | None:
    with init_ranks(device_type) as (rank, _, device):
        trial = Trial(folder / "saved", rank, device)
        seen = [trial.run() for _ in range(rounds)]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (trial.nbytes, [vars(each) for each in seen]))
        zf.close(trial.model)
    slowest = [{key: max(each[1][i][key] for each in everyone) for key in vars(seen[0])} for i in range(rounds)]
    return {"bytes": sum(each[0] for each in everyone), "rounds": slowest}


def summarise(result: dict[str, Any]) -> dict[str, float]:
    """Medians over rounds; ratios are of figures of the same round."""
    rounds, nbytes = result["rounds"], result["bytes"]

    def median(key: str) -> float:
        return float(statistics.median(each[key] for each in rounds))

    return {
        "plain_gb_per_s": nbytes / median("plain") / 1e9,
        "plain_threads_gb_per_s": nbytes / median("plain_threads") / 1e9,
        "save_s": median("save"),
        "save_gb_per_s": nbytes / median("save") / 1e9,
        "save_over_plain": statistics.median(each["plain"] / each["save"] for each in rounds),
        "background_s": median("background"),
        "call_s": median("call"),
        "stall_s": median("stall"),
        "stall_over_save": statistics.median(each["stall"] / each["save"] for each in rounds),
        "step_s": median("step"),
        "steps_meanwhile": median("steps"),
    }


def bench_save_command(
    folder: Annotated[Path, typer.Option(help="Where to write; on the disk to be measured.")] = Path("."),
    nproc: Annotated[int | None, typer.Option(min=1, help="Ranks; every GPU, or 2 on the CPU.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; medians are shown.")] = 3,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Time saving a checkpoint, at once and in the background, beside a plain writer on the same disk.

    On a GPU a model of 1.0e9 parameters in bf16 with fp32 masters and AdamW; on the CPU a small one in fp32.

    \b
    Examples:
      zerofold bench save
      zerofold bench save --folder /scratch --rounds 5
    """
    try:
        device = choose_device(device)
        world = choose_world(nproc, device, on_cpu=2)
        if not folder.is_dir():
            raise ValueError(f"--folder {folder}: there is no such folder")
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    place = folder / f".bench-save-{os.getpid()}"
    place.mkdir()
    try:
        result = run_ranks(measure_on_rank, world, place, device, rounds)[0]
    except RankFailed as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)
    found = summarise(result)
    if as_json:
        machine = {**describe_software(device), "world": world}
        typer.echo(json.dumps({"machine": machine, "parameters": SIZES[device].parameters, **result, **found}))
        return
    parameters = f"{SIZES[device].parameters / 1e9:.2f}e9 parameters"
    print_table(Console(), found, f"{parameters}, {result['bytes'] / 1e9:.1f} GB, {world} rank(s), {rounds} round(s)")


def print_table(console: Console, found: dict[str, float], title: str) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("", "", ""):
        table.add_column(heading, no_wrap=True)
    for name, value, note in (
        ("plain writer", f"{found['plain_gb_per_s']:.2f} GB/s", "one thread, with a sync at the end"),
        ("plain writer", f"{found['plain_threads_gb_per_s']:.2f} GB/s", "as many threads as a save has"),
        ("save", f"{found['save_gb_per_s']:.2f} GB/s", f"{found['save_over_plain']:.0%} of the plain writer's rate"),
        ("save", f"{found['save_s']:.2f} s", ""),
        ("in the background", f"{found['background_s']:.2f} s", f"{found['steps_meanwhile']:.0f} steps meanwhile"),
        ("stall of training", f"{found['stall_s']:.3f} s", f"{found['stall_over_save']:.1%} of the save's time"),
        ("of it in the call", f"{found['call_s']:.3f} s", f"a step takes {found['step_s']:.3f} s"),
    ):
        table.add_row(name, value, note)
    console.print(table)
