"""How close training comes to the ceilings: the update of a real model's offloaded states, in a process of its own.

The model is large and its batch is one row, so that a step is little else than the update. It is timed from the call of
`step()` to the moment all states are where they live.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerofold as zf
from zerofold.bench.alone import AloneError, run_alone
from zerofold.bench.disk import ORDERS
from zerofold.bench.io_rows import Rate
from zerofold.engine import Engine
from zerofold.process_group import join_or_be_alone

PART = "engine"
WIDTH = 1024
STATE_BYTES = 12  # of one parameter: master and moments in fp32
HOST_MOVED, DISK_MOVED = 28, 24  # bytes of one parameter's update, by the cores and by the disk
STEPS = 3  # after one that makes kernels and faults memory in
TIMEOUT = 300.0


def engine_rates(folder: Path | None, nbytes: int, others: Sequence[Rate]) -> list[Rate]:
    """States of `nbytes` on the host and, where there is a folder, in a file; `others` are the ceilings."""
    places: dict[str, dict[str, Any]] = {"update on the host": {"optimizer": "host"}}
    if folder is not None:
        places["update in a file"] = {"optimizer": "nvme", "path": str(folder)}
    try:
        timed: list[dict[str, float]] = run_alone(f"{__name__}:timed", list(places.values()), nbytes, timeout=TIMEOUT)
    except AloneError as error:
        raise OSError(str(error)) from error
    rates = []
    for (name, offload), found in zip(places.items(), timed, strict=True):
        per_second = found["parameters"] / found["seconds"]
        in_file = "nvme" in offload.values()
        gb_per_s = per_second * (DISK_MOVED if in_file else HOST_MOVED) / 1e9
        ceiling = _ceiling(others, in_file)
        note = f"{per_second / 1e9:.3f}e9 params/s" + (
            f", {found['share']:.0%} through the device" if found["share"] else ""
        )
        share = None if ceiling is None else gb_per_s / ceiling.gb_per_s
        rates.append(Rate(PART, name, gb_per_s, share, None if ceiling is None else ceiling.name, note))
    return rates


def _ceiling(others: Sequence[Rate], in_file: bool) -> Rate | None:
    """The same work without an engine: of a disk reads and writes in the faster order, of the host the update alone."""
    wanted = [("disk", f"{order}, raw") for order in ORDERS] if in_file else [("host update", "chosen")]
    found = [rate for rate in others if (rate.part, rate.name) in wanted]
    return max(found, key=lambda rate: rate.gb_per_s, default=None)


def timed(places: Sequence[Mapping[str, Any]], nbytes: int) -> list[dict[str, float]]:
    join_or_be_alone()
    found = [_timed_update(place, nbytes) for place in places]
    dist.destroy_process_group()
    return found


def _timed_update(offload: Mapping[str, Any], nbytes: int) -> dict[str, float]:
    """Parameters, and the seconds that the fastest of a few updates takes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = max(1, nbytes // STATE_BYTES // WIDTH**2)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    zf.prepare(model, optimizer, stage=3, precision="bf16", units=16 * WIDTH**2, offload=offload, device=device)
    engine, seconds = Engine.of(model), []
    for _ in range(1 + STEPS):
        model(torch.ones(1, WIDTH, device=device)).float().sum().backward()
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        optimizer.step()
        engine.finish_updates()
        seconds.append(time.perf_counter() - start)
        optimizer.zero_grad()
    figures = zf.ledger(model).snapshot()["offload"]["update"]
    zf.close(model, gather=False)
    return {"parameters": layers * WIDTH**2, "seconds": min(seconds[1:]), "share": figures["device_share"]}
