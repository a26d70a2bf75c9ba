"""Lion with DeepSpeed's constructors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zerofold.optim.lion import Lion


class FusedLion(Lion):
    """DeepSpeed's Lion for accelerators.

    >>> import torch
    >>> FusedLion([torch.nn.Parameter(torch.ones(2))], lr=1e-4).defaults["betas"]
    (0.9, 0.999)
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
    ) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, lr=lr, betas=betas, weight_decay=weight_decay)


class DeepSpeedCPULion(Lion):
    """DeepSpeed's Lion for optimizer states in host memory.

    >>> import torch
    >>> DeepSpeedCPULion([torch.nn.Parameter(torch.ones(2))]).defaults["lr"]
    0.001
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError("DeepSpeedCPULion: fp32_optimizer_states=False is not available; leave it out")
        super().__init__(model_params, lr=lr, betas=betas, weight_decay=weight_decay)
