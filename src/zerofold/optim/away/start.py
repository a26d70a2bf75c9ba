"""The updates of a model's offloaded states, made when the first step needs them, in the way measured to be fastest."""

from __future__ import annotations

import torch

from zerofold.engine import Engine
from zerofold.offload.budget import device_memory
from zerofold.offload.wishes import AUTO
from zerofold.optim.away.updates import AwayUpdates, Way
from zerofold.optim.host_worker import HostSpeed, measure_host_update
from zerofold.placement import Tier

FIRST_SHARE = 0.6  # of the elements go through the device, until steps have been timed
SAFE_PART = 0.9  # of the device's memory


def updates_of(engine: Engine) -> AwayUpdates:
    found = engine.updates
    if not isinstance(found, AwayUpdates):
        memory = engine.offloading.memory
        if memory.arena is not None:
            memory.arena.wait()  # copies from memory that is not pinned yet would be right, and slow
        found = engine.updates = AwayUpdates(engine.device, memory, engine.slabs(), _way(engine))
    return found


def _way(engine: Engine) -> Way:
    wish = engine.offloading.wish
    threads = None if wish is None else wish.threads
    share = None if wish is None else wish.device_share
    if engine.device.type != "cuda":  # the cores that would update in the background are those that compute
        return Way(threads or torch.get_num_threads(), None, 0.0, tunes=False)
    speed = HostSpeed(threads, None, 0.0) if threads is not None else measure_host_update()
    first = FIRST_SHARE if share is None else share
    return Way(speed.threads, speed.cores, first, tunes=share is None, keeps_gradients=_has_room(engine, first))


def _has_room(engine: Engine, share: float) -> bool:
    """Whether gradients of what streams through the device can wait there. By now a backward has shown what it needs;
    who sends parameters away as well, or says where gradients go, wants the device's memory for something else."""
    wish = engine.offloading.wish
    tiers = [slab.tiers for slab in engine.slabs() if slab.is_away]
    if wish is None or wish.gradients != AUTO or any(each.parameters is not Tier.DEVICE for each in tiers):
        return False
    streamed = [slab for slab in engine.slabs() if slab.requires_grad and slab.tier is Tier.HOST]
    wanted = share * sum(slab.master.numel() * slab.gradient_dtype.itemsize for slab in streamed)
    limit = device_memory(engine.device)
    limit = limit if wish.device_limit is None else min(limit, wish.device_limit)
    return torch.cuda.max_memory_allocated(engine.device) + wanted < SAFE_PART * limit
