"""A thread beside the main one, with a team of its own.

    main thread    [ forward ][ backward ][ step ][ forward … ]        launches kernels; needs a core to itself
                                            │ submit      ▲ wait
    worker                                  [ u0 ][ u1 ][ u2 ]         in order, on its own team of threads

OpenMP keeps a team for each thread that starts one, and the team has the size and the cores of that thread. So both
are set inside the worker, and the main thread's stay as they are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch


@dataclass
class Era:
    """The work submitted between two failures: when one fails, the rest of its era fails with it."""

    failure: BaseException | None = None


@dataclass(frozen=True)
class Job:
    """Work that was submitted. Each has to be waited for by somebody, or its failure stays unknown until `close`."""

    _worker: HostWorker
    _era: Era
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
        if cores is not None and not cores <= cores_of_process():
            raise ValueError(f"cores={sorted(cores)}: this process may use {sorted(cores_of_process())}")
        self._era = Era()
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

    def _start_anew(self, failed: Era) -> None:
        if self._era is failed:
            self._era = Era()


def _run(era: Era, work: Callable[[], None]) -> BaseException | None:
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


def cores_of_process() -> frozenset[int]:
    """Those that this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
