"""One chunk on the host's cores: the one-pass update, and the new parameters on their way up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim import adam_cpu
from zerofold.optim.away.chunks import Chunk
from zerofold.optim.host_pool import BLOCK, HostPool, PoolJob
from zerofold.optim.onepass import AdamTensors


class HostUpdate:
    """Chunks as blocks for a pool of cores. New parameters go up on the stream for all that does."""

    def __init__(self, device: torch.device, up: Any, pool: HostPool) -> None:
        self._device, self._up, self._pool = device, up, pool
        self._rooms = threading.local()  # of each core

    def submit(self, chunk: Chunk, states: Sequence[Tensor], then: Callable[[Done], None]) -> PoolJob:
        """`states` are the chunk's master and moments in host memory. They are updated when the job is done; the copy
        has then set out for where forward needs it, and `then` was told its arrival."""
        gradients = [piece.gradient.cpu() for piece in chunk.pieces]  # the same memory where it is on the host
        blocks = [_Block(chunk, states, index, gradients[index], first, stop) for index, first, stop in _cut(chunk)]
        return self._pool.submit([partial(self._update, block) for block in blocks], lambda: then(self._send(blocks)))

    def _update(self, block: _Block) -> None:
        block.chunk.arrived.finish()
        scaling, settings = block.chunk.scaling, block.chunk.pieces[block.index].settings
        with torch.no_grad():
            scale = scaling.tensor("cpu")
            adam_cpu.update([block.tensors()], settings, scale, scaling.clip_value, block=BLOCK, room=self._room())

    def _room(self) -> adam_cpu.Room:
        if not hasattr(self._rooms, "room"):
            self._rooms.room = adam_cpu.Room(BLOCK)
        room: adam_cpu.Room = self._rooms.room
        return room

    def _send(self, blocks: Sequence[_Block]) -> Done:
        if self._up is not None:
            torch.cuda.set_device(self._device)
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            for block in blocks:
                block.send()
            return Done() if self._up is None else Done(self._up.record_event())


class _Block:
    """Elements `first` to `stop` of one piece of a chunk."""

    def __init__(
        self, chunk: Chunk, states: Sequence[Tensor], index: int, gradient: Tensor, first: int, stop: int
    ) -> None:
        self.chunk, self.index = chunk, index
        piece = chunk.pieces[index]
        offset, copy = piece.start - chunk.start, chunk.copy_of(piece)
        self._states = [state[offset + first : offset + stop] for state in states]
        self._gradient = gradient[first:stop]
        self._target = None if copy is None else copy[first:stop]  # where forward needs it
        self._made = self._target
        if self._target is not None and self._target.device.type != "cpu":
            # In the place of the gradient, which has been read by then.
            self._made = self._gradient.view(torch.uint8)[: self._target.nbytes].view(self._target.dtype)

    def tensors(self) -> AdamTensors:
        piece, (master, exp_avg, exp_avg_sq) = self.chunk.pieces[self.index], self._states
        made = self._made if self.chunk.kernel_makes_copy else None
        return AdamTensors(master, self._gradient, exp_avg, exp_avg_sq, made, piece.step, piece.seed)

    def send(self) -> None:
        made = self._made if self.chunk.kernel_makes_copy else self._states[0]
        if self._target is not None and made is not None and self._target.data_ptr() != made.data_ptr():
            self._target.copy_(made, non_blocking=True)


def _cut(chunk: Chunk) -> Iterator[tuple[int, int, int]]:
    """Index of a piece, first and last element of each of its blocks. States that are rounded at random stay in one:
    the bits for that come in a row."""
    is_exact = all(state.dtype is torch.float32 for state in chunk.states)
    for index, piece in enumerate(chunk.pieces):
        size = piece.stop - piece.start
        step = BLOCK if is_exact else size
        for first in range(0, size, step):
            yield index, first, min(first + step, size)
