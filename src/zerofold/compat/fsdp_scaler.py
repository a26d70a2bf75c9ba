"""ShardedGradScaler: torch's GradScaler under the name that FSDP scripts import."""

from __future__ import annotations

from typing import Any

import torch

from zerofold.compat.fsdp_optimizers import follow


class ShardedGradScaler(torch.amp.GradScaler):
    """Scales the loss of an fp16 model. Sharded gradients tell all ranks by themselves when one was not finite.

    >>> from zerofold.fsdp import ShardedGradScaler
    >>> ShardedGradScaler(init_scale=1024.0).get_scale()
    1024.0
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        backoff_factor: float = 0.5,
        growth_factor: float = 2.0,
        growth_interval: int = 2000,
        enabled: bool = True,
        process_group: Any = None,
    ) -> None:
        """`process_group` is taken and not needed: parameters know their ranks."""
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        chosen = device or (accelerator.type if accelerator is not None else "cpu")
        super().__init__(chosen, init_scale, growth_factor, backoff_factor, growth_interval, enabled)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        follow(optimizer)  # it looks for gradients before the optimizer's first step
        super().unscale_(optimizer)
