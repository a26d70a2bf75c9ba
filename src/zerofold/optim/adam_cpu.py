"""The one-pass update on the CPU: torch's fused kernel on blocks that stay in the cache between the casts around it.

    gradient  ──cast, × scale, clamp──►  room  ─┐
    master    ═════════════════════════════════ fused ═══►  master  ──cast──►  copy
                                                  one block at a time

Memory sees each number once, because what a cast writes is read again while it is in the cache. fp32 tensors are
updated where they are; bf16 states take the way of the gradient, and are rounded back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerofold.optim.onepass import AdamSettings, AdamTensors

# Elements per thread: as many as fit the shared cache, because every block costs about 20 µs of calls. Measured: blocks
# of 2**14 lose to separate passes, of 2**17 and 2**18 win 1.1 to 1.2 times, of 2**19 1.25 to 1.3. torch splits the
# elements of an operation evenly among its threads, so a thread meets its own part again. As a multiple of every vector
# width it also leaves the bits of the whole tensor's update: only a tensor's end is not a whole vector.
BLOCK = 2**19
VIEWS_AT_ONCE = 256  # blocks whose views are made in one call


def update(
    tensors: Sequence[AdamTensors],
    settings: AdamSettings,
    scale: Tensor | None,
    clip_value: float | None,
    *,
    block: int | None = None,
) -> None:
    """See `onepass.adam`. `block` is another number of elements per thread; no bit depends on it."""
    size = min((block or BLOCK) * torch.get_num_threads(), max(each.master.numel() for each in tensors))
    room = Room(size)
    if scale is not None and scale.item() == 1.0:  # the usual coefficient where clipping does not bind
        scale = None
    changed = scale is not None or clip_value is not None
    # The fused kernel can divide by a scale as it goes, at no cost. It writes the result back, so it gets a copy.
    divisor = None if scale is None or clip_value is not None else scale.reciprocal()
    kernels = {step: Fused(settings, step, divisor) for step in dict.fromkeys(each.step for each in tensors)}
    for each in tensors:
        fused, noises = kernels[each.step], _Noises(each, room)
        for master, gradient, exp_avg, exp_avg_sq, copy in _blocks(each, size):
            if changed or gradient.dtype != torch.float32:
                gradient = room.copied(0, gradient, torch.float32)
                if scale is not None and divisor is None:
                    gradient.mul_(scale)
                if clip_value is not None:
                    gradient.clamp_(-clip_value, clip_value)
            held = new = (master, exp_avg, exp_avg_sq)
            if noises.wanted:
                new = (room.fp32(1, master), room.fp32(2, exp_avg), room.fp32(3, exp_avg_sq))
            fused(new[0], gradient, new[1], new[2])
            if noises.wanted:
                for place, (old, values) in enumerate(zip(held, new, strict=True)):
                    if old is not values:
                        noises.round(place, values, old)
            if each.copy is not None:
                copy.copy_(master)


class Fused:
    """torch's fused kernel with the numbers of one step of one parameter; it may be used by several threads."""

    def __init__(self, settings: AdamSettings, step: int, divisor: Tensor | None) -> None:
        """The gradient is divided by `divisor` where it is given, and written back so."""
        self.divisor = divisor
        self._kernel = torch._fused_adamw_ if settings.decoupled else torch._fused_adam_
        self._step = [torch.tensor(float(step))]
        self._numbers = settings.of_kernel

    def __call__(self, master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        self._kernel(
            [master], [gradient], [exp_avg], [exp_avg_sq], [], self._step, **self._numbers, grad_scale=self.divisor
        )


def _blocks(each: AdamTensors, size: int) -> Iterator[tuple[Tensor, ...]]:
    """Views of master, gradient, moments and copy; the master again where there is no copy."""
    copy = each.master if each.copy is None else each.copy
    flat = [t.detach().view(-1) for t in (each.master, each.gradient, each.exp_avg, each.exp_avg_sq, copy)]
    if each.master.numel() <= size:  # most tensors of most models: no need to pay for cutting
        yield tuple(flat)
        return
    stride = size * VIEWS_AT_ONCE
    for start in range(0, each.master.numel(), stride):
        yield from zip(*(t[start : start + stride].split(size) for t in flat), strict=True)


class Room:
    """Memory for one block of each tensor that needs some, made when first needed."""

    def __init__(self, size: int) -> None:
        self._size = size  # at least the elements of a block
        self._places: dict[int | str, Tensor] = {}

    def fp32(self, place: int, source: Tensor) -> Tensor:
        """The block's values as fp32: the block itself if it is, otherwise in a place of their own."""
        return source if source.dtype == torch.float32 else self.copied(place, source, torch.float32)

    def copied(self, place: int | str, source: Tensor, dtype: torch.dtype) -> Tensor:
        if place not in self._places:
            self._places[place] = torch.empty(self._size, dtype=dtype)
        room, count = self._places[place], source.numel()
        return (room if count == self._size else room[:count]).copy_(source)


class _Noises:
    """Stochastic rounding of one parameter's states to bf16.

    Each state has a generator, and four elements share 64 random bits: so the bits do not depend on the block size,
    which is a multiple of four, nor on the number of threads.
    """

    def __init__(self, each: AdamTensors, room: Room) -> None:
        self.wanted = any(t.dtype != torch.float32 for t in (each.master, each.exp_avg, each.exp_avg_sq))
        if self.wanted:
            seeds = random.Random(each.seed)  # torch's CPU generator would see the lower half of the seed alone
            self._generators = [torch.Generator().manual_seed(seeds.getrandbits(32)) for _ in range(3)]
            self._room = room

    def round(self, place: int, values: Tensor, out: Tensor) -> None:
        """Writes the fp32 values to `out` as bf16; they are lost. See `adam_plain.stochastic` for the idea."""
        count = values.numel()
        drawn = torch.empty(-(-count // 4), dtype=torch.int64)
        drawn.random_(-(2**63), None, generator=self._generators[place])
        noise = self._room.copied("noise", drawn.view(torch.int16)[:count], torch.int32).bitwise_and_(2**16 - 1)
        broken = values.isnan() if values.max().isnan() else None  # a carry could turn a NaN into zero
        values.view(torch.int32).add_(noise).bitwise_and_(-(2**16))
        out.copy_(values)
        if broken is not None:
            out.masked_fill_(broken, torch.nan)
