"""What callers ask of checkpoints, looked at before anything is changed: each line names the argument and the fix."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from zerofold.agree import agree
from zerofold.comm import Comm
from zerofold.offload.wishes import read_size
from zerofold.parallel.mesh import Mesh
from zerofold.placement import Tier

T = TypeVar("T")

AUTO = "auto"
_UNIT = "checkpoint_blocks(partition=)"


def check_model(function: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"{function}: the model is a {type(model).__name__}: give a torch.nn.Module")


def check_path(keep: str, path: str | os.PathLike[str] | None) -> None:
    if path is not None and keep not in (AUTO, Tier.NVME.value):
        raise ValueError(f'path={str(path)!r} is for keep="nvme", not for keep={keep!r}: leave it out')


def check_policy(policy: Any, use_reentrant: bool) -> None:
    if policy is None:
        return
    if not callable(policy) and not isinstance(policy, list):
        raise ValueError(f"policy={policy!r}: give a list of operators ([torch.ops.aten.mm.default]) or a function")
    if use_reentrant:
        raise ValueError("policy= needs a checkpoint that is not reentrant: leave use_reentrant=True out")
    for each in policy if isinstance(policy, list) else ():
        if not isinstance(each, torch._ops.OpOverload):
            name = str(getattr(each, "__name__", each))
            fix = f"torch.ops.aten.{name if hasattr(torch.ops.aten, name) else 'mm'}.default"
            raise ValueError(f"policy: {name!r} is not an operator as torch's dispatcher has it: give one like {fix}")


def check_blocks(
    every: Any, policy: Any, keep: str, contiguous: bool, path: Any, partition: Any, use_reentrant: bool
) -> None:
    if isinstance(every, bool) or not isinstance(every, int) or every < 1:
        raise ValueError(f"every={every!r}: give the number of blocks per checkpoint, at least 1")
    if contiguous and keep != "device":
        raise ValueError(f'contiguous=True is for keep="device", not for keep={keep!r}: leave it out')
    check_policy(policy, use_reentrant)
    if keep in (tier.value for tier in Tier):
        check_path(keep, path)
    if partition is not None and not isinstance(partition, Mesh):
        raise ValueError(f"partition={partition!r}: give what zf.mesh(tensor=…) returned")


def read_budget(budget: int | str | None, keep: str) -> int | None:
    """In bytes."""
    if budget is None:
        return None
    if keep != AUTO:
        raise ValueError(f'budget={budget!r} is for keep="auto", not for keep={keep!r}: leave it out')
    found = read_size("budget", budget)
    if not found:
        raise ValueError(f"budget={budget!r} allows nothing: give more than 0, or leave it out for all of the device")
    return found


def look_together(job: Comm, look: Callable[[], T], settings: str) -> T:
    """What `look` finds, once all ranks have come and ask for the same."""
    found = agree(job, look, unit=_UNIT)
    told = job.all_gather_objects(settings, unit=_UNIT)
    odd = next((rank for rank, said in enumerate(told) if said != told[0]), None)
    if odd is not None:
        first, other = (f"rank {job.global_ranks[at]} asks for {told[at]}" for at in (0, odd))
        raise ValueError(
            f"checkpoint_blocks: {first} where {other}: with partition= each keeps parts for the others, so call "
            "it with the same arguments on every rank"
        )
    return found
