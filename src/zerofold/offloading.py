"""What `offload=` comes to for one model: the plan of tiers, agreed on by all ranks, and the memory behind it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from zerofold.agree import agree
from zerofold.comm import Comm
from zerofold.dealing import split
from zerofold.entry import Entry, dtypes_of, lay_out
from zerofold.memory import TierMemory
from zerofold.memory.arena import HostArena
from zerofold.memory.disk import PAGE, DiskStore
from zerofold.memory.disk_file import remove_leftovers
from zerofold.offload.budget import GIB, Budget, available
from zerofold.offload.plan import Plan, place
from zerofold.offload.sizes import UnitSize
from zerofold.offload.wishes import Offload
from zerofold.placement import Row, Tier, Tiers
from zerofold.plan.held import UPDATE_RING
from zerofold.plan.slabs import SlabSize, unit_size
from zerofold.plan.states import Widths
from zerofold.precision import Precision

_EXTENTS = 8  # at most, of one slab in the file, each rounded up to a page


@dataclass(frozen=True)
class Offloading:
    """Where the states of each unit go, and the memory for them; nothing is offloaded by default."""

    memory: TierMemory
    wish: Offload | None = None
    plan: Plan | None = None
    units: tuple[UnitSize, ...] = ()

    @property
    def tiers(self) -> Mapping[str, Tiers]:
        return {} if self.plan is None else self.plan.tiers

    @staticmethod
    def none(device: torch.device) -> Offloading:
        return Offloading(TierMemory(device, None, None))


def make_offloading(
    wish: Offload,
    assigned: dict[str, list[Entry]],
    row: Row,
    device: torch.device,
    precision: Precision,
    control: Comm,
    *,
    world: int,
    copies: int,
    adds_up: bool,
    live_bytes: int,
) -> Offloading:
    """All ranks must call it: they end with one plan, for the smallest budget among them. `copies`: ranks that share a
    second copy of the parameters, 0 for none."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", control.size))
    units = [
        _size(name, entries, row, precision, world=world, copies=copies, adds_up=adds_up)
        for name, entries in assigned.items()
    ]
    if wish.path is not None:
        folder = Path(wish.path)
        agree(control, lambda: _clear(folder))  # on all ranks before any of them looks how much room there is
    budget = agree(control, lambda: available(device, wish, here))
    everyone: list[tuple[list[UnitSize], Budget]] = control.all_gather_objects((units, budget))
    budgets = [each for _, each in everyone]
    least = Budget(
        min(each.device for each in budgets),
        min(each.host for each in budgets),
        None if budget.disk is None else min(each.disk or 0 for each in budgets),
        budget.one_memory,
    )
    largest = [
        replace(unit, trained=max(u[i].trained for u, _ in everyone), frozen=max(u[i].frozen for u, _ in everyone))
        for i, unit in enumerate(units)
    ]
    extra = live_bytes + (UPDATE_RING if device.type == "cuda" else 0)
    plan = agree(control, lambda: place(largest, wish, least, extra_device=extra))
    memory = agree(control, lambda: _memory(plan, wish, device, control.rank, len(units)))
    if control.rank == 0:
        print(plan.text(), file=sys.stderr, flush=True)
    return Offloading(memory, wish, plan, tuple(largest))


def _clear(folder: Path) -> None:
    with suppress(OSError):  # no such folder, or none to be read: who makes a file there says so
        remove_leftovers(folder)


def _memory(plan: Plan, wish: Offload, device: torch.device, rank: int, units: int) -> TierMemory:
    show = _Progress(plan.used(Tier.HOST)).show if rank == 0 else None
    arena = HostArena(pins=device.type == "cuda", show=show)
    on_disk = plan.used(Tier.NVME)
    if not on_disk:
        return TierMemory(device, arena, None)
    assert wish.path is not None
    room = on_disk + _EXTENTS * units * PAGE * 4
    store = DiskStore(wish.path, room, rank=rank, checksums=wish.checksums, most=wish.disk_limit)
    return TierMemory(device, arena, store)


def _size(
    name: str, entries: list[Entry], row: Row, precision: Precision, *, world: int, copies: int, adds_up: bool
) -> UnitSize:
    """Of the rank that keeps the most. A unit's states are planned by the widths of its largest trained parameter."""
    if not entries:  # the root, where every parameter is in a unit below it
        return UnitSize(name, 0)
    main = max(entries, key=lambda entry: entry.parameter.numel() * entry.parameter.requires_grad)
    widths = Widths.of_dtypes(dtypes_of(main), moments=2 * precision.moments.itemsize)
    slabs = [_slab(part, row, world) for part in split(name, entries)]
    accumulate = 2 if adds_up else 1
    return unit_size(name, slabs, row, widths, alone=world == 1, accumulate=accumulate, copies=copies)


def _slab(part: list[Entry], row: Row, world: int) -> SlabSize:
    layout, numel = lay_out(part, row, world), sum(entry.parameter.numel() for entry in part)
    return SlabSize(
        numel,
        layout.size,
        shard=max(layout.shard_size(place) for place in range(layout.world)),
        owned=numel,
        tensors=len(part),
        compute=dtypes_of(part[0]).compute.itemsize,
        is_trained=part[0].parameter.requires_grad,
    )


@dataclass
class _Progress:
    """A line now and then while a lot of memory is being pinned."""

    total: int
    last: float = field(default_factory=time.monotonic)

    def show(self, pinned: int, taken: int) -> None:
        now = time.monotonic()
        if now - self.last > 5:
            self.last = now
            print(f"pinning host memory: {pinned / GIB:.1f} of {self.total / GIB:.1f} GiB", file=sys.stderr, flush=True)
