"""Buffers are whole on every rank and follow rank 0's, as under DistributedDataParallel.

DDP sends all of them before every forward. Most never change (masks, rotary frequencies), so here a module's buffers
are sent after a backward, and only when its forward has written to one of them on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from zerofold.comm import Comm


class Buffers:
    """The buffers of one model, grouped by the module that holds them."""

    def __init__(self, model: nn.Module, everyone: Comm) -> None:
        self._everyone = everyone
        self.groups: list[tuple[str, list[Tensor]]] = []
        for name, module in model.named_modules():
            held = [buffer for buffer in module._buffers.values() if buffer is not None and buffer.numel()]
            if held:
                self.groups.append((name, held))
        self._versions: list[list[int]] = []
        self.synchronize([1.0] * len(self.groups))

    def changed(self) -> list[float]:
        """By group: 1 where a buffer was written to since the last time.

        torch's batch norm counts its batches in a buffer visibly and updates the statistics unseen, so one buffer
        speaks for all of its module.
        """
        return [float(versions != now) for versions, now in zip(self._versions, self._now(), strict=True)]

    def synchronize(self, changed: Sequence[float]) -> None:
        for (name, buffers), is_changed in zip(self.groups, changed, strict=True):
            for buffer in buffers if is_changed else ():
                sent = buffer.contiguous()
                self._everyone.broadcast(_as_bytes(sent), 0, unit=name).wait()
                if sent is not buffer:
                    buffer.copy_(sent)
        self._versions = self._now()

    def _now(self) -> list[list[int]]:
        return [[buffer._version for buffer in buffers] for _, buffers in self.groups]


def _as_bytes(tensor: Tensor) -> Tensor:
    """Backends know few dtypes, and all of them bytes."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.detach().reshape(-1).view(torch.uint8)
