"""deepspeed.checkpointing on torch.utils.checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from zerofold.compat.deepspeed.utils.logging import logger


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Runs `function` and forgets what it computed inside; backward runs it again.

    >>> import torch
    >>> x = torch.ones(2, requires_grad=True)
    >>> checkpoint(torch.square, x).sum().backward(); x.grad
    tensor([2., 2.])
    """
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Says which of these have no effect: activations that are kept are torch's, on the device, in one piece."""
    asked = {
        "partition_activations": partition_activations,
        "contiguous_checkpointing": contiguous_checkpointing,
        "checkpoint_in_cpu": checkpoint_in_cpu,
        "profile": profile,
    }
    without_effect = [name for name, value in asked.items() if value]
    if without_effect:
        logger.warning(
            "deepspeed.checkpointing.configure: %s: still to come in zerofold; checkpoints stay whole, on the device",
            ", ".join(without_effect),
        )


def is_configured() -> bool:
    """Always: there is nothing that has to be configured first.

    >>> is_configured()
    True
    """
    return True


def reset() -> None:
    """Nothing is kept between iterations that would have to be dropped."""
