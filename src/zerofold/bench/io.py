"""`zerofold bench io`: the ceilings of offloading on this machine, each by itself, and how close the engine comes.

device ◄── pcie ──► host memory ◄── host update ──► cores
                        ▲
                        └──── disk ──► folder
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from zerofold.bench.io_disk import disk_rates
from zerofold.bench.io_engine import engine_rates
from zerofold.bench.io_host import host_rates
from zerofold.bench.io_pcie import pcie_rates
from zerofold.bench.io_rows import Rate, print_rates
from zerofold.bench.machine import describe_software
from zerofold.memory.host import host_memory

GIB = 2**30
LEAST_BYTES = 2**20
HOST_COPIES = 4  # of --size, that the largest part has in host memory at once


def bench_io_command(
    size: Annotated[float, typer.Option(help="GiB moved in each measurement.")] = 1.0,
    path: Annotated[Path | None, typer.Option(help="A folder on the disk to measure. No disk if left out.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure what bounds offloading: the way to the GPU, the update on the host, and a disk; and how close it comes.

    GB/s count what is read and what is written. The fastest of a few rounds is shown.

    \b
    Examples:
      zerofold bench io
      zerofold bench io --size 8 --path /mnt/nvme --json
    """
    on_gpu = torch.cuda.is_available()
    try:
        nbytes = _checked_bytes(size)
        if path is not None and not path.is_dir():
            raise ValueError(f"--path {path}: there is no such folder; make it first")
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    parts: dict[str, Callable[[], list[Rate]] | str] = {
        "pcie": (lambda: pcie_rates(nbytes)) if on_gpu else "no accelerator here",
        "host update": lambda: host_rates(nbytes),
        "disk": (lambda: disk_rates(path, nbytes)) if path is not None else "name a folder on it with --path",
        "engine": lambda: engine_rates(path, nbytes, rates),
    }
    rates: list[Rate] = []
    skipped: dict[str, str] = {}
    failed: dict[str, str] = {}
    for part, measure in parts.items():
        if isinstance(measure, str):
            skipped[part] = measure
            continue
        try:
            rates += measure()
        except (OSError, MemoryError) as error:  # a full disk, one without O_DIRECT, memory that cannot be pinned
            failed[part] = str(error)
    machine = describe_software("cuda" if on_gpu else "cpu")
    if as_json:
        rows = [asdict(rate) for rate in rates]
        result = {"machine": machine, "bytes": nbytes, "rows": rows, "skipped": skipped, "failed": failed}
        typer.echo(json.dumps(result))
    else:
        print_rates(Console(), rates, skipped, f"{machine['device']}, {machine['cores']} cores, {size:g} GiB at a time")
    for part, reason in failed.items():
        typer.echo(f"error: {part}: {reason}", err=True)
    if failed:
        raise typer.Exit(1)


def _checked_bytes(size: float) -> int:
    if not (math.isfinite(size) and size * GIB >= LEAST_BYTES):
        raise ValueError(f"--size {size}: use {LEAST_BYTES / GIB:.4f} GiB or more")
    available = host_memory().available
    if HOST_COPIES * size * GIB > available:
        raise ValueError(
            f"--size {size:g} needs {HOST_COPIES * size:g} GiB of host memory, {available / GIB:.1f} GiB are "
            f"available; use --size {available / GIB / HOST_COPIES:.1f}"
        )
    return int(size * GIB)
