"""Cores that update in the background, each on its own: no team, no barrier, one queue of blocks.

queue     [c0.0][c0.1][c0.2][c1.0][c1.1] …         blocks of chunk 0, then of chunk 1
core 0    [c0.0      ][c1.0     ] …                whoever is free takes the next; who ends a chunk's last block
core 1    [c0.1   ][c0.2 ]└ chunk 0 is done        tells who waits for it

An OpenMP team would wait for its slowest thread after every operation. And as soon as a process has more teams than
cores, libgomp puts waiting threads to sleep, which costs more than an operation on a block that fits a cache.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue

import torch

from zerofold.optim.host_worker import Era

# Elements that a core updates at a time: 8 MiB of each state. The interpreter's lock is asked for a few times in the
# 10 ms that this takes, so that a dozen cores and the main thread get along with it.
STRIP = 2**21

Block = Callable[[], None]


class PoolJob:
    """Blocks that were submitted together."""

    def __init__(self, pool: HostPool, era: Era, blocks: Sequence[Block], then: Block) -> None:
        self._pool, self.era, self._left, self._then = pool, era, len(blocks), then
        self._lock = threading.Lock()
        self._over: Future[BaseException | None] = Future()

    @property
    def is_done(self) -> bool:
        return self._over.done()

    def wait(self) -> None:
        """Returns when all blocks are done, and raises what one of them raised."""
        failure = self._over.result()
        if failure is not None:
            self._pool.start_anew(self.era)
            raise failure

    def run(self, block: Block) -> None:
        """In a thread of the pool; the last one ends the job."""
        self._try(block)
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            then, self._then = self._then, _nothing  # which may hold who holds this job: a circle, and all in it
            self._try(then)
            self._over.set_result(self.era.failure)

    def _try(self, work: Block) -> None:
        if self.era.failure is None:
            try:
                work()
            except BaseException as error:
                self.era.failure = error


class HostPool:
    """Threads that run blocks in the order of submission, each with one torch thread.

    When a block fails, what was submitted after it is not run but fails with the same exception, until somebody has
    waited for it: a step of which a part was not updated must not go on as if it were whole.

    A process that ends first finishes what was submitted: a thread that is ended inside torch would abort it.

    >>> pool, done = HostPool(2), []
    >>> pool.submit([lambda: done.append(torch.get_num_threads())] * 3, lambda: done.append(0)).wait()
    >>> done
    [1, 1, 1, 0]
    >>> pool.close()
    """

    def __init__(self, threads: int, cores: frozenset[int] | None = None) -> None:
        if threads < 1:
            raise ValueError(f"threads={threads}: a pool needs 1 or more")
        self._queue: _Queue = SimpleQueue()
        self._era = Era()
        ready = threading.Barrier(threads + 1)
        of_caller = torch.get_num_threads()
        serving = (self._queue, cores, ready)  # without the pool, so that one which nobody closes can go
        self._threads = [threading.Thread(target=_serve, args=serving, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._queue, self._threads)  # at exit at the latest
        ready.wait()
        torch.set_num_threads(of_caller)  # the threads' calls also set the number for threads yet to come

    def submit(self, blocks: Sequence[Block], then: Block) -> PoolJob:
        """Queues the blocks and returns at once; `then` runs after the last of them."""
        job = PoolJob(self, self._era, blocks or [_nothing], then)
        for block in blocks or [_nothing]:
            self._queue.put((job, block))
        return job

    def start_anew(self, failed: Era) -> None:
        if self._era is failed:
            self._era = Era()

    def close(self) -> None:
        """Returns when all blocks are done."""
        self._end()


_Queue = SimpleQueue[tuple[PoolJob, Block] | None]


def _serve(queue: _Queue, cores: frozenset[int] | None, ready: threading.Barrier) -> None:
    torch.get_num_threads()  # a thread's first question sets its number to the default, so it comes before
    torch.set_num_threads(1)
    if cores is not None:
        with suppress(OSError):  # where the cores of the process have changed, any will do
            os.sched_setaffinity(0, cores)  # 0 is this thread
    ready.wait()
    while (taken := queue.get()) is not None:
        job, block = taken
        job.run(block)
        del taken, job, block  # nothing is kept alive while this thread waits


def _end(queue: _Queue, threads: Sequence[threading.Thread]) -> None:
    for _ in threads:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():  # the garbage collector ends a pool wherever it likes
            thread.join()


def _nothing() -> None:
    pass
