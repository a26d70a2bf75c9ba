"""Checksums of what was written to a disk, and where it may no longer be believed."""

from __future__ import annotations

import threading
import zlib


class Checksums:
    """The crc32 of each written range; a range that is read is compared wherever it holds a written one whole.

    Ranges are filed under the cell they lie in, so that a range meets only its neighbours. The caller never lets
    one range cross a cell.

    >>> sums = Checksums()
    >>> sums.written(0, 4096, memoryview(b"a" * 8))
    >>> sums.differs(0, 4096, memoryview(b"b" * 8))
    (4096, 4104)
    """

    def __init__(self) -> None:
        self._cells: dict[int, dict[tuple[int, int], int]] = {}
        self._lock = threading.Lock()

    def written(self, cell: int, start: int, memory: memoryview) -> None:
        crc, end = zlib.crc32(memory), start + len(memory)
        with self._lock:
            self._drop(cell, start, end)
            self._cells.setdefault(cell, {})[start, end] = crc

    def differs(self, cell: int, start: int, memory: memoryview) -> tuple[int, int] | None:
        """The first written range inside this one whose bytes are not those that were written."""
        with self._lock:
            known = list(self._cells.get(cell, {}).items())
        for (begin, end), crc in known:
            inside = start <= begin and end <= start + len(memory)
            if inside and zlib.crc32(memory[begin - start : end - start]) != crc:
                return begin, end
        return None

    def forget(self, start: int, end: int) -> None:
        """The bytes there are no longer those that were written, or may not be."""
        with self._lock:
            for cell in list(self._cells):
                self._drop(cell, start, end)

    def _drop(self, cell: int, start: int, end: int) -> None:
        known = self._cells.get(cell, {})
        for begin, stop in [(b, e) for b, e in known if b < end and start < e]:
            del known[begin, stop]


class Faults:
    """Ranges whose last write failed: neither the old bytes nor the new, until a write covers them.

    >>> faults = Faults()
    >>> faults.add(0, 4096, "no space left")
    >>> faults.at(2048, 8192), faults.at(4096, 8192)
    ('no space left', None)
    """

    def __init__(self) -> None:
        self._ranges: dict[tuple[int, int], str] = {}
        self._lock = threading.Lock()

    def add(self, start: int, end: int, why: str) -> None:
        with self._lock:
            self._ranges[start, end] = why

    def clear(self, start: int, end: int) -> None:
        with self._lock:
            for begin, stop in [(b, e) for b, e in self._ranges if start <= b and e <= end]:
                del self._ranges[begin, stop]

    def at(self, start: int, end: int) -> str | None:
        with self._lock:
            return next((why for (begin, stop), why in self._ranges.items() if begin < end and start < stop), None)
