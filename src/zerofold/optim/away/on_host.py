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
from zerofold.optim.away.chunks import Chunk, PieceWork
from zerofold.optim.host_pool import STRIP, HostPool, PoolJob

_MANY = 64  # different numbers of groups and steps; those of steps long ago go


class HostUpdate:
    """Chunks as strips for a pool of cores. New parameters go up on the stream for all that does."""

    def __init__(self, device: torch.device, up: Any, pool: HostPool) -> None:
        self._device, self._up, self._pool = device, up, pool
        self._rooms = threading.local()  # of each core
        self._numbers: dict[object, Numbers] = {}  # few: parameters of one group and step have the same

    def submit(self, chunk: Chunk, states: Sequence[Tensor], then: Callable[[Done], None]) -> PoolJob:
        """`states` are the chunk's master and moments in host memory. They are updated when the job is done; the copy
        has then set out for where forward needs it, and `then` was told its arrival."""
        work = [_HostPiece(chunk, piece, states, self._numbers_of(chunk, piece)) for piece in chunk.pieces]
        update = self._update  # once: each mention of a method is an object of its own
        strips = [partial(update, each, first) for each in work for first in each.strips]
        return self._pool.submit(strips, lambda: then(self._send(work)))

    def _numbers_of(self, chunk: Chunk, piece: PieceWork) -> Numbers:
        key = (piece.settings, piece.step, chunk.scaling)
        numbers = self._numbers.get(key)
        if numbers is None:
            scale, its = chunk.scaling.tensor("cpu"), piece.settings
            numbers = Numbers(
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
            if len(self._numbers) >= _MANY:
                self._numbers.clear()
            self._numbers[key] = numbers
        return numbers  # not looked up again: chunks from a file come in another thread, which may have cleared it

    def _update(self, work: _HostPiece, first: int) -> None:
        if not hasattr(self._rooms, "room"):
            self._rooms.room = torch.empty(adam_cpu.BLOCK)
        with torch.no_grad():
            work.update(first, self._rooms.room)

    def _send(self, work: Sequence[_HostPiece]) -> Done:
        if self._up is not None:
            torch.cuda.set_device(self._device)
        with nullcontext() if self._up is None else torch.cuda.stream(self._up):
            for each in work:
                each.send()
            return Done() if self._up is None else Done(self._up.record_event())


class _HostPiece:
    """One piece of a chunk, made by the thread that launches kernels: it cuts nothing, the cores do that."""

    def __init__(self, chunk: Chunk, piece: PieceWork, states: Sequence[Tensor], numbers: Numbers) -> None:
        self._chunk, self._piece, self._states, self._numbers = chunk, piece, states, numbers
        self._gradient = piece.gradient if piece.gradient.device.type == "cpu" else piece.gradient.cpu()
        self._is_exact = all(s.dtype is torch.float32 for s in states) and chunk.scaling.clip_value is None
        # Where strips begin. States that are rounded at random stay in one: the bits for that come in a row.
        size = self._gradient.numel()
        self.strips = range(0, size, STRIP if self._is_exact else max(1, size))

    def update(self, first: int, room: Tensor) -> None:
        self._chunk.arrived.finish()
        here = self._strip(first)
        start = self._piece.start - self._chunk.start
        master, exp_avg, exp_avg_sq = (state[start + here.start : start + here.stop] for state in self._states)
        gradient, made = self._gradient[here], self._made(here)
        if self._is_exact:
            update_strip(Strip(master, gradient, exp_avg, exp_avg_sq, made), self._numbers, room)
            return
        piece, scaling = self._piece, self._chunk.scaling
        tensors = adam_cpu.AdamTensors(master, gradient, exp_avg, exp_avg_sq, made, piece.step, piece.seed)
        adam_cpu.update([tensors], piece.settings, scaling.tensor("cpu"), scaling.clip_value)

    def _strip(self, first: int) -> slice:
        return slice(first, min(first + self.strips.step, self._gradient.numel()))

    @property
    def _target(self) -> Tensor | None:
        """Where forward needs the new parameters."""
        return self._chunk.copy_of(self._piece)

    def _made(self, here: slice) -> Tensor | None:
        """Where a strip's new parameters are made: in the place of its gradient, which has been read by then, unless
        they are needed in host memory anyway."""
        if self._chunk.copy is None or not self._chunk.kernel_makes_copy:
            return None
        target = self._target
        assert target is not None
        if target.device.type == "cpu":
            return target[here]
        count = (here.stop - here.start) * target.element_size()
        return self._gradient[here].view(torch.uint8)[:count].view(target.dtype)

    def send(self) -> None:
        target, makes_copy = self._target, self._chunk.kernel_makes_copy
        if target is None or (makes_copy and target.device.type == "cpu"):
            return
        if makes_copy and self._gradient.element_size() == target.element_size():
            target.copy_(self._gradient.view(target.dtype), non_blocking=True)  # all strips lie in a row
            return
        start = self._piece.start - self._chunk.start
        for first in self.strips:
            here = self._strip(first)
            made = self._made(here)
            master = self._states[0][start + here.start : start + here.stop]
            target[here].copy_(master if made is None else made, non_blocking=True)
