"""The updates of a model's offloaded states, made when the first step needs them, in the way measured to be fastest."""

from __future__ import annotations

import torch

from zerofold.engine import Engine
from zerofold.optim.away.updates import AwayUpdates, Way
from zerofold.optim.host_worker import HostSpeed, measure_host_update

FIRST_SHARE = 0.6  # of the chunks go through the device, until steps have been timed


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
    return Way(speed.threads, speed.cores, FIRST_SHARE if share is None else share, tunes=share is None)
