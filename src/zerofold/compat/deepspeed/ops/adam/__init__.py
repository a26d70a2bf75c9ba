"""Adam with DeepSpeed's constructors, on torch's Adam.

Nothing is compiled: where the model is sharded, zerofold's own update or torch's fused one does the work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.optim import Adam


class _DeepSpeedAdam(Adam):
    def __init__(self, parameters: Iterable[Any], *, bias_correction: bool, amsgrad: bool, **settings: Any) -> None:
        if not bias_correction:
            raise ValueError(
                f"{type(self).__name__}: bias_correction=False is not available; leave it out, or write that optimizer "
                "as a torch.optim.Optimizer and pass it to initialize"
            )
        super().__init__(parameters, amsgrad=amsgrad, **settings)


class FusedAdam(_DeepSpeedAdam):
    """DeepSpeed's Adam for accelerators.

    >>> import torch
    >>> optimizer = FusedAdam([torch.nn.Parameter(torch.ones(2))], lr=1e-4, weight_decay=0.1)
    >>> optimizer.param_groups[0]["decoupled_weight_decay"]
    True
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        if amsgrad:
            raise ValueError("FusedAdam: amsgrad=True is not available, as in DeepSpeed; use torch.optim.AdamW")
        self.set_grad_none = set_grad_none
        super().__init__(
            params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adam_w_mode,
        )


class DeepSpeedCPUAdam(_DeepSpeedAdam):
    """DeepSpeed's Adam for optimizer states in host memory.

    >>> import torch
    >>> optimizer = DeepSpeedCPUAdam([torch.nn.Parameter(torch.ones(2))], adamw_mode=False)
    >>> optimizer.param_groups[0]["decoupled_weight_decay"]
    False
    """

    def __init__(
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if not fp32_optimizer_states:
            raise ValueError(
                "DeepSpeedCPUAdam: fp32_optimizer_states=False is not available; for states in bf16 give "
                "zerofold.prepare a precision with them"
            )
        super().__init__(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            decoupled_weight_decay=adamw_mode,
        )
