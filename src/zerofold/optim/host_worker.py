"""The thread that updates offloaded states, and how many cores it should have.

    main thread    [ forward ][ backward ][ step ][ forward … ]        launches kernels; needs a core to itself
                                            │ submit      ▲ wait
    worker                                  [ u0 ][ u1 ][ u2 ]         in order, on its own team of threads

OpenMP keeps a team for each thread that starts one, and the team has the size and the cores of that thread. So both
are set inside the worker, and the main thread's stay as they are.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from zerofold.memory.host import usable_cores
from zerofold.optim.onepass import AdamSettings, AdamTensors, adam

ROUNDS = 3  # of each candidate, the fastest counts: what else runs on the machine only slows
CANDIDATE_SECONDS = 0.15  # no new round after that: a slow machine makes do with fewer
CALLER_SHARE = 0.8  # of the speed that the calling thread can have; below it the GPU would wait for its kernels


@dataclass
class _Era:
    """The work submitted between two failures: when one fails, the rest of its era fails with it."""

    failure: BaseException | None = None


@dataclass(frozen=True)
class Job:
    """Work that was submitted. Each has to be waited for by somebody, or its failure stays unknown until `close`."""

    _worker: HostWorker
    _era: _Era
    _failure: Future[BaseException | None]

    @property
    def is_done(self) -> bool:
        """Over, be it with success or without."""
        return self._failure.done()

    def wait(self) -> None:
        """Returns when the work is done, and raises what it raised: the same exception, with its traceback."""
        failure = self._failure.result()
        if failure is not None:
            self._worker._start_anew(self._era)
            raise failure


class HostWorker:
    """One thread that runs submitted work in order, with its own number of torch threads and its own cores.

    When work fails, what was submitted after it is not run but fails with the same exception, and so does all that is
    submitted until somebody has waited for a failed job: a step of which one unit was not updated must not go on as
    if it were whole. After that, new work runs again; what was submitted before still does not.

    `submit`, `wait` and `close` are for one thread. A process that ends first finishes what was submitted.

    >>> worker, done = HostWorker(threads=1, cores=None), []
    >>> job = worker.submit(lambda: done.append(torch.get_num_threads()))
    >>> job.wait(); done
    [1]
    >>> worker.close()
    """

    def __init__(self, threads: int, cores: frozenset[int] | None) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads}: a worker needs 1 or more")
        if cores is not None and not cores <= _cores():
            raise ValueError(f"cores={sorted(cores)}: this process may use {sorted(_cores())}")
        self._era = _Era()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="zerofold host update")
        of_caller = torch.get_num_threads()
        try:
            self._thread.submit(_set_up_thread, threads, cores).result()
        finally:
            torch.set_num_threads(of_caller)  # the worker's call also set the number for threads yet to come

    def submit(self, work: Callable[[], None]) -> Job:
        """Queues the work and returns at once."""
        era = self._era
        return Job(self, era, self._thread.submit(_run, era, work))

    def close(self) -> None:
        """Returns when all work is done; raises a failure that nobody has waited for."""
        self._thread.shutdown()
        if self._era.failure is not None:
            raise self._era.failure

    def _start_anew(self, failed: _Era) -> None:
        if self._era is failed:
            self._era = _Era()


def _run(era: _Era, work: Callable[[], None]) -> BaseException | None:
    if era.failure is None:
        try:
            work()
        except BaseException as error:
            era.failure = error
    return era.failure


def _set_up_thread(threads: int, cores: frozenset[int] | None) -> None:
    if cores is not None:
        os.sched_setaffinity(0, cores)  # 0 is this thread; its team is started later and inherits the mask
    torch.get_num_threads()  # a thread's first question sets its number to the default, so it comes before
    torch.set_num_threads(threads)


def _cores() -> frozenset[int]:
    """Those that this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


@dataclass(frozen=True)
class HostSpeed:
    """How a worker should run, and what it then does."""

    threads: int
    cores: frozenset[int] | None
    """None for all that the process may use."""
    parameters_per_second: float


@dataclass(frozen=True)
class HostTrial:
    speed: HostSpeed
    caller_rate: float
    """Small operations a second that the calling thread got done meanwhile."""


Candidates = Sequence[tuple[int, frozenset[int] | None]]


def measure_host_update(elements: int = 2**25, *, candidates: Candidates | None = None) -> HostSpeed:
    """The threads and cores with which AdamW on the host is fastest, while this thread is as busy as in training.

    On an idle machine all cores would always win; but one core launches the GPU's kernels, and an OpenMP team is as
    slow as its slowest thread. So this thread runs small operations meanwhile, and a candidate that slows them down
    is out. Takes 16 bytes per element for a moment.

    >>> speed = measure_host_update(2**12, candidates=[(1, None)])
    >>> speed.threads, speed.parameters_per_second > 0
    (1, True)
    """
    trials = try_host_updates(elements, host_candidates() if candidates is None else candidates)
    enough = CALLER_SHARE * max(trial.caller_rate for trial in trials)
    speeds = [trial.speed for trial in trials if trial.caller_rate >= enough]
    return max(speeds, key=lambda speed: speed.parameters_per_second)


def try_host_updates(elements: int, candidates: Candidates) -> list[HostTrial]:
    """One trial of each; `measure_host_update` chooses among them."""
    states = AdamTensors(
        torch.zeros(elements),
        torch.zeros(elements, dtype=torch.bfloat16),
        torch.zeros(elements),
        torch.zeros(elements),
        torch.zeros(elements, dtype=torch.bfloat16),
        step=1,
        seed=0,
    )
    return [_try(states, threads, cores) for threads, cores in candidates]


def host_candidates() -> list[tuple[int, frozenset[int] | None]]:
    """Numbers of threads, and cores to bind them to, worth a trial here.

    >>> (usable_cores(), None) in host_candidates()
    True
    """
    count, cores = usable_cores(), _cores()
    candidates: list[tuple[int, frozenset[int] | None]] = [
        (threads, None) for threads in dict.fromkeys((count, count - 1, count - 2, count // 2)) if threads >= 1
    ]
    # Where a quota grants less time than there are cores, the scheduler finds free ones better than a mask.
    if count == len(cores) and count > 1 and hasattr(os, "sched_setaffinity"):
        others = sorted(cores - {_core_of_this_thread()})
        candidates += [(len(kept), frozenset(kept)) for kept in (others[: count - 1], others[: count - 2]) if kept]
    return candidates


def _core_of_this_thread() -> int:
    return int(ctypes.CDLL(None).sched_getcpu()) if sys.platform == "linux" else 0


def _try(states: AdamTensors, threads: int, cores: frozenset[int] | None) -> HostTrial:
    settings = AdamSettings(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    seconds: list[float] = []

    def update() -> None:
        start = time.perf_counter()
        if len(seconds) > 1 and start > deadline:
            return
        adam([states], settings)
        seconds.append(time.perf_counter() - start)

    worker = HostWorker(threads, cores)
    worker.submit(update).wait()  # starts the team, and touches the memory
    small, done, begin = torch.zeros(1), 0, time.perf_counter()
    deadline = begin + CANDIDATE_SECONDS
    jobs = [worker.submit(update) for _ in range(ROUNDS)]
    while not jobs[-1].is_done:
        small.add_(1)
        done += 1
    passed = time.perf_counter() - begin
    for job in jobs:
        job.wait()
    worker.close()
    speed = HostSpeed(threads, cores, states.master.numel() / min(seconds[1:]))
    return HostTrial(speed, done / passed)
