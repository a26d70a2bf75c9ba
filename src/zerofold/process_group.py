"""Joining the process group that the environment describes, as torchrun and `zerofold launch` set it up."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def join_process_group(device_type: str | None = None, *, timeout: timedelta | None = None) -> torch.device:
    """Starts torch.distributed from the environment; returns this rank's device.

    With CUDA (or `device_type="cuda"`) a rank takes GPU number LOCAL_RANK; collectives run on NCCL for tensors there
    and on gloo for those on the host. Without CUDA all is gloo.
    """
    missing = [name for name in NEEDED if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"{', '.join(missing)} not set: start the script with torchrun or zerofold launch, or the function with "
            "run_ranks"
        )
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type != "cuda":
        dist.init_process_group("gloo", **_meeting_point(), **options)
        return torch.device("cpu")
    device = local_device("cuda")
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, **_meeting_point(), **options)
    return device


def join_or_be_alone(device_type: str | None = None, *, timeout: timedelta | None = None) -> torch.device:
    """As `join_process_group`; a script that was started without a launcher is a world of one."""
    if dist.is_initialized():
        return local_device(device_type)
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return join_process_group(device_type, timeout=timeout)
    device = local_device(device_type)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def group_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Where the ranks of a group train: a group without NCCL means the CPU, whatever the machine has."""
    has_nccl = torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group))
    return local_device("cuda" if has_nccl else "cpu")


def local_device(device_type: str | None = None) -> torch.device:
    """The GPU with the number of this rank on its machine, or the CPU where there is none."""
    if device_type is None:
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
    if device_type != "cuda":
        return torch.device(device_type)
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("RANK", "0")))
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        raise RuntimeError(f"local rank {local_rank} has no GPU of its own, there are {gpus}: start fewer ranks")
    return torch.device("cuda", local_rank)


def _meeting_point() -> dict[str, Any]:
    """Where ranks find each other; after a restart not where they did before.

    torchrun with its default rendezvous keeps the store over restarts, with the addresses of processes that are gone.
    """
    store, rank, world = next(rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return {"store": dist.PrefixStore(f"attempt {attempt}", store), "rank": rank, "world_size": world}
