"""The logger under DeepSpeed's name, so that code which sets its level finds it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch.distributed as dist

logger = logging.getLogger("zerofold.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Logs on these ranks only; None or -1 means all.

    >>> log_dist("shown at the level of the logger", ranks=[0])
    """
    own = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or own in ranks or -1 in ranks:
        logger.log(level, "[rank %d] %s", own, message)


def print_rank_0(message: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message)
