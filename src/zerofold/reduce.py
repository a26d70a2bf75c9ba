"""Sums gradients over ranks through buffers of a constant size, a few of them in flight at a time.

reduce to owners, one chunk, seen from rank 1 of 3

local gradients    | ....a0.. | ....a1.. | ....a2.. |     the chunk's range of every rank's shard
rows to send         a0/3 → 0     (stays)    a2/3 → 2
rows received        1's range from rank 0, from rank 2
own shard  (+)=      row of 0  +  a1/3  +  row of 2       in rank order, whatever rank sums

Rows have the dtype of the wire; they are summed in the shard's. Where every rank updates everything, a chunk is summed
on all of them instead. Where several groups hold the same shard, each chunk that is through inside the group is
averaged across groups.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from zerofold.comm import Comm, Handle
from zerofold.layout import Chunk, FlatLayout, Piece
from zerofold.memory import BufferPool
from zerofold.timing import REDUCE

_IN_FLIGHT = 2  # one being filled or summed while one is on the wire


@dataclass(frozen=True)
class Reduction:
    """shard (+)= this rank's range of the mean over ranks of the flattened `gradients` (None counts as zero)."""

    unit: str
    gradients: Sequence[Tensor | None]
    layout: FlatLayout
    shard: Tensor
    accumulate: Sequence[bool]  # by parameter: add to what the shard holds, or overwrite it
    across: bool  # also over the groups that hold the same shard
    wire: torch.dtype


class Reducer:
    """Starts reductions and finishes the oldest when too many are under way. Averages: the sum is divided by N."""

    def __init__(self, comm: Comm, across: Comm | None, pool: BufferPool) -> None:
        self.comm, self.across, self.pool = comm, across, pool
        self.loss_scale = 1.0  # by which all local gradients are too large
        self._pending: deque[Callable[[], None]] = deque()  # each ends what is under way with one chunk, oldest first
        self._averaged: set[int] = set()  # ids of shards of which a part may be under way across groups

    def all_reduce(self, flat: Tensor, *, unit: str) -> None:
        """Averages `flat`, already divided by N, in place on every rank."""
        handle = self.comm.all_reduce(flat, unit=unit, purpose=REDUCE)
        self._pending.append(handle.wait)  # in place, no buffer: any number may be in flight

    def start(self, reduction: Reduction) -> None:
        if id(reduction.shard) in self._averaged:
            self.finish()  # the same slab again: nothing may be added to what is being averaged in place
        if reduction.across:
            self._averaged.add(id(reduction.shard))
        for chunk in reduction.layout.chunks(self.pool.capacity(reduction.wire)):
            while len(self._pending) >= _IN_FLIGHT:
                self._pending.popleft()()
            self._pending.append(self._start(reduction, chunk))
            if not self.comm.overlap:
                self.finish()

    def finish(self) -> None:
        while self._pending:
            self._pending.popleft()()
        self._averaged.clear()

    def _start(self, reduction: Reduction, chunk: Chunk) -> Callable[[], None]:
        is_cut = reduction.layout.world == self.comm.size
        place = self.comm.rank if is_cut else 0
        if not is_cut:
            arriving = self._everywhere(reduction, chunk)
        else:
            arriving = self._exchange(reduction, chunk) if self.comm.is_gloo else self._own_form(reduction, chunk)
        # What is packed is not needed again, unless the sum is made here: then `add_to` keeps it.
        rest = replace(reduction, gradients=())

        def finish() -> None:
            arriving.handle.wait()
            for piece in rest.layout.pieces(place):
                part = chunk.part(piece, place)
                if part.size:
                    target = rest.shard[part.shard_start : part.shard_stop]
                    columns = slice(part.shard_start - chunk.start, part.shard_stop - chunk.start)
                    _bring_home(arriving.add_to, target, columns, part, rest.accumulate[part.index], self.comm)
            for buffer in arriving.buffers:
                self.pool.give(buffer)
            if rest.across and chunk.widths[place]:
                self._average_across(rest.shard[chunk.start : chunk.start + chunk.widths[place]], rest.unit)

        return finish

    def _scales(self, reduction: Reduction) -> tuple[float, float]:
        """What local gradients are multiplied by before the wire, and their sum after it: together 1 / (N × scale).

        fp16 alone needs the loss scale to get through the wire.
        """
        if reduction.wire is torch.float16:
            return 1 / self.comm.size, 1 / self.loss_scale
        return 1 / (self.comm.size * self.loss_scale), 1.0

    def _average_across(self, part: Tensor, unit: str) -> None:
        """Every group has added its own mean. What was there before is the same in all, so averaging keeps it."""
        assert self.across is not None
        mean = part.to(self.across.device).mul_(1 / self.across.size)  # the part itself, unless it is on the host
        handle = self.across.all_reduce(mean, unit=unit, purpose=REDUCE)

        def finish() -> None:
            handle.wait()
            if mean.device != part.device:
                part.copy_(mean)

        self._pending.append(finish)

    def _exchange(self, reduction: Reduction, chunk: Chunk) -> _Arriving:
        """Rows go to their owners, who sum them."""
        comm, wire, device = self.comm, reduction.wire, self.comm.device
        before, after = self._scales(reduction)
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        size, width = sum(chunk.widths[rank] for rank in others), chunk.widths[comm.rank]
        sent = self.pool.take(size, wire, device)
        got = self.pool.take(len(others) * width, wire, device)
        for rank, row in zip(others, sent[:size].split([chunk.widths[rank] for rank in others]), strict=True):
            _pack(row, reduction, rank, chunk, before)
        received = got[: len(others) * width]
        handle = comm.swap_rows(received, sent[:size], chunk.widths, unit=reduction.unit)

        def add_to(target: Tensor, columns: slice, part: Piece, accumulate: bool) -> None:
            gradient = reduction.gradients[part.index]
            own = None if gradient is None else gradient[part.start : part.stop]
            rows = [_scaled(row[columns], target.dtype, after) for row in received.view(len(others), width)]
            _sum_in_rank_order(target, rows, own, before * after, comm.rank, accumulate)

        return _Arriving(handle, add_to, [sent, got])

    def _own_form(self, reduction: Reduction, chunk: Chunk) -> _Arriving:
        """The backend sums."""
        comm, wire, device, width = self.comm, reduction.wire, self.comm.device, chunk.widths[0]
        before, after = self._scales(reduction)
        sent = self.pool.take(chunk.size, wire, device)
        if reduction.layout.is_even:
            _pack_table(sent[: chunk.size].view(comm.size, width), reduction, chunk, before)
            got = self.pool.take(width, wire, device)
            handle = comm.reduce_scatter(got[:width], sent[: chunk.size], unit=reduction.unit)
            return _Arriving(handle, _adder(got[:width], after), [sent, got])
        rows = sent[: chunk.size].split(list(chunk.widths))
        for rank, row in enumerate(rows):
            _pack(row, reduction, rank, chunk, before)
        handle = comm.reduce_rows(rows, unit=reduction.unit)
        return _Arriving(handle, _adder(rows[comm.rank], after), [sent])

    def _everywhere(self, reduction: Reduction, chunk: Chunk) -> _Arriving:
        """Every rank needs the whole mean."""
        before, after = self._scales(reduction)
        buffer = self.pool.take(chunk.widths[0], reduction.wire, self.comm.device)
        mean = buffer[: chunk.widths[0]]
        _pack(mean, reduction, 0, chunk, before)
        handle = self.comm.all_reduce(mean, unit=reduction.unit, purpose=REDUCE)
        return _Arriving(handle, _adder(mean, after), [buffer])


