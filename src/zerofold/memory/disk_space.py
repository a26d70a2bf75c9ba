"""Which ranges of a file are taken: integers only."""

from __future__ import annotations

import bisect
from typing import NamedTuple


class Extent(NamedTuple):
    """A range of the file; both numbers are multiples of 4096."""

    offset: int
    nbytes: int

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


class Space:
    """Hands out ranges, the first that is large enough, and takes them back.

    >>> space = Space(0, 100)
    >>> a, b = space.take(60, "a"), space.take(40, "b")
    >>> space.give(a); space.take(50, "c")
    Extent(offset=0, nbytes=50)
    >>> space.holder(70, 10)
    (Extent(offset=60, nbytes=40), 'b')
    >>> space.grow(20); space.take(15, "d")
    Extent(offset=100, nbytes=15)
    """

    def __init__(self, start: int, nbytes: int) -> None:
        self._gaps = [Extent(start, nbytes)]  # sorted, never two that touch
        self._taken: list[tuple[Extent, str]] = []  # sorted

    @property
    def free(self) -> int:
        return sum(gap.nbytes for gap in self._gaps)

    @property
    def largest(self) -> int:
        return max((gap.nbytes for gap in self._gaps), default=0)

    def grow(self, nbytes: int) -> None:
        """At the end."""
        ends = [*(gap.end for gap in self._gaps[-1:]), *(extent.end for extent, _ in self._taken[-1:])]
        self._free(Extent(max(ends), nbytes))

    @property
    def taken(self) -> list[tuple[Extent, str]]:
        return self._taken

    def take(self, nbytes: int, label: str) -> Extent:
        """The caller has seen that `largest` is enough."""
        index, gap = next((index, gap) for index, gap in enumerate(self._gaps) if gap.nbytes >= nbytes)
        rest = Extent(gap.offset + nbytes, gap.nbytes - nbytes)
        self._gaps[index : index + 1] = [rest] if rest.nbytes else []
        extent = Extent(gap.offset, nbytes)
        bisect.insort(self._taken, (extent, label))
        return extent

    def give(self, extent: Extent) -> None:
        index = bisect.bisect_left(self._taken, (extent, ""))
        if index == len(self._taken) or self._taken[index][0] != extent:
            raise ValueError(f"{extent} is not taken: it was given back before, or is of another store")
        del self._taken[index]
        self._free(extent)

    def _free(self, extent: Extent) -> None:
        bisect.insort(self._gaps, extent)
        merged: list[Extent] = []
        for gap in self._gaps:
            if merged and merged[-1].end == gap.offset:
                gap = Extent(merged[-1].offset, merged[-1].nbytes + gap.nbytes)
                merged.pop()
            merged.append(gap)
        self._gaps = merged

    def holder(self, offset: int, nbytes: int) -> tuple[Extent, str] | None:
        """The taken extent that holds the whole range, with its label."""
        index = bisect.bisect_right(self._taken, offset, key=lambda taken: taken[0].offset) - 1
        if index < 0 or offset + nbytes > self._taken[index][0].end:
            return None
        return self._taken[index]
