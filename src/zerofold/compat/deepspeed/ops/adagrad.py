"""Adagrad with DeepSpeed's constructor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Adagrad


class DeepSpeedCPUAdagrad(Adagrad):
    """DeepSpeed's Adagrad for optimizer states in host memory.

    >>> import torch
    >>> DeepSpeedCPUAdagrad([torch.nn.Parameter(torch.ones(2))]).defaults["lr"]
    0.01
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad or not fp32_optimizer_states:
            raise ValueError(
                f"DeepSpeedCPUAdagrad: amsgrad={amsgrad} with fp32_optimizer_states={fp32_optimizer_states} is not "
                "available; leave both out"
            )
        super().__init__(model_params, lr=lr, eps=eps, weight_decay=weight_decay)
