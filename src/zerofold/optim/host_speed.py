"""How many cores the update on the host should have: tried at start, beside a main thread that is busy."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from zerofold.memory.host import usable_cores
from zerofold.optim import adam_cpu
from zerofold.optim.adam_strip import Numbers, Strip, update_strip
from zerofold.optim.host_pool import STRIP, HostPool
from zerofold.optim.host_worker import cores_of_process

ROUNDS = 3  # of each candidate, the fastest counts: what else runs on the machine only slows
CANDIDATE_SECONDS = 0.15  # no new round after that: a slow machine makes do with fewer
CALLER_SHARE = 0.8  # of the speed that the calling thread can have; below it the GPU would wait for its kernels
GOOD_SHARE = 0.9  # of the fastest
BOUND_GAIN = 1.1  # over the fastest that is not: threads bound to cores cannot give way to others that come there


@dataclass(frozen=True)
class HostSpeed:
    """How a worker should run, and what it then does."""

    threads: int
    cores: frozenset[int] | None
    """None for all that the process may use."""
    parameters_per_second: float
    fewer: int | None = None
    """Threads that may do better in training, where what they stand in the way of counts too."""


@dataclass(frozen=True)
class HostTrial:
    speed: HostSpeed
    caller_rate: float
    """Small operations a second that the calling thread got done meanwhile."""


Candidates = Sequence[tuple[int, frozenset[int] | None]]


def measure_host_update(elements: int = 2**25, *, candidates: Candidates | None = None) -> HostSpeed:
    """The threads and cores with which AdamW on the host is fastest, while this thread is as busy as in training.

    On an idle machine all cores would always win; but one core launches the GPU's kernels. So this thread runs small
    operations meanwhile, and a candidate that slows them down is out. Memory is what bounds the update, not cores: of
    those that are about as fast as the fastest, the one with the most threads gets the most of a memory that copies to
    and from the device use as well. Takes 16 bytes per element for a moment.

    >>> speed = measure_host_update(2**12, candidates=[(1, None)])
    >>> speed.threads, speed.parameters_per_second > 0
    (1, True)
    """
    return best_of(try_host_updates(elements, host_candidates() if candidates is None else candidates))


def best_of(trials: Sequence[HostTrial]) -> HostSpeed:
    """With the number of threads to try next, where another candidate has fewer."""
    enough = CALLER_SHARE * max(trial.caller_rate for trial in trials)
    speeds = [trial.speed for trial in trials if trial.caller_rate >= enough]
    fewer = [trial.speed.threads for trial in trials if trial.speed.cores is None]
    best = _best_of(speeds)
    return replace(best, fewer=max((threads for threads in fewer if threads < best.threads), default=None))


def _best_of(speeds: list[HostSpeed]) -> HostSpeed:
    free = max((speed.parameters_per_second for speed in speeds if speed.cores is None), default=0.0)
    speeds = [speed for speed in speeds if speed.cores is None or speed.parameters_per_second > BOUND_GAIN * free]
    fast = GOOD_SHARE * max(speed.parameters_per_second for speed in speeds)
    good = [speed for speed in speeds if speed.parameters_per_second >= fast]
    return max(good, key=lambda speed: (speed.threads, speed.parameters_per_second))


def try_host_updates(elements: int, candidates: Candidates) -> list[HostTrial]:
    """One trial of each; `measure_host_update` chooses among them."""
    states = Strip(
        torch.zeros(elements),
        torch.zeros(elements, dtype=torch.bfloat16),
        torch.zeros(elements),
        torch.zeros(elements),
        made=torch.zeros(elements, dtype=torch.bfloat16),
    )
    return [_try(states, threads, cores) for threads, cores in candidates]


def host_candidates() -> list[tuple[int, frozenset[int] | None]]:
    """Numbers of threads, and cores to bind them to, worth a trial here: three quarters of the cores and less.

    The others launch kernels, run backward and move states; and two "cores" are often one with two names. On an H200's
    host with 16, runs with 14 and 15 threads were slower than runs with 6 to 8, but they were different runs on a noisy
    machine. In one process, with all states on the host, steps took 1.50 s with 4 threads, 1.42 with 6, 1.33 with 12.

    >>> (max(1, usable_cores() // 2), None) in host_candidates()
    True
    """
    count, cores = usable_cores(), cores_of_process()
    half = max(1, count // 2)
    candidates: list[tuple[int, frozenset[int] | None]] = [
        (threads, None) for threads in dict.fromkeys((count * 3 // 4, half, half * 3 // 4)) if threads >= 1
    ]
    # Where a quota grants less time than there are cores, the scheduler finds free ones better than a mask.
    if count == len(cores) and count > 1 and hasattr(os, "sched_setaffinity"):
        others = sorted(cores - {_core_of_this_thread()})
        candidates.append((half, frozenset(others[-half:])))
    return candidates


def _core_of_this_thread() -> int:
    return int(ctypes.CDLL(None).sched_getcpu()) if sys.platform == "linux" else 0


def _try(states: Strip, threads: int, cores: frozenset[int] | None) -> HostTrial:
    pool, seconds, rooms = HostPool(threads, cores), list[float](), threading.local()
    numbers = Numbers([torch.tensor(1.0)], None, True, 1e-3, 0.9, 0.95, 0.1, 1e-8, False)
    flat = [tensor.split(STRIP) for tensor in states if tensor is not None]

    def update(strip: Strip) -> None:
        if not hasattr(rooms, "room"):
            rooms.room = torch.empty(adam_cpu.BLOCK)
        update_strip(strip, numbers, rooms.room)

    blocks = [partial(update, Strip(*parts)) for parts in zip(*flat, strict=True)]
    pool.submit(blocks, lambda: None).wait()  # touches the memory
    small, done, begin = torch.zeros(1), 0, time.perf_counter()
    for _ in range(ROUNDS):
        start = time.perf_counter()
        if seconds and start - begin > CANDIDATE_SECONDS:
            break
        job = pool.submit(blocks, lambda: None)
        while not job.is_done:
            small.add_(1)
            done += 1
        job.wait()
        seconds.append(time.perf_counter() - start)
    passed = time.perf_counter() - begin
    pool.close()
    return HostTrial(HostSpeed(threads, cores, states.master.numel() / min(seconds)), done / passed)
