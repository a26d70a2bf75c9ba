"""The NVMe tier: states in one file per rank, moved past the page cache by threads, with nothing to compile.

Two ways lead to the same bytes, one after the other and never both at once on one range:

    store.tensor(extent)         a tensor that is the file: any torch code reads and changes it
    store.read(…), store.write   O_DIRECT between the file and page-aligned memory, at the disk's own rate

After a change through the tensor: `changed` (its checksums are void) and `flush`, then `read` gives the new bytes.
After `write`, the tensor shows what was written.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.memory.disk_blocks import blocks_of, bytes_of
from zerofold.memory.disk_checks import Checksums
from zerofold.memory.disk_file import PAGE, DiskError, WorkFile, whole_pages
from zerofold.memory.disk_queue import BlockQueue, Request
from zerofold.memory.disk_space import Extent, Space

__all__ = ["PAGE", "DiskError", "DiskStore", "Extent", "Rates", "Request", "whole_pages"]

_FLUSH_BYTES = 64 * 2**20  # at a time: Python's msync holds the GIL


class Rates(NamedTuple):
    """Bytes a second, over the time in which requests of that kind were being served."""

    read: float
    write: float
    both: float


class DiskStore:
    """Room for `nbytes` in a file of its own in `folder`, which is made if it does not exist.

    The file is reserved whole at the start, so a full disk is found then, and removed by `close` or at exit. What a
    newly taken extent holds is undefined, as with `torch.empty`.

    >>> import tempfile
    >>> store = DiskStore(tempfile.mkdtemp(), 1 << 20)
    >>> extent = store.take(8192, "moments of block 0")
    >>> store.write(extent.offset, torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.float32).fill_(2.0)).wait()
    >>> store.tensor(extent).view(torch.float32)[-1].item(), store.bytes_written
    (2.0, 8192)
    >>> store.close()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        nbytes: int,
        *,
        rank: int = 0,
        threads: int = 4,
        block: int = 8 * 2**20,
        checksums: bool = False,
        most: int | None = None,
    ) -> None:
        """`most`: bytes to which it may grow."""
        if nbytes <= 0 or threads <= 0 or block <= 0 or block % PAGE:
            raise ValueError(
                f"nbytes={nbytes}, threads={threads}, block={block}: all must be positive, block a multiple of {PAGE}"
            )
        self.nbytes, self._most = whole_pages(nbytes), most
        self._block = block
        self._file = WorkFile(folder, nbytes, rank)
        self._space = Space(PAGE, self.nbytes)
        self._manifest_is_old = False
        self._lock = threading.Lock()  # of the space and the manifest: requests may come from several threads
        self._checksums = Checksums() if checksums else None
        self._queue = BlockQueue(self._file, threads, self._checksums)
        self._end = weakref.finalize(self, _end, self._queue, self._file, os.getpid())

    @property
    def _map(self) -> mmap.mmap:
        if not self._file.maps:
            raise DiskError(errno.EBADF, f"{self.path}: the store is closed")
        return self._file.maps[-1]

    @property
    def path(self) -> str:
        return str(self._file.path)

    @property
    def is_direct(self) -> bool:
        """Whether requests go past the page cache."""
        return self._file.is_direct

    @property
    def free(self) -> int:
        return self._space.free

    @property
    def bytes_read(self) -> int:
        return self._queue.reads.nbytes

    @property
    def bytes_written(self) -> int:
        return self._queue.writes.nbytes

    @property
    def in_bursts(self) -> bool:
        """Reads are served as long as there are any, and then writes, for a disk that loses by a mix. Else in turn, so
        that neither waits long."""
        return self._queue.in_bursts

    @in_bursts.setter
    def in_bursts(self, in_bursts: bool) -> None:
        self._queue.in_bursts = in_bursts

    def rates(self) -> Rates:
        """Measured on the requests so far; 0 where there were none."""
        return Rates(self._queue.reads.rate, self._queue.writes.rate, self._queue.both.rate)

    def take(self, nbytes: int, label: str) -> Extent:
        """Room for `nbytes`, rounded up to whole pages; `label` says what is there, in messages and the manifest."""
        wanted = whole_pages(nbytes)
        if wanted == 0:
            return Extent(PAGE, 0)
        with self._lock:
            if wanted <= self._space.largest:
                self._manifest_is_old = True
                return self._space.take(wanted, label)
            raise DiskError(
                errno.ENOSPC,
                f"no room for {label}: {wanted:,} bytes in one piece wanted, {self._space.largest:,} of "
                f"{self._space.free:,} free bytes of {self.path} are in one piece; make the store larger",
            )

    def make_room(self, nbytes: int) -> None:
        """The file grows where it has no room for so many bytes in one piece."""
        wanted = whole_pages(nbytes)
        with self._lock:
            if wanted > self._space.largest:
                if self._most is not None and self.nbytes + wanted > self._most:
                    raise DiskError(
                        errno.EDQUOT,
                        f"{self.path}: {wanted:,} bytes more, for parameters unfrozen or added since, would be over "
                        f"disk_limit={self._most}: raise it, or train them from the start, so that the plan knows them",
                    )
                self._file.grow(wanted)
                self._space.grow(wanted)
                self.nbytes += wanted

    def give(self, extent: Extent) -> None:
        """Takes the room back, after the requests on it; tensors of it must not be used any more."""
        if extent.nbytes == 0:
            return
        self._queue.settle(extent.offset, extent.end)
        with self._lock:
            self._space.give(extent)
            self._manifest_is_old = True
        self.changed(extent)
        self._queue.faults.clear(extent.offset, extent.end)

    def tensor(self, extent: Extent) -> Tensor:
        """The extent as bytes; what is written to them is written to the file."""
        label = self._check_held(extent.offset, extent.nbytes, "tensor")[1]
        fault = self._queue.faults.at(extent.offset, extent.end)
        if fault is not None:
            raise DiskError(errno.EIO, f"{label} cannot be trusted, because {fault}")
        if extent.nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=extent.nbytes, offset=extent.offset)

    def read(self, offset: int, into: Tensor) -> Request:
        """Fills `into` from the file at `offset`."""
        return self._request(offset, into, is_write=False)

    def write(self, offset: int, source: Tensor) -> Request:
        """Writes `source`, which must not change before the request is done, to the file at `offset`.

        A last page that `source` does not fill must be the last of the extent: its rest is overwritten.
        """
        return self._request(offset, source, is_write=True)

    def flush(self, extent: Extent) -> None:
        """Brings what was changed through the tensor to the file."""
        for start, nbytes in _pieces(extent):
            self._map.flush(start, nbytes)

    def forget(self, extent: Extent) -> None:
        """Lets go of the memory that reading and changing the tensor took; the bytes stay in the file."""
        self.flush(extent)  # pages that are not yet in the file could not be let go
        if extent.nbytes:
            for each in self._file.maps:
                if extent.end <= len(each):
                    each.madvise(mmap.MADV_DONTNEED, extent.offset, extent.nbytes)
            os.posix_fadvise(self._file.fd, extent.offset, extent.nbytes, os.POSIX_FADV_DONTNEED)

    def changed(self, extent: Extent) -> None:
        """Says that the tensor was changed: the range has no checksum until it is written again."""
        if self._checksums is not None:
            self._checksums.forget(extent.offset, extent.end)

    def close(self) -> None:
        """Waits for all requests and removes the file; its room is free once its tensors are gone too."""
        self._end()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(self, offset: int, tensor: Tensor, *, is_write: bool) -> Request:
        kind, nbytes = ("write" if is_write else "read"), tensor.nbytes
        extent, label = self._check_held(offset, nbytes, kind)
        what = f"{kind} of {label} ({nbytes:,} bytes at {offset:,} of {self.path})"
        if offset % PAGE:
            raise ValueError(f"the {what}: the offset is no multiple of {PAGE}")
        if is_write and nbytes % PAGE and offset + whole_pages(nbytes) != extent.end:
            raise ValueError(f"the {what}: {nbytes:,} is no multiple of {PAGE} and the extent goes on behind it")
        request = Request(self._queue, what, keep=self, is_write=is_write)
        if not nbytes:
            request.set_done()
            return request
        request.blocks = list(blocks_of(extent, offset, bytes_of(tensor, what), self._block))
        self._write_manifest()
        self._queue.submit(request)
        return request

    def _check_held(self, offset: int, nbytes: int, kind: str) -> tuple[Extent, str]:
        if not nbytes:
            return Extent(offset, 0), "nothing"
        with self._lock:
            held = self._space.holder(offset, nbytes)
        if held is None:
            raise ValueError(f"{kind} of {nbytes:,} bytes at {offset:,}: not inside one extent that was taken")
        return held

    def _write_manifest(self) -> None:
        """At the first request after the layout changed: models take hundreds of extents one after the other."""
        with self._lock:
            if not self._manifest_is_old:
                return
            self._manifest_is_old = False
            try:
                self._file.write_manifest(
                    {"label": label, "offset": extent.offset, "bytes": extent.nbytes}
                    for extent, label in self._space.taken
                )
            except DiskError as error:  # others have filled the disk since; states have their room from the start
                warnings.warn(f"{error}; states are not concerned", stacklevel=4)


def _pieces(extent: Extent) -> Iterator[tuple[int, int]]:
    for start in range(extent.offset, extent.end, _FLUSH_BYTES):
        yield start, min(_FLUSH_BYTES, extent.end - start)


def _end(queue: BlockQueue, file: WorkFile, owner: int) -> None:
    """Apart from the store, so that an unused store can go; in a forked child the file is still the parent's."""
    if os.getpid() == owner:
        queue.close()
        file.remove()
