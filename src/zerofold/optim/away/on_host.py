"""One chunk on the host's cores: the one-pass update, and the new parameters on their way up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofold.memory import Done
from zerofold.optim import adam_cpu
from zerofold.optim.adam_strip import Numbers, Strip, update_strip
from zerofold.optim.away.chunks import Chunk
from zerofold.optim.host_pool import STRIP, HostPool, PoolJob


class HostUpdate:
    """Chunks as strips for a pool of cores. New parameters go up on the stream for all that does."""

    def __init__(self, device: torch.device, up: Any, pool: HostPool) -> None:
        self._device, self._up, self._pool = device, up, pool
        self._rooms = threading.local()  # of each core

    def submit(self, chunk: Chunk, states: Sequence[Tensor], then: Callable[[Done], None]) -> PoolJob:
        """`states` are the chunk's master and moments in host memory. They are updated when the job is done; the copy
        has then set out for where forward needs it, and `then` was told its arrival."""
        work = [_PieceWork(chunk, index, states) for index in range(len(chunk.pieces))]
        strips = [partial(self._update, each, first) for each in work for first in each.strips()]
        return self._pool.submit(strips, lambda: then(self._send(work)))

    def _update(self, work: _PieceWork, first: int) -> None:
        if not hasattr(self._rooms, "room"):
            self._rooms.room = torch.empty(adam_cpu.BLOCK)
        with torch.no_grad():
            work.update(first, self._rooms.room)

    def _send(self, work: Sequence[_PieceWork]) -> Done:
        if self._up is not None:
            torch.cuda.set_device(self._device)
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            for each in work:
                each.send()
            return Done() if self._up is None else Done(self._up.record_event())


class _PieceWork:
    """One piece of a chunk. What can be is prepared once: its strips should hold the interpreter's lock for short."""

    def __init__(self, chunk: Chunk, index: int, states: Sequence[Tensor]) -> None:
        piece = self._piece = chunk.pieces[index]
        start, stop = piece.start - chunk.start, piece.stop - chunk.start
        self._arrived, self._scaling = chunk.arrived, chunk.scaling
        self._master, self._exp_avg, self._exp_avg_sq = (state[start:stop] for state in states)
        self._gradient = piece.gradient.cpu()  # the same memory where it is on the host
        self._target = chunk.copy_of(piece)  # where forward needs the new parameters
        self._makes_copy = chunk.kernel_makes_copy
        self._is_exact = all(s.dtype is torch.float32 for s in states) and chunk.scaling.clip_value is None
        scale, its = chunk.scaling.tensor("cpu"), piece.settings
        self._numbers = Numbers(
            step=[torch.tensor(float(piece.step))],
            divisor=None if scale is None else scale.reciprocal(),
            decoupled=its.decoupled,
            lr=its.lr,
            beta1=its.beta1,
            beta2=its.beta2,
            weight_decay=its.weight_decay,
            eps=its.eps,
            maximize=its.maximize,
        )

    def strips(self) -> range:
        """Where they begin. States that are rounded at random stay in one: the bits for that come in a row."""
        return range(0, self._gradient.numel(), STRIP if self._is_exact else max(1, self._gradient.numel()))

    def update(self, first: int, room: Tensor) -> None:
        self._arrived.finish()
        here = slice(first, first + self.strips().step)
        master, gradient, made = self._master[here], self._gradient[here], self._made(here)
        exp_avg, exp_avg_sq = self._exp_avg[here], self._exp_avg_sq[here]
        if not self._is_exact:
            piece, scaling = self._piece, self._scaling
            tensors = adam_cpu.AdamTensors(master, gradient, exp_avg, exp_avg_sq, made, piece.step, piece.seed)
            adam_cpu.update([tensors], piece.settings, scaling.tensor("cpu"), scaling.clip_value)
            return
        update_strip(Strip(master, gradient, exp_avg, exp_avg_sq, made), self._numbers, room)

    def _made(self, here: slice) -> Tensor | None:
        """Where a strip's new parameters are made: in the place of its gradient, which has been read by then, unless
        they are needed in host memory anyway."""
        if self._target is None or not self._makes_copy:
            return None
        target = self._target[here]
        if target.device.type == "cpu":
            return target
        return self._gradient[here].view(torch.uint8)[: target.nbytes].view(target.dtype)

    def send(self) -> None:
        if self._target is None or (self._makes_copy and self._target.device.type == "cpu"):
            return
        if self._makes_copy and self._gradient.element_size() == self._target.element_size():
            self._target.copy_(self._gradient.view(self._target.dtype), non_blocking=True)  # all strips lie in a row
            return
        for first in self.strips():
            here = slice(first, first + self.strips().step)
            made = self._made(here)
            self._target[here].copy_(self._master[here] if made is None else made, non_blocking=True)
