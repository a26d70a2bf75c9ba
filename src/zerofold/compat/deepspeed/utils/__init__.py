"""deepspeed.utils: access to sharded tensors, the logger, groups, leaf modules."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zerofold.compat.deepspeed.refusals import missing
from zerofold.compat.deepspeed.runtime.dataloader import RepeatingLoader
from zerofold.compat.deepspeed.utils import groups, logging, tensor_fragment, zero_to_fp32
from zerofold.compat.deepspeed.utils.logging import log_dist, logger
from zerofold.compat.deepspeed.utils.tensor_fragment import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_grad,
    safe_set_local_optimizer_state,
    safe_update_full_grad_vectorized,
)
from zerofold.compat.deepspeed.utils.z3_leaf_module import (
    get_z3_leaf_modules,
    set_z3_leaf_modules,
    unset_z3_leaf_modules,
    z3_leaf_module,
)

__all__ = [
    "RepeatingLoader",
    "get_z3_leaf_modules",
    "groups",
    "is_initialized",
    "log_dist",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
    "set_z3_leaf_modules",
    "tensor_fragment",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
    "zero_to_fp32",
]


def is_initialized() -> bool:
    """Whether there is a process group; older code asks here."""
    return dist.is_initialized()


def __getattr__(name: str) -> Any:
    raise missing(__name__, name)
