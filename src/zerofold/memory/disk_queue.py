"""Requests of the NVMe tier, cut into blocks and served by a few threads.

    read  ──► [r r r r]─┐
                        ├─ one of each in turn ──► thread 0 … n: preadv, pwritev (both release the GIL)
    write ──► [w w w w]─┘

Requests that touch the same bytes are served in the order in which they were made; all others in any order. Some disks
lose by a mix: while `in_bursts`, reads go on as long as there are any, and then writes.
"""

from __future__ import annotations

import errno
import threading
import time
import warnings
from collections import deque

from zerofold.memory.disk_blocks import Block
from zerofold.memory.disk_checks import Checksums, Faults
from zerofold.memory.disk_file import DiskError, WorkFile

STUCK_SECONDS = 60.0  # without one finished block


class Request:
    """A read or write under way; `wait` returns when all of it is done and raises DiskError if it failed."""

    def __init__(self, queue: BlockQueue, what: str, *, keep: object, is_write: bool) -> None:
        self.what = what
        self.is_write = is_write
        self.blocks: list[Block] = []  # hold the caller's memory until the request is done
        self.error: DiskError | None = None
        self.unfinished = 0  # blocks
        self.earlier = 0  # requests on the same bytes that must be done before
        self.later: list[Request] = []
        self._queue = queue
        self._keep = keep  # the store, whose end would wait for requests: it has none while there are any
        self._done = threading.Event()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def set_done(self) -> None:
        self.blocks = []
        self._done.set()

    def touches(self, offset: int, end: int) -> bool:
        return self.blocks[0].offset < end and offset < self.blocks[-1].end

    def settle(self) -> None:
        """Waits, whatever comes of it."""
        warned = False
        while not self._done.wait(STUCK_SECONDS):
            seconds = time.monotonic() - self._queue.last_progress
            if seconds >= STUCK_SECONDS and not warned:
                warned = True
                warnings.warn(
                    f"the disk has not answered for {seconds:.0f} s; still waiting for the {self.what}: a thread "
                    "inside the kernel cannot be interrupted; see `dmesg` and the disk's health",
                    stacklevel=3,
                )

    def wait(self) -> None:
        self.settle()
        if self.error is not None:
            raise DiskError(self.error.errno, self.error.strerror) from self.error


