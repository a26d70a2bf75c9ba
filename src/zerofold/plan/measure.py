"""`--this-machine`: what the machine that the command runs on does, measured in a few seconds."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from zerofold.memory.arena import HostArena
from zerofold.memory.disk import DiskStore
from zerofold.memory.host import host_memory
from zerofold.offload.budget import device_memory
from zerofold.optim.host_speed import measure_host_update
from zerofold.plan.machine import Link, Machine
from zerofold.plan.presets import preset

_SECONDS = 0.3  # for each figure
_PROBE = 2**28  # bytes written to and read from a disk


def this_machine(*, devices: int | None = None, path: str | None = None) -> Machine:
    """Arithmetic, memory, the way to the host and the host's update are measured; links are those of a preset.

    `devices`: of the fleet, all of them like this one; by default those that are here. `path`: a folder on the disk
    that states may go to, whose rates are measured as well.

    >>> machine = this_machine(devices=8)
    >>> machine.devices, machine.source, machine.flops > 0
    (8, 'measured', True)
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    here = torch.cuda.device_count() if kind == "cuda" else 1
    like = preset("H100" if kind == "cuda" else "cpu", devices=devices or here, per_node=here)
    host = host_memory()
    elements = 2**25 if host.available > 2**33 else 2**22
    found = replace(
        like,
        name=torch.cuda.get_device_name(device) if kind == "cuda" else "this machine's CPU",
        device_memory=device_memory(device) if kind == "cuda" else host.available // here,
        host_memory=host.available,
        flops=_matmul(device, torch.bfloat16),
        flops_fp32=_matmul(device, torch.float32),
        memory_rate=_copy(device),
        to_host=_to_host(device) if kind == "cuda" else like.to_host,
        host_seconds=measure_host_seconds(device) if kind == "cuda" else like.host_seconds,
        host_update=measure_host_update(elements).parameters_per_second,
        source="measured",
    )
    return found if path is None else _with_disk(found, Path(path))


def measure_host_seconds(device: torch.device) -> float:
    """Of the host for a kernel, in a network that is nothing else: layers too small to compute anything.

    >>> 0 < measure_host_seconds(torch.device("cpu")) < 1
    True
    """
    layers, kernels_of_a_layer = 32, 6  # product with bias and gelu; their backward: two products, a sum, gelu's
    network = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(8, 8), nn.GELU()))).to(device)
    given = torch.ones(8, 8, device=device, requires_grad=True)

    def step() -> None:
        network(given).sum().backward()
        network.zero_grad()

    return 1 / _rate(step, layers * kernels_of_a_layer, device)


def _rate(run: Callable[[], object], amount: float, device: torch.device) -> float:
    """`amount` a second, of the fastest of some runs: what else the machine does only slows."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    run()
    wait()
    best, begin = float("inf"), time.perf_counter()
    while time.perf_counter() - begin < _SECONDS:
        start = time.perf_counter()
        run()
        wait()
        best = min(best, time.perf_counter() - start)
    return amount / best


def _matmul(device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if device.type == "cuda" else 512
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    return _rate(lambda: a @ b, 2.0 * side**3, device)


def _copy(device: torch.device) -> float:
    """Bytes read and written together."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**24, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return _rate(lambda: target.copy_(source), 2.0 * source.nbytes, device)


def _to_host(device: torch.device) -> Link:
    host = torch.empty(2**27, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(2**27, dtype=torch.uint8, device=device)

    def up() -> Tensor:
        return there.copy_(host, non_blocking=True)

    def down() -> Tensor:
        return host.copy_(there, non_blocking=True)

    return Link(rate=min(_rate(run, host.nbytes, device) for run in (up, down)), latency=1e-5)


def _with_disk(machine: Machine, folder: Path) -> Machine:
    """By the engine's own file of states."""
    if not folder.is_dir():
        raise ValueError(f"--path {folder} is no folder; give one on the disk that states may go to")
    free = shutil.disk_usage(folder).free
    if free < 2 * _PROBE:
        raise ValueError(f"--path {folder} has {free / 2**20:.0f} MiB free; measuring needs {2 * _PROBE / 2**20:.0f}")
    arena = HostArena(pins=torch.cuda.is_available())
    memory = arena.take(_PROBE)
    memory.copy_(torch.frombuffer(bytearray(os.urandom(_PROBE)), dtype=torch.uint8))  # no disk can take it for zeros
    arena.wait()
    try:
        with DiskStore(folder, _PROBE) as store:
            offset = store.take(_PROBE, "measuring").offset
            write = _once(lambda: store.write(offset, memory).wait())
            read = _once(lambda: store.read(offset, memory).wait())
    finally:
        arena.close()
    return replace(machine, disk=free, disk_read=_PROBE / read, disk_write=_PROBE / write)


def _once(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
