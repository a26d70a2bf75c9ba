"""The updates of a model's offloaded states, made when the first step needs them, in the way measured to be fastest."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

import torch

from zerofold.engine import Engine
from zerofold.offload.budget import GIB, device_memory
from zerofold.offload.wishes import AUTO
from zerofold.optim.away.chunks import CHUNK
from zerofold.optim.away.slots import BYTES, Filling
from zerofold.optim.away.updates import AwayUpdates, Way
from zerofold.optim.host_speed import HostSpeed, measure_host_update
from zerofold.placement import Tier

FIRST_SHARE = 0.65  # of the elements go through the device, until steps have been timed
SAFE_PART = 0.9  # of the device's memory
SPARE_PART = 1 / 5  # of what is left of that, for gradients and chunks that are on the device between steps
MOST_AHEAD = 64  # chunks, 12.9 GB; with 96 steps were no shorter
FEW_AHEAD = 21  # where parameters are away as well: the device's memory is wanted for something else


class DeviceMemory(NamedTuple):
    """Bytes of the device after a forward and a backward, before the update."""

    peak: int
    held: int

    @staticmethod
    def now(device: torch.device) -> DeviceMemory:
        if device.type != "cuda":
            return DeviceMemory(0, 0)
        return DeviceMemory(torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device))

    def with_new_states(self, device: torch.device) -> DeviceMemory:
        """As a later step will find it: what was made since, moments for instance, stays."""
        made = max(0, DeviceMemory.now(device).held - self.held)
        return DeviceMemory(self.peak + made, self.held + made)


def updates_of(engine: Engine, before: DeviceMemory | None) -> AwayUpdates:
    """`before` the first step made its states, where this is the first step."""
    found = engine.updates
    if not isinstance(found, AwayUpdates):
        memory = engine.offloading.memory
        if memory.arena is not None:
            memory.arena.wait()  # copies from memory that is not pinned yet would be right, and slow
        used = (before or DeviceMemory.now(engine.device)).with_new_states(engine.device)
        found = engine.updates = AwayUpdates(engine.transfers, memory, engine.slabs(), _way(engine, used))
    elif found.count == 2 and found.way.filling is None:  # only from the second step on gradients stay on the device
        _advise(engine)
    return found


def _advise(engine: Engine) -> None:
    """The plan has guessed what activations need; by now whole steps have shown it, with all that lies unused between
    blocks."""
    plan, wish = engine.offloading.plan, engine.offloading.wish
    if engine.device.type != "cuda" or engine.groups.control.rank != 0 or plan is None or wish is None:
        return
    unused = plan.budget.device - torch.cuda.max_memory_reserved(engine.device)
    if wish.optimizer == AUTO and wish.reserve is None and unused > plan.budget.device / 10:
        needed = max(0, plan.reserve - unused + plan.budget.device // 20)
        print(
            f"offload: {unused / GIB:.1f} GiB of the device were not needed until now; "
            f"'reserve': '{needed / GIB:.1f}GiB' in offload= would use most of it for states",
            file=sys.stderr,
            flush=True,
        )


def _way(engine: Engine, used: DeviceMemory) -> Way:
    wish = engine.offloading.wish
    threads = None if wish is None else wish.threads
    share = None if wish is None else wish.device_share
    if engine.device.type != "cuda":  # the cores that would update in the background are those that compute
        return Way(threads or torch.get_num_threads(), None, 0.0, tunes=False)
    speed = HostSpeed(threads, None, 0.0) if threads is not None else measure_host_update()
    tunes = share is None
    way = Way(
        speed.threads, speed.cores, FIRST_SHARE if share is None else share, tunes, speed.fewer if tunes else None
    )
    # Gradients that stay take what activations leave. Only beyond that do they cost anything.
    room, gradients = _room_on_device(engine, used), max(0, used.held + _gradient_bytes(engine) - used.peak)
    way = replace(way, keeps_gradients=gradients < room / 2)
    if wish is not None and wish.optimizer == AUTO:  # free to choose: states that stay need not move
        fills = wish.device_limit is not None and wish.gradients == AUTO
        return replace(way, filling=Filling(engine.device, _limit(engine))) if fills else way
    keeps = way.keeps_gradients
    chunks = int((room - gradients * keeps) / _slot_bytes(gradient_stays=not keeps)) if way.device_share > 0 else 0
    if chunks < 1:
        return way
    parameters_go_up = any(slab.is_away and slab.tiers.parameters is not Tier.DEVICE for slab in engine.slabs())
    ahead = min(chunks, FEW_AHEAD if parameters_go_up else MOST_AHEAD)
    alone = engine.groups.gather.size == 1 and engine.groups.across is None
    early = alone and not any(slab.home.adds_up for slab in engine.slabs())
    return replace(way, ahead=ahead if keeps or early else 0, early=early)


def _room_on_device(engine: Engine, used: DeviceMemory) -> float:
    """A part of the device's memory that nobody has needed until now. None of it where somebody has said that gradients
    go to the host; all of it where somebody has set a limit for us to fill, and nothing where there is none: there the
    plan has said what the device will hold."""
    wish = engine.offloading.wish
    if wish is None or wish.gradients != AUTO:
        return 0.0
    if wish.optimizer == AUTO:
        return 0.0 if wish.device_limit is None else _limit(engine) - torch.cuda.max_memory_reserved(engine.device)
    return SPARE_PART * (SAFE_PART * _limit(engine) - used.peak)


def _limit(engine: Engine) -> int:
    """Bytes of the device for this rank."""
    wish, memory = engine.offloading.wish, device_memory(engine.device)
    return memory if wish is None or wish.device_limit is None else min(memory, wish.device_limit)


def _slot_bytes(*, gradient_stays: bool) -> int:
    """Of a chunk, with its gradient where that is not counted elsewhere."""
    return CHUNK * (BYTES + (2 if gradient_stays else 0))


def _gradient_bytes(engine: Engine) -> int:
    streamed = [slab for slab in engine.slabs() if slab.requires_grad and slab.tier is Tier.HOST]
    return sum(slab.raw_shard.numel() * slab.gradient_dtype.itemsize for slab in streamed)
