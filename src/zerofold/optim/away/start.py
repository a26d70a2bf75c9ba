"""The updates of a model's offloaded states, made when the first step needs them, in the way measured to be fastest."""

from __future__ import annotations

import sys

import torch

from zerofold.engine import Engine
from zerofold.offload.budget import GIB, device_memory
from zerofold.offload.wishes import AUTO
from zerofold.optim.away.chunks import CHUNK
from zerofold.optim.away.updates import AwayUpdates, Way
from zerofold.optim.host_speed import HostSpeed, measure_host_update
from zerofold.placement import Tier

FIRST_SHARE = 0.65  # of the elements go through the device, until steps have been timed
SAFE_PART = 0.9  # of the device's memory
SPARE_PART = 1 / 5  # of what is left of that, for gradients and chunks that wait on the device
FILLED_PART = 0.95  # instead of both, of a limit that "auto" is to fill
MOST_AHEAD = 64  # chunks, 12.9 GB
FEW_AHEAD = 21  # where parameters are away as well: the device's memory is wanted for something else


def updates_of(engine: Engine) -> AwayUpdates:
    found = engine.updates
    if not isinstance(found, AwayUpdates):
        memory = engine.offloading.memory
        if memory.arena is not None:
            memory.arena.wait()  # copies from memory that is not pinned yet would be right, and slow
        _advise(engine)
        found = engine.updates = AwayUpdates(engine.transfers, memory, engine.slabs(), _way(engine))
    return found


def _advise(engine: Engine) -> None:
    """The plan has guessed what activations need; by now a forward and a backward have shown it."""
    plan, wish = engine.offloading.plan, engine.offloading.wish
    if engine.device.type != "cuda" or engine.groups.control.rank != 0 or plan is None or wish is None:
        return
    unused = plan.budget.device - torch.cuda.max_memory_allocated(engine.device)
    if wish.optimizer == AUTO and wish.reserve is None and unused > plan.budget.device / 10:
        needed = max(0, plan.reserve - unused + plan.budget.device // 20)
        print(
            f"offload: {unused / GIB:.1f} GiB of the device were not needed until now; "
            f"'reserve': '{needed / GIB:.1f}GiB' in offload= would use most of it for states",
            file=sys.stderr,
            flush=True,
        )


def _way(engine: Engine) -> Way:
    wish = engine.offloading.wish
    threads = None if wish is None else wish.threads
    share = None if wish is None else wish.device_share
    if engine.device.type != "cuda":  # the cores that would update in the background are those that compute
        return Way(threads or torch.get_num_threads(), None, 0.0, tunes=False)
    speed = HostSpeed(threads, None, 0.0) if threads is not None else measure_host_update()
    first = FIRST_SHARE if share is None else share
    room = _room_on_device(engine)
    gradients = _gradient_bytes(engine)
    keeps = gradients < room / 2
    alone = engine.groups.gather.size == 1 and engine.groups.across is None
    early = alone and not any(slab.home.adds_up for slab in engine.slabs())
    slot = CHUNK * (3 * 4 + 2 + (0 if keeps else 2))  # states, a copy, and a gradient that stays
    ahead = int((room - (gradients if keeps else 0)) / slot) if (keeps or early) and first > 0 else 0
    parameters_go_up = any(slab.is_away and slab.tiers.parameters is not Tier.DEVICE for slab in engine.slabs())
    most = FEW_AHEAD if parameters_go_up else MOST_AHEAD
    ahead = max(0, min(ahead, most))
    return Way(speed.threads, speed.cores, first, share is None, keeps_gradients=keeps, ahead=ahead, early=early)


def _room_on_device(engine: Engine) -> float:
    """A part of the device's memory that nobody has needed until now; a forward and a backward have been. None of it
    where somebody has said that gradients go to the host; nearly all of it where somebody has set a limit to fill."""
    wish = engine.offloading.wish
    if wish is None or wish.gradients != AUTO:
        return 0.0
    limit, used = device_memory(engine.device), torch.cuda.max_memory_allocated(engine.device)
    if wish.optimizer == AUTO and wish.device_limit is not None:
        return FILLED_PART * min(limit, wish.device_limit) - used
    limit = limit if wish.device_limit is None else min(limit, wish.device_limit)
    return SPARE_PART * (SAFE_PART * limit - used)


def _gradient_bytes(engine: Engine) -> int:
    streamed = [slab for slab in engine.slabs() if slab.requires_grad and slab.tier is Tier.HOST]
    return sum(slab.master.numel() * slab.gradient_dtype.itemsize for slab in streamed)
