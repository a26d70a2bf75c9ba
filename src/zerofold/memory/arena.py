"""Host memory for offloaded states: segments of exactly the size asked for, pinned behind the caller's back.

    take ─► mmap ─► tensor, at once                                    main thread
              └──► pages faulted in ─► registered with the driver      background, one segment after the other
                   by several threads

torch's pinned allocator rounds up to powers of two: 38 GiB would take 64. Registered memory takes what it is. A copy
is asynchronous only within one registration, so a segment is registered as one and never split.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from zerofold.memory.host import host_memory, usable_cores

GIB = 2**30
MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
TOUCHED_AT_ONCE = 64 * 2**20  # bytes per call: enough that the calls cost nothing, few enough to share out
TOUCHING_THREADS = 8  # more only wait for the same memory

Pinning = tuple[Future[None], Callable[[], None]]


class _Mapping(mmap.mmap):
    """Anonymous memory that the driver forgets before it goes, whoever lets go of it last.

    Memory that is unmapped while registered would leave its address pinned to pages that nobody sees any more. So
    the end of the mapping ends the registration: `__del__` runs before the memory is unmapped, a weak reference's
    callback after it.
    """

    is_registered = False

    @property
    def address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self))

    def register(self) -> None:
        cudart = torch.cuda.cudart()
        found = cudart.cudaHostRegister(self.address, len(self), 0)
        if found != cudart.cudaError.success:
            raise MemoryError(
                f"cannot pin {len(self) / GIB:.2f} GiB of host memory: {cudart.cudaGetErrorString(found)}; raise the "
                f"limit on locked memory (`ulimit -l`), or offload less. {host_memory().available / GIB:.2f} GiB are "
                "available"
            )
        self.is_registered = True

    def unregister(self) -> None:
        """Copies from and to this memory must be over."""
        if self.is_registered:
            self.is_registered = False
            cudart = torch.cuda.cudart()
            found = cudart.cudaHostUnregister(self.address)
            if found != cudart.cudaError.success:
                raise RuntimeError(
                    f"cannot unpin {len(self) / GIB:.2f} GiB of host memory: {cudart.cudaGetErrorString(found)}"
                )

    def __del__(self) -> None:
        if not sys.is_finalizing():  # the driver may be gone, and takes its registrations with it
            self.unregister()


class HostArena:
    """Host memory in segments of exactly the size asked for, rounded up to a page; pinned where `pins` says so.

    `take`, `give` and `close` are for one thread; `wait` for any. `show(pinned, taken)` is called in the background,
    in bytes, each time a segment is pinned.

    >>> arena = HostArena(pins=False)
    >>> block = arena.take(5000)
    >>> block.dtype, block.numel(), arena.nbytes == 2 * mmap.PAGESIZE
    (torch.uint8, 5000, True)
    >>> arena.wait(block); arena.give(block); arena.nbytes
    0
    """

    def __init__(self, *, pins: bool, show: Callable[[int, int], None] | None = None) -> None:
        self._device = torch.cuda.current_device() if pins else None  # starts CUDA here, not in the background
        self._show = show
        self._segments: dict[int, tuple[_Mapping, Future[None] | None]] = {}
        self._queue: SimpleQueue[Pinning | None] = SimpleQueue()
        # A daemon, because a process that ends at start-up would wait until all that is queued is pinned. It knows the
        # queue alone, so that an arena which nobody closes can go.
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name="zerofold pinning", daemon=True)
        self._end = weakref.finalize(self, self._queue.put, None)
        self._pinned_nbytes = 0  # written by the pinning thread, and by `give` once that segment's pinning is over
        self._counting = threading.Lock()
        self.nbytes = 0
        if pins:
            self._thread.start()

    def take(self, nbytes: int) -> Tensor:
        """A 1-D uint8 tensor of zeros on a page of its own. It may be used at once; see `wait` for copies."""
        if nbytes < 1:
            raise ValueError(f"take({nbytes}): a segment has at least one byte; keep an empty state elsewhere")
        if not self._end.alive:
            raise RuntimeError(f"take({nbytes}): this arena is closed; make another one")
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        try:
            mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(
                f"cannot take {size / GIB:.2f} GiB of host memory: {error.strerror}; offload less, or to another "
                f"tier. {host_memory().available / GIB:.2f} GiB are available"
            ) from error
        _advise(mapping, "MADV_HUGEPAGE")  # fewer faults, and fewer address look-ups in the update
        pinning: Future[None] | None = None
        if self._device is not None:
            # A fork, such as a data loader's, copies every pinned page for the child at once.
            _advise(mapping, "MADV_DONTFORK")
            pinning = Future()
            self._queue.put((pinning, partial(self._pin, mapping)))
        block = torch.frombuffer(mapping, dtype=torch.uint8)
        self._segments[block.data_ptr()] = mapping, pinning
        self.nbytes += size
        return block[:nbytes]

    def wait(self, block: Tensor | None = None) -> None:
        """Returns when the segment of this block, or of any view of it, is pinned; all segments where none is given.

        Before that a copy is right, but not asynchronous. What pinning raised is raised here.
        """
        segments = list(self._segments.values()) if block is None else [self._segments[self._key(block)]]
        for _, pinning in segments:
            if pinning is not None:
                pinning.result()

    def give(self, block: Tensor) -> None:
        """Unpins the block's segment; its memory goes with the last tensor that looks at it.

        Copies from and to it must be over.
        """
        mapping, pinning = self._segments.pop(self._key(block))
        self.nbytes -= len(mapping)
        if pinning is None or pinning.cancel():
            return
        pinning.exception()  # waits for one that is under way
        if mapping.is_registered:
            mapping.unregister()
            self._count(-len(mapping))

    def close(self) -> None:
        """Gives back every segment, the last first, because that one may still be waiting for its turn."""
        for mapping, _ in reversed(list(self._segments.values())):
            self.give(torch.frombuffer(mapping, dtype=torch.uint8))
        self._end()
        if self._thread.is_alive():
            self._thread.join()

    def _key(self, block: Tensor) -> int:
        key = block.untyped_storage().data_ptr()
        if key not in self._segments:
            raise ValueError(f"this block of {block.nbytes} bytes is not of this arena, or was given back already")
        return key

    def _pin(self, mapping: _Mapping) -> None:
        assert self._device is not None
        torch.cuda.set_device(self._device)  # a thread starts with device 0, and would open a context there
        _touch(mapping)
        mapping.register()
        self._count(len(mapping))

    def _count(self, nbytes: int) -> None:
        with self._counting:
            self._pinned_nbytes += nbytes
            pinned = self._pinned_nbytes
        if self._show is not None and nbytes > 0:
            self._show(pinned, self.nbytes)


def _serve(queue: SimpleQueue[Pinning | None]) -> None:
    while (item := queue.get()) is not None:
        future, pin = item
        if future.set_running_or_notify_cancel():
            try:
                pin()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
        del item, future, pin  # nothing is kept alive while this thread waits


def _advise(mapping: mmap.mmap, name: str) -> None:
    """Where this system has the advice: without it all is slower, not wrong."""
    if hasattr(mmap, name):
        try:
            mapping.madvise(getattr(mmap, name))
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages
                raise


def _touch(mapping: _Mapping) -> None:
    """Faults all pages in by several threads, without changing a byte: the caller may be writing already.

    Faults are most of the cost of pinning, and the driver takes them one by one. Where the kernel cannot do it, the
    driver does.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None, use_errno=True).madvise  # unlike mmap.madvise, lets other threads run meanwhile
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    first, size = mapping.address, len(mapping)

    def touch(start: int) -> None:
        failed = madvise(first + start, min(TOUCHED_AT_ONCE, size - start), MADV_POPULATE_WRITE)
        number = ctypes.get_errno() if failed else 0
        if number not in (0, errno.EINVAL, errno.ENOSYS):
            raise MemoryError(
                f"cannot fill {size / GIB:.2f} GiB of host memory: {os.strerror(number)}; offload less. "
                f"{host_memory().available / GIB:.2f} GiB are available"
            )

    with ThreadPoolExecutor(min(TOUCHING_THREADS, usable_cores())) as threads:
        list(threads.map(touch, range(0, size, TOUCHED_AT_ONCE)))