class Meter:
    """Bytes moved, and the time in which at least one block was moving."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._seconds = 0.0
        self._moving = 0
        self._since = 0.0

    def start(self) -> None:
        if self._moving == 0:
            self._since = time.monotonic()
        self._moving += 1

    def stop(self, nbytes: int) -> None:
        self._moving -= 1
        self.nbytes += nbytes
        if self._moving == 0:
            self._seconds += time.monotonic() - self._since

    @property
    def rate(self) -> float:
        seconds = self._seconds + (time.monotonic() - self._since if self._moving else 0.0)
        return self.nbytes / seconds if seconds else 0.0


class BlockQueue:
    """The two queues, the threads that serve them, and what is known of the disk from serving them."""

    def __init__(self, file: WorkFile, threads: int, checksums: Checksums | None) -> None:
        self._file = file
        self._checksums = checksums
        self.faults = Faults()
        self.reads, self.writes, self.both = Meter(), Meter(), Meter()
        self.last_progress = time.monotonic()
        self._waiting: dict[bool, deque[tuple[Request, Block]]] = {False: deque(), True: deque()}  # by is_write
        self._last_was_write = self.in_bursts = False
        self._under_way: list[Request] = []
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._serve, name=f"zerofold-disk-{index}", daemon=True) for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> None:
        request.unfinished = len(request.blocks)
        start, end = request.blocks[0].offset, request.blocks[-1].end
        with self._changed:
            if self._closed:
                raise DiskError(errno.EBADF, f"the {request.what}: the store is closed")
            for other in self._under_way:
                if (other.is_write or request.is_write) and other.touches(start, end):
                    request.earlier += 1
                    other.later.append(request)
            self._under_way.append(request)
            if not request.earlier:
                self._admit(request)

    def settle(self, start: int, end: int) -> None:
        """Waits for all requests that touch the range."""
        with self._changed:
            touching = [request for request in self._under_way if request.touches(start, end)]
        for request in touching:
            request.settle()

    def close(self) -> None:
        self.settle(0, self._file.size)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if threading.current_thread() not in self._threads:  # the garbage collector ends a store wherever it likes
            for thread in self._threads:
                thread.join()

    def _admit(self, request: Request) -> None:
        self._waiting[request.is_write].extend((request, block) for block in request.blocks)
        self._changed.notify(len(request.blocks))

    def _next(self) -> tuple[Request, Block] | None:
        """Reads and writes in turn, so that neither waits behind a long row of the other; in bursts, all of a row."""
        with self._changed:
            while not any(self._waiting.values()):
                if self._closed:
                    return None
                self._changed.wait()
            is_write = self._last_was_write if self.in_bursts else not self._last_was_write
            if not self._waiting[is_write]:
                is_write = not is_write
            self._last_was_write = is_write
            for meter in self._meters(is_write):
                meter.start()
            return self._waiting[is_write].popleft()

    def _meters(self, is_write: bool) -> tuple[Meter, Meter]:
        return self.writes if is_write else self.reads, self.both

    def _serve(self) -> None:
        while (taken := self._next()) is not None:
            error = self._try(*taken)
            with self._changed:
                self._finish(*taken, error)
            del taken  # the caller's memory is not held while this thread has nothing to do

    def _try(self, request: Request, block: Block) -> DiskError | None:
        if request.error is not None:
            return request.error
        try:
            self._move(request, block)
        except DiskError as error:
            return error
        except Exception as error:  # whatever it is: a thread that ends would leave others waiting for ever
            code, text = getattr(error, "errno", None), getattr(error, "strerror", None) or repr(error)
            where = f"bytes {block.offset:,} to {block.end:,}"
            failed = DiskError(code or errno.EIO, f"the {request.what} failed at {where}: {text}; {_fix(code)}")
            failed.__cause__ = error
            return failed
        return None

    def _move(self, request: Request, block: Block) -> None:
        if not self._file.is_whole():
            raise OSError(errno.EIO, f"the file has no longer its {self._file.size:,} bytes, somebody changed it")
        if request.is_write:
            # The sum is of the caller's memory before the transfer: what should be there, whatever the disk does.
            if self._checksums is not None:
                self._checksums.written(block.cell, block.offset, block.memory)
            block.write(self._file.fd)
            return
        earlier = self.faults.at(block.offset, block.end)
        if earlier is not None:
            raise DiskError(errno.EIO, f"the {request.what} cannot be trusted, because {earlier}")
        block.read(self._file.fd)
        different = self._checksums and self._checksums.differs(block.cell, block.offset, block.memory)
        if different:
            raise OSError(errno.EIO, f"the disk gave back other bytes than were written to {different[0]:,}")

    def _finish(self, request: Request, block: Block, error: DiskError | None) -> None:
        self.last_progress = time.monotonic()
        for meter in self._meters(request.is_write):
            meter.stop(0 if error else block.nbytes)
        request.error = request.error or error
        if request.is_write and error is None:
            self.faults.clear(block.offset, block.end)
        request.unfinished -= 1
        if request.unfinished:
            return
        if request.is_write and request.error is not None:
            for written in request.blocks:  # also those that went well: half of a request is of no use
                self.faults.add(written.offset, written.end, str(request.error.strerror))
        self._under_way.remove(request)
        for later in request.later:
            later.earlier -= 1
            if not later.earlier:
                self._admit(later)
        request.set_done()


def _fix(code: int | None) -> str:
    if code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "make room there and load the last checkpoint"
    return "see `dmesg` and the disk's health, name another offload folder, and load the last checkpoint"
