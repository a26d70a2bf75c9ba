"""The one-pass update of tensors without values: what a simulator sees is one kernel over the same tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerofold.optim.onepass import AdamSettings, AdamTensors


def update(
    tensors: Sequence[AdamTensors], settings: AdamSettings, scale: Tensor | None, clip_value: float | None
) -> None:
    """torch's fused kernel reads and writes the same tensors, and takes no memory of its own either."""
    torch._fused_adamw_(
        [each.master for each in tensors],
        [each.gradient for each in tensors],
        [each.exp_avg for each in tensors],
        [each.exp_avg_sq for each in tensors],
        [],
        [],
        **settings.of_kernel,
    )
    for each in tensors:
        torch.autograd.graph.increment_version(each.master)
        if each.copy is not None:
            each.copy.zero_()  # written, not read
