"""Room for tensors that live from forward to backward, in few large blocks of one memory (M_d of ZeRO-R).

first step    |a|  |b|  |c|          a block each, since nobody knows how much will be wanted
then          |a|b|c|                one block of what was wanted at once, used again in every step

Between them lies what lives shortly, and goes: with the long-lived tensors in a block of their own, no gaps are left.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from zerofold.memory.disk_space import Extent, Space


class _Block(NamedTuple):
    number: int
    memory: Tensor
    space: Space


class Slot(NamedTuple):
    """A range of a block; `memory` is its bytes."""

    block: _Block
    extent: Extent
    memory: Tensor


class Slots:
    """Hands out ranges of blocks that `allocate` makes; a range is given back from any thread.

    align   every range starts at a multiple of it
    least   bytes of a new block
    merges  when all is given back, several blocks become one

    >>> import torch
    >>> slots = Slots(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), align=512, merges=True)
    >>> first, second = slots.take(1000), slots.take(100)
    >>> slots.blocks, slots.taken_nbytes
    (2, 1536)
    >>> slots.give(first); slots.give(second)
    >>> again = slots.take(1000)
    >>> slots.blocks, slots.nbytes
    (1, 1536)
    """

    def __init__(
        self,
        allocate: Callable[[int], Tensor],
        release: Callable[[Tensor], None] | None = None,
        *,
        align: int,
        least: int = 0,
        merges: bool = False,
    ) -> None:
        self._allocate, self._release = allocate, release
        self._align, self._least, self._merges = align, least, merges
        self._blocks: list[_Block] = []
        self._room: list[tuple[int, int]] = []  # of each block the largest free range and its number, sorted
        self._returned: deque[Slot] = deque()  # appended to by whoever drops a graph, in any thread
        self._taken = 0
        self.peak_nbytes = 0
        """The most that was taken at once."""

    def take(self, nbytes: int) -> Slot:
        self._take_back()
        wanted = max(1, -(-nbytes // self._align)) * self._align
        if not self._taken and self._merges and len(self._blocks) > 1:
            self.clear()
        found = bisect.bisect_left(self._room, (wanted, 0))  # the smallest that is enough
        if found == len(self._room):
            # After a merge there is no block, and the next one has room for all that was ever there at once.
            size = max(wanted, self._least, self.peak_nbytes if self._merges and not self._blocks else 0)
            self._blocks.append(_Block(len(self._blocks), self._allocate(size), Space(0, size)))
            bisect.insort(self._room, (size, len(self._blocks) - 1))
            found = bisect.bisect_left(self._room, (wanted, 0))
        block = self._blocks[self._room.pop(found)[1]]
        extent = block.space.take(wanted, "")
        bisect.insort(self._room, (block.space.largest, block.number))
        self._taken += wanted
        self.peak_nbytes = max(self.peak_nbytes, self._taken)
        return Slot(block, extent, block.memory[extent.offset : extent.offset + nbytes])

    def give(self, slot: Slot) -> None:
        self._returned.append(slot)

    def expect(self, nbytes: int) -> None:
        """Lets go of all blocks; the next one has room for as much, or for the most there ever was."""
        self.clear()
        self.peak_nbytes = max(self.peak_nbytes, nbytes)

    def clear(self) -> None:
        """Lets go of blocks of which nothing is taken."""
        self._take_back()
        assert not self._taken, f"{self._taken} bytes are still taken"
        for block in self._blocks:
            if self._release is not None:
                self._release(block.memory)
        self._blocks.clear()
        self._room.clear()

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    @property
    def nbytes(self) -> int:
        return sum(block.memory.nbytes for block in self._blocks)

    @property
    def taken_nbytes(self) -> int:
        self._take_back()
        return self._taken

    def _take_back(self) -> None:
        while self._returned:
            slot = self._returned.popleft()
            block = slot.block
            del self._room[bisect.bisect_left(self._room, (block.space.largest, block.number))]
            block.space.give(slot.extent)
            bisect.insort(self._room, (block.space.largest, block.number))
            self._taken -= slot.extent.nbytes
