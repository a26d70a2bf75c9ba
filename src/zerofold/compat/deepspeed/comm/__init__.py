"""deepspeed.comm: torch.distributed under another name, with the few things DeepSpeed adds.

What is not written here is torch's own, so any of its collectives, groups and reductions can be named.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from zerofold.compat.deepspeed.accelerator import get_accelerator
from zerofold.compat.deepspeed.refusals import missing
from zerofold.compat.initialize import init_distributed as _init_distributed


def init_distributed(*args: Any, **kwargs: Any) -> None:
    """Starts the process group from the environment if there is none; see zerofold.compat.initialize."""
    _init_distributed(*args, **kwargs)


def is_available() -> bool:
    return dist.is_available()


def get_local_rank() -> int:
    """
    >>> get_local_rank() >= 0
    True
    """
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_world_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD


def get_global_rank(group: dist.ProcessGroup | None = None, group_rank: int = 0) -> int:
    return group_rank if group is None else dist.get_global_rank(group, group_rank)


def get_all_ranks_from_group(group: dist.ProcessGroup | None = None) -> list[int]:
    """
    >>> get_all_ranks_from_group()
    [0]
    """
    return list(range(dist.get_world_size())) if group is None else dist.get_process_group_ranks(group)


def inference_all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, group: dist.ProcessGroup | None = None) -> Any:
    return dist.all_reduce(tensor, op, group)


def allgather_fn(
    output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup | None = None, async_op: bool = False
) -> Any:
    return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def has_all_gather_into_tensor() -> bool:
    return True


def has_reduce_scatter_tensor() -> bool:
    return True


def initialize_mesh_device(mesh_shape: Sequence[int], mesh_dim_names: Sequence[str]) -> DeviceMesh:
    kind = get_accelerator().device_name()
    return init_device_mesh(kind, tuple(mesh_shape), mesh_dim_names=tuple(mesh_dim_names))


def configure(*_: Any, **__: Any) -> None:
    """Taken and not needed: zerofold counts every byte anyway; zf.ledger(engine.module) shows them."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """DeepSpeed prints its log of collectives here; zerofold's is per model, in zf.ledger(engine.module)."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print("zerofold counts communication per model: zf.ledger(engine.module).snapshot()['comm_bytes']")
    return {} if return_dict else None


def __getattr__(name: str) -> Any:
    try:
        return getattr(dist, name)
    except AttributeError:
        raise missing(__name__, name) from None
