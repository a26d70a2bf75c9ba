"""One engine of `zerofold bench offload` in a process of its own, from the first weight to the last update."""

from __future__ import annotations

import importlib
import json
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.bench.beside_disk import DiskTurn, take_turns
from zerofold.bench.gpt import GPT, GPTSize, RandomTokens
from zerofold.bench.offload_engines import OFFLOAD_ENGINES, Training, Wishes, require_ops
from zerofold.bench.worker import LAZY_IMPORTS
from zerofold.memory.host import peak_resident

RESIDENT_PARTS = ("RssAnon", "RssFile", "RssShmem")


@dataclass(frozen=True, kw_only=True)
class OffloadTask:
    engine: str
    size: GPTSize
    batch: int
    clip: float
    device: str
    """"cpu" or "cuda"."""
    path: str
    device_limit: int
    untimed: int
    """Steps before the window that is timed."""
    timed: int
    batches: int
    """After so many different batches the first comes again."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run of one engine showed. Memory of the device is None where there is none but the host's."""

    psi: int
    start_s: float
    """From a model on the device (or the meta device) to one that can train."""
    window_s: float
    """All timed steps together, to the last update: the end waits for what a step had put off."""
    seconds: list[float]
    """Of each timed step, to the moment its loss was known."""
    losses: list[float]
    """Of every step, untimed ones included."""
    norms: list[float | None]
    """Before clipping, of every step; None where the engine does not tell."""
    device_peak_bytes: int | None
    device_reserved_bytes: int | None
    device_build_peak_bytes: int | None
    activation_bytes: int | None
    """What a step takes on the device beside the states; `plain` tells, for all."""
    host_start_bytes: int | None
    """Resident memory before the engine took the model over."""
    host_peak_bytes: int
    """Highest resident memory of the process, mapped files included."""
    host_parts: dict[str, int]
    """Resident memory at the end, by kind."""
    disk_read_bytes: int | None
    disk_written_bytes: int | None
    """By the whole process during the timed window, as the kernel counts."""
    disk_file_bytes: int
    """Held by the files in the run's folder, at the end."""
    books: dict[str, Any]
    """What the engine itself says."""
    disk_turns: list[DiskTurn] = field(default_factory=list)
    """After all else: further steps and the disk alone, in turns. Of engines that tell the rate of an update."""

    @property
    def step_s(self) -> float:
        return self.window_s / len(self.seconds)

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def measure(task: OffloadTask) -> Outcome:
    """Build, warm up, and time one window of steps."""
    engine = OFFLOAD_ENGINES[task.engine]
    for module in (*LAZY_IMPORTS, *engine.needs):
        importlib.import_module(module)
    device = open_device(task.device, task.device_limit if engine.is_limited else None)
    require_ops(engine)
    torch.manual_seed(0)
    model = _build_model(task.size, torch.device("meta") if engine.is_large else device)
    data = RandomTokens(task.size, batch=task.batch, rank=0, device=device, batches=task.batches)
    activation_bytes = None
    if task.engine == "plain" and device.type == "cuda":
        activation_bytes = measure_activations(model, *data.at(0))

    _forget_peak(device)
    host_start_bytes = _resident_parts().get("VmRSS")
    start = time.perf_counter()
    wishes = Wishes(batch=task.batch, device=device, clip=task.clip, path=task.path, device_limit=task.device_limit)
    training = engine.build(model, wishes)
    _synchronize(device)
    start_s = time.perf_counter() - start
    del model  # an engine may have made another one of it
    device_build_peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    _forget_peak(device)

    seconds, losses, norms = [], [], []
    for index in range(task.untimed + task.timed):
        if index == task.untimed:
            _settle(training, device)
            disk_before, window_start = _disk_bytes(), time.perf_counter()
        tokens, targets = data.at(index)
        start = time.perf_counter()
        loss = training.step(tokens, targets)
        # Read as a loop that logs would. Waiting for all streams here would forbid what runs on under the next step.
        losses.append(loss.item())
        norms.append(training.norm())
        if index >= task.untimed:
            seconds.append(time.perf_counter() - start)
    _settle(training, device)
    window_s = time.perf_counter() - window_start
    disk_after = _disk_bytes()

    resident = _resident_parts()
    outcome = Outcome(
        psi=task.size.parameters,
        start_s=start_s,
        window_s=window_s,
        seconds=seconds,
        losses=losses,
        norms=[None if norm is None else float(norm) for norm in norms],
        device_peak_bytes=torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        device_reserved_bytes=torch.cuda.max_memory_reserved() if device.type == "cuda" else None,
        device_build_peak_bytes=device_build_peak_bytes,
        activation_bytes=activation_bytes,
        host_start_bytes=host_start_bytes,
        host_peak_bytes=peak_resident(),
        host_parts={name: resident[name] for name in RESIDENT_PARTS if name in resident},
        disk_read_bytes=_difference(disk_after, disk_before, "read_bytes"),
        disk_written_bytes=_difference(disk_after, disk_before, "write_bytes"),
        disk_file_bytes=sum(file.stat().st_blocks * 512 for file in Path(task.path).rglob("*") if file.is_file()),
        books=json.loads(json.dumps(training.books(), default=str)),
    )
    if not engine.uses_disk or engine.is_large or update_rate(training) is None:
        return outcome

    def step() -> float:
        training.step(tokens, targets)
        _settle(training, device)
        return update_rate(training) or 0.0

    return replace(outcome, disk_turns=take_turns(step, task.path, task.size.parameters))


def update_rate(training: Training) -> float | None:
    """GB/s of the disk over the last update, from first read to last write; None if the engine does not tell."""
    update = training.books().get("offload", {}).get("update") or {}
    seconds = update.get("disk_seconds", 0.0)
    return update["disk_bytes"] / seconds / 1e9 if seconds else None


def open_device(name: str, limit: int | None) -> torch.device:
    """The device of this process, and a process group of one rank."""
    device = torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if limit is not None:
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1
    )
    return device


def _build_model(size: GPTSize, device: torch.device) -> GPT:
    """In bf16 from the first moment: drawn in fp32 it would take twice the memory once."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return GPT(size, checkpointing=True)
    finally:
        torch.set_default_dtype(before)


def measure_activations(model: GPT, tokens: Tensor, targets: Tensor) -> int:
    """The most that forward and backward take on the GPU while every gradient is dropped as soon as it is there."""
    _forget_peak(tokens.device)
    before = torch.cuda.memory_allocated()
    drops = [parameter.register_post_accumulate_grad_hook(_drop_gradient) for parameter in model.parameters()]
    model(tokens, targets).backward()
    for drop in drops:
        drop.remove()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None


def _settle(training: Training, device: torch.device) -> None:
    """Wait for everything that the steps so far have started, on the device and off it."""
    training.read_parameter().float().sum().item()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _resident_parts() -> dict[str, int]:
    """Resident memory by kind, in bytes; empty where the system has no /proc."""
    parts: dict[str, int] = {}
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        name, _, value = line.partition(":")
        if name in ("VmRSS", *RESIDENT_PARTS):
            parts[name] = int(value.split()[0]) * 1024
    return parts


def _disk_bytes() -> dict[str, int]:
    """Bytes that this process has read from and written to disks; empty where the system does not count them."""
    counts = Path("/proc/self/io")
    if not (counts.exists() and os.access(counts, os.R_OK)):
        return {}
    return {name: int(count) for name, count in (line.split(": ") for line in counts.read_text().splitlines())}


def _difference(after: dict[str, int], before: dict[str, int], name: str) -> int | None:
    return after[name] - before[name] if name in after and name in before else None
