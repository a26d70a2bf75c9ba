"""Sums gradients over ranks through buffers of a constant size, a few of them in flight at a time.

reduce to owners, one chunk, seen from rank 1 of 3

local gradients    | ....a0.. | ....a1.. | ....a2.. |     the chunk's range of every rank's shard
rows to send         a0/3 → 0     (stays)    a2/3 → 2
rows received        1's range from rank 0, from rank 2
own shard  (+)=      row of 0  +  a1/3  +  row of 2       in rank order, whatever rank sums
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zerofold.comm import Comm
from zerofold.layout import FlatLayout
from zerofold.memory import BufferPool

_IN_FLIGHT = 2  # one being filled or summed while one is on the wire


class Reducer:
    """Starts reductions and finishes the oldest when too many are under way. Averages: the sum is divided by N."""

    def __init__(self, comm: Comm, pool: BufferPool) -> None:
        self.comm, self.pool = comm, pool
        self._pending: deque[Callable[[], None]] = deque()

    def all_reduce(self, flat: Tensor, *, unit: str) -> None:
        """Averages `flat`, already divided by N, in place on every rank."""
        handle = self.comm.all_reduce(flat, unit=unit)
        self._pending.append(handle.wait)  # in place, no buffer: any number may be in flight

    def to_owners(
        self,
        gradients: Sequence[Tensor | None],
        layout: FlatLayout,
        shard: Tensor,
        accumulate: Sequence[bool],
        *,
        unit: str,
    ) -> None:
        """shard (+)= this rank's range of the mean over ranks of the flattened `gradients` (None counts as zero)."""
        start = self._exchange if self.comm.is_gloo else self._reduce_scatter
        for chunk in layout.chunks(self.pool.capacity(shard.dtype)):
            while len(self._pending) >= _IN_FLIGHT:
                self._pending.popleft()()
            self._pending.append(start(gradients, layout, shard, accumulate, chunk, unit))
            if not self.comm.overlap:
                self.finish()

    def finish(self) -> None:
        while self._pending:
            self._pending.popleft()()

    def _exchange(
        self,
        gradients: Sequence[Tensor | None],
        layout: FlatLayout,
        shard: Tensor,
        accumulate: Sequence[bool],
        chunk: tuple[int, int],
        unit: str,
    ) -> Callable[[], None]:
        comm, width = self.comm, chunk[1] - chunk[0]
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        size = len(others) * width
        sent, got = (self.pool.take(size, shard.dtype, shard.device) for _ in range(2))
        rows, received = sent[:size].view(-1, width), got[:size].view(-1, width)
        for row, rank in zip(rows, others, strict=True):
            _pack(row, gradients, layout, rank, chunk, 1 / comm.size)
        handle = comm.swap_rows(received, rows, unit=unit)

        def finish() -> None:
            handle.wait()
            for piece in layout.pieces(comm.rank):
                part = piece.within(*chunk)
                if part.size:
                    target = shard[part.shard_start : part.shard_stop]
                    columns = slice(part.shard_start - chunk[0], part.shard_stop - chunk[0])
                    gradient = gradients[part.index]
                    own = None if gradient is None else gradient[part.start : part.stop]
                    others_parts = [row[columns] for row in received]
                    _mean_in_rank_order(target, others_parts, own, comm.rank, accumulate[part.index])
            self.pool.give(sent)
            self.pool.give(got)

        return finish

    def _reduce_scatter(
        self,
        gradients: Sequence[Tensor | None],
        layout: FlatLayout,
        shard: Tensor,
        accumulate: Sequence[bool],
        chunk: tuple[int, int],
        unit: str,
    ) -> Callable[[], None]:
        comm, width = self.comm, chunk[1] - chunk[0]
        sent = self.pool.take(comm.size * width, shard.dtype, shard.device)
        got = self.pool.take(width, shard.dtype, shard.device)
        rows, summed = sent[: comm.size * width], got[:width]
        for rank, row in enumerate(rows.view(-1, width)):
            _pack(row, gradients, layout, rank, chunk, 1 / comm.size)
        handle = comm.reduce_scatter(summed, rows, unit=unit)

        def finish() -> None:
            handle.wait()
            for piece in layout.pieces(comm.rank):
                part = piece.within(*chunk)
                if part.size:
                    target = shard[part.shard_start : part.shard_stop]
                    mean = summed[part.shard_start - chunk[0] : part.shard_stop - chunk[0]]
                    target.add_(mean) if accumulate[part.index] else target.copy_(mean)
            self.pool.give(sent)
            self.pool.give(got)

        return finish


def _pack(
    row: Tensor,
    gradients: Sequence[Tensor | None],
    layout: FlatLayout,
    rank: int,
    chunk: tuple[int, int],
    scale: float,
) -> None:
    """row = scale × this rank's gradients in `rank`'s part of the chunk; the division costs nothing in the copy."""
    for piece in layout.pieces(rank):
        part = piece.within(*chunk)
        if part.size:
            target = row[part.shard_start - chunk[0] : part.shard_stop - chunk[0]]
            gradient = gradients[part.index]
            if gradient is None:
                target.zero_()
            else:
                torch.mul(gradient[part.start : part.stop], scale, out=target)


def _mean_in_rank_order(target: Tensor, others: list[Tensor], own: Tensor | None, rank: int, accumulate: bool) -> None:
    """target (+)= others[0] + … + own/N + … in rank order. `others` come divided already and serve as scratch."""
    world = len(others) + 1
    scale = 1 / world
    if own is not None and world & (world - 1):
        # Dividing by a power of two is exact, so below it may be fused into the addition; otherwise it must round
        # the same way as on the rank that sent its part.
        own, scale = own * scale, 1.0
    # Two terms may change places without changing a bit, so rank 0 too can start from the row of another rank.
    first, rest = others[0], others[1:]
    before, after = rest[: max(rank - 1, 0)], rest[max(rank - 1, 0) :]
    for row in before:
        first.add_(row)
    total = first if accumulate else target
    if own is not None:
        torch.add(first, own, alpha=scale, out=total)
    elif not accumulate:
        total.copy_(first)
    for row in after:
        total.add_(row)
    if accumulate:
        target.add_(total)
