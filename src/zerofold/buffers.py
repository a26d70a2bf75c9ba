"""Buffers are whole on every rank and follow rank 0's, as under DistributedDataParallel.

DDP sends all of them before every forward. Most never change (masks, rotary frequencies), so here a module's buffers
are sent after a backward, and only when one of them was written to or replaced on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerofold.comm import Comm

Seen = list[tuple[Tensor, int]]
"""The buffers of a module with their versions."""


class Buffers:
    """The buffers of one model, by the module that holds them."""

    def __init__(self, model: nn.Module, everyone: Comm) -> None:
        self._everyone = everyone
        self.source = 0  # the rank that the others follow
        self.holders: dict[nn.Module, str] = {}
        self._seen: dict[nn.Module, Seen] = {}
        self.look(model)
        self.synchronize([1.0] * len(self.holders))

    def look(self, model: nn.Module) -> None:
        """Finds modules that have buffers since the last look."""
        for name, module in model.named_modules():
            if _of(module) and module not in self.holders:
                self.holders[module] = name

    def changed(self) -> list[float]:
        """By module: 1 where a buffer was written to or replaced since the last time.

        torch's batch norm counts its batches in a buffer visibly and updates the statistics unseen, so one buffer
        speaks for all of its module.
        """
        return [float(not _same(self._seen.get(module, []), _of(module))) for module in self.holders]

    def synchronize(self, changed: Sequence[float]) -> None:
        for (module, name), is_changed in zip(self.holders.items(), changed, strict=True):
            if not is_changed:
                continue
            for buffer, _ in _of(module):
                sent = buffer.contiguous()
                self._everyone.broadcast(_as_bytes(sent), self.source, unit=name).wait()
                if sent is not buffer:
                    buffer.copy_(sent)
            self._seen[module] = _of(module)


def _of(module: nn.Module) -> Seen:
    return [(buffer, buffer._version) for buffer in module._buffers.values() if buffer is not None and buffer.numel()]


def _same(before: Seen, now: Seen) -> bool:
    return len(before) == len(now) and all(a is b and x == y for (a, x), (b, y) in zip(before, now, strict=True))


def _as_bytes(tensor: Tensor) -> Tensor:
    """Backends know few dtypes, and all of them bytes."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().reshape(-1).view(torch.uint8)
