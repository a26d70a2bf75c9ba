"""What a disk itself can do: the ceiling of the NVMe tier, measured without it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from zerofold.memory.disk import PAGE, DiskError

KINDS = ("read", "write", "mixed")
ORDERS = ("mixed", "in bursts")  # of half read and half written: which is faster depends on the disk
BURST = 768 * 2**20  # bytes, as the update of states in a file has them
Job = tuple[Callable[[int, list[mmap.mmap], int], int], int]  # the call and its offset


def raw_rates(
    folder: str | os.PathLike[str],
    nbytes: int,
    mixes: Sequence[str] = ORDERS,
    *,
    threads: int = 4,
    block: int = 8 * 2**20,
) -> dict[str, float]:
    """GB/s of plain O_DIRECT transfers of `nbytes` each, in blocks and threads as the NVMe tier uses them, by mix.

    "mixed" reads one half of the file and writes the other at the same time, `nbytes` in all; "in bursts" in turns.

    >>> rates = raw_rates(tempfile.gettempdir(), 1 << 20, block=1 << 18)
    >>> list(rates), min(rates.values()) > 0
    (['mixed', 'in bursts'], True)
    """
    for mix in mixes:
        if mix not in (*KINDS, *ORDERS):
            raise ValueError(f"mix={mix!r} does not exist; choose from {', '.join(dict.fromkeys((*KINDS, *ORDERS)))}")
    with raw_disk(folder, nbytes, threads=threads, block=block) as rate:
        return {mix: rate(mix) for mix in mixes}


@contextmanager
def raw_disk(
    folder: str | os.PathLike[str], nbytes: int, *, threads: int = 4, block: int = 8 * 2**20
) -> Iterator[Callable[[str], float]]:
    """The same as often as wanted, in one file: called with a mix, it moves `nbytes` and tells GB/s.

    >>> with raw_disk(tempfile.gettempdir(), 1 << 20, block=1 << 18) as rate:
    ...     rate("mixed") > 0
    True
    """
    if block <= 0 or block % PAGE or nbytes < 2 * block:
        raise ValueError(f"nbytes={nbytes}, block={block}: block must be a multiple of {PAGE}, nbytes two or more")
    offsets = range(0, nbytes - block + 1, block)
    with _unnamed_file(folder, nbytes) as fd:
        # Blocks that were never written read as zeros without a disk, and cost more to write the first time.
        _seconds(fd, [(os.pwritev, offset) for offset in offsets], threads, block)

        def rate(mix: str) -> float:
            jobs = list(_jobs(mix, offsets, block))
            return len(jobs) * block / _seconds(fd, jobs, threads, block) / 1e9

        yield rate


def _jobs(mix: str, offsets: range, block: int) -> Iterator[Job]:
    if mix not in ORDERS:
        yield from ((os.preadv if mix == "read" else os.pwritev, offset) for offset in offsets)
        return
    half = len(offsets) // 2
    together = 1 if mix == "mixed" else max(1, min(BURST // block, half // 2))
    for first in range(0, half, together):
        last = min(first + together, half)
        yield from ((os.preadv, offset) for offset in offsets[first:last])
        yield from ((os.pwritev, offset) for offset in offsets[half + first : half + last])


@contextmanager
def _unnamed_file(folder: str | os.PathLike[str], nbytes: int) -> Iterator[int]:
    """Open for O_DIRECT, and gone with this process whatever happens."""
    fd, name = tempfile.mkstemp(prefix="zerofold-raw-", dir=folder)
    os.unlink(name)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)
        yield fd
    except OSError as error:
        text = f"{folder}: {nbytes:,} bytes cannot be moved with O_DIRECT there ({error.strerror}); name a local disk"
        raise DiskError(error.errno or errno.EIO, text) from error
    finally:
        os.close(fd)


def _seconds(fd: int, jobs: list[Job], threads: int, block: int) -> float:
    left = iter(jobs)  # shared: each thread takes the next

    def work() -> None:
        with mmap.mmap(-1, block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
            memory.madvise(mmap.MADV_HUGEPAGE)  # what is in one piece in memory moves fastest
            memory[:] = os.urandom(block)  # no disk can take it for zeros
            ready.wait()
            for move, offset in left:
                if move(fd, [memory], offset) != block:
                    raise OSError(errno.EIO, f"less than {block:,} bytes moved at {offset:,}")

    ready = threading.Barrier(threads + 1)
    with ThreadPoolExecutor(threads) as pool:
        workers = [pool.submit(work) for _ in range(threads)]
        ready.wait()
        start = time.perf_counter()
        for worker in workers:
            worker.result()
        return time.perf_counter() - start