AddTo = Callable[[Tensor, slice, Piece, bool], None]


class _Arriving(NamedTuple):
    """One chunk on the wire: when it is there, `add_to(target, columns, part, accumulate)` brings a part home."""

    handle: Handle
    add_to: AddTo
    buffers: list[Tensor]


def _adder(mean: Tensor, scale: float) -> AddTo:
    def add_to(target: Tensor, columns: slice, part: Piece, accumulate: bool) -> None:
        arrived = _scaled(mean[columns], target.dtype, scale)
        target.add_(arrived) if accumulate else target.copy_(arrived)

    return add_to


def _bring_home(add_to: AddTo, target: Tensor, columns: slice, part: Piece, accumulate: bool, comm: Comm) -> None:
    """A shard in host memory is summed on the device all the same."""
    if target.device == comm.device:
        add_to(target, columns, part, accumulate)
        return
    total = target.to(comm.device) if accumulate else torch.empty_like(target, device=comm.device)
    add_to(total, columns, part, accumulate)
    target.copy_(total)


def _scaled(row: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    row = row.to(dtype)
    return row if scale == 1.0 else row.mul_(scale)


def _pack(row: Tensor, reduction: Reduction, rank: int, chunk: Chunk, scale: float) -> None:
    """row = scale × this rank's gradients in `rank`'s part of the chunk; the division costs nothing in the copy."""
    for piece in reduction.layout.pieces(rank):
        part = chunk.part(piece, rank)
        if part.size:
            target = row[part.shard_start - chunk.start : part.shard_stop - chunk.start]
            gradient = reduction.gradients[part.index]
            _put(target, None if gradient is None else gradient[part.start : part.stop], scale)


def _pack_table(table: Tensor, reduction: Reduction, chunk: Chunk, scale: float) -> None:
    """All rows of equal shards at once: a parameter over 1000 ranks takes three kernels, not 1000."""
    left, right = chunk.start, chunk.start + table.shape[1]
    for index, gradient in enumerate(reduction.gradients):
        for block in reduction.layout.blocks(index):
            low, high = max(block.column, left), min(block.column + block.width, right)
            if low < high:
                target = table[block.row : block.row + block.rows, low - left : high - left]
                source = None
                if gradient is not None:
                    rows = gradient[block.start : block.stop].view(block.rows, block.width)
                    source = rows[:, low - block.column : high - block.column]
                _put(target, source, scale)


def _put(target: Tensor, source: Tensor | None, scale: float) -> None:
    if source is None:
        target.zero_()
        return
    if source.dtype is target.dtype:
        torch.mul(source, scale, out=target)
        return
    # Scaled in the wider dtype of the two, or it would round before it is wide.
    wide = torch.promote_types(source.dtype, target.dtype)
    if wide is target.dtype and target.device.type == "cpu":  # where both kernels are vector code, unlike a mixed one
        target.copy_(source)
        target.mul_(scale)
    else:
        torch.mul(source, torch.full((1,), scale, dtype=wide, device=source.device), out=target)


def _sum_in_rank_order(
    target: Tensor, others: list[Tensor], own: Tensor | None, scale: float, rank: int, accumulate: bool
) -> None:
    """target (+)= others[0] + … + scale × own + … in rank order. `others` come scaled already and serve as scratch."""
    if not others:
        others = [torch.zeros_like(target)]  # a group of one: only other groups have something to add
    if own is not None and math.frexp(scale)[0] != 0.5:
        # Multiplying by a power of two is exact, so below it may be fused into the addition; otherwise it must round
        # the same way as on the rank that sent its part.
        own, scale = own.to(target.dtype) * scale, 1.0
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
