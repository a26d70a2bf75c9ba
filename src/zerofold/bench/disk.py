"""What a disk itself can do: the ceiling of the NVMe tier, measured without it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from zerofold.memory.disk import PAGE, DiskError

MIXES = ("read", "write", "mixed")
Job = tuple[Callable[[int, list[mmap.mmap], int], int], int]  # the call and its offset


def raw_rate(
    folder: str | os.PathLike[str], nbytes: int, mix: str, *, threads: int = 4, block: int = 8 * 2**20
) -> float:
    """GB/s of plain O_DIRECT transfers of `nbytes`, in blocks and threads as the NVMe tier uses them.

    "mixed" reads one half of the file and writes the other at the same time, `nbytes` in all.

    >>> raw_rate(tempfile.gettempdir(), 1 << 20, "mixed", block=1 << 18) > 0
    True
    """
    if mix not in MIXES:
        raise ValueError(f"mix={mix!r} does not exist; choose one of {', '.join(MIXES)}")
    if block <= 0 or block % PAGE or nbytes < 2 * block:
        raise ValueError(f"nbytes={nbytes}, block={block}: block must be a multiple of {PAGE}, nbytes two or more")
    offsets = range(0, nbytes - block + 1, block)
    half = len(offsets) // 2
    with _unnamed_file(folder, nbytes) as fd:
        # Blocks that were never written read as zeros without a disk, and cost more to write the first time.
        _seconds(fd, [(os.pwritev, offset) for offset in offsets], threads, block)
        if mix == "mixed":
            pairs = zip(offsets[:half], offsets[half:], strict=False)
            jobs: list[Job] = [job for low, high in pairs for job in ((os.preadv, low), (os.pwritev, high))]
        else:
            jobs = [(os.preadv if mix == "read" else os.pwritev, offset) for offset in offsets]
        return len(jobs) * block / _seconds(fd, jobs, threads, block) / 1e9


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
