"""The process groups that DeepSpeed keeps: data parallelism over all ranks, or over those of `initialize(mpu=...)`."""

from __future__ import annotations

import torch.distributed as dist

from zerofold.compat.mesh_in_use import data_rank, mesh_in_use
from zerofold.parallel.mesh import DATA


def _get_data_parallel_group() -> dist.ProcessGroup | None:
    mesh = mesh_in_use()
    if mesh is None:
        return dist.group.WORLD
    if mesh.replicate > 1:
        raise ValueError(
            f"mpu: replicate={mesh.replicate}: ranks with other samples are in no single group; use mesh.zero, "
            "which has both axes"
        )
    return mesh.along(DATA).get_group()


def _get_data_parallel_world_size() -> int:
    """Ranks with other samples.

    >>> _get_data_parallel_world_size()
    1
    """
    mesh = mesh_in_use()
    return dist.get_world_size() if mesh is None else mesh.data * mesh.replicate


def _get_data_parallel_rank() -> int:
    mesh = mesh_in_use()
    return dist.get_rank() if mesh is None else data_rank(mesh)


def _get_model_parallel_world_size() -> int:
    mesh = mesh_in_use()
    return 1 if mesh is None else mesh.tensor


def _get_sequence_parallel_world_size() -> int:
    return 1


def _get_sequence_parallel_rank() -> int:
    return 0


def _get_sequence_parallel_group() -> None:
    return None


get_data_parallel_group = _get_data_parallel_group
get_data_parallel_world_size = _get_data_parallel_world_size
get_data_parallel_rank = _get_data_parallel_rank
get_model_parallel_world_size = _get_model_parallel_world_size
get_tensor_model_parallel_world_size = _get_model_parallel_world_size
