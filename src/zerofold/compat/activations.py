"""How `deepspeed.checkpointing.checkpoint` keeps its inputs: said by a config or by `configure`, asked by a function
that knows no model.

DeepSpeed has this in globals. Here it belongs to the context (PEP 567) that said it: another thread, or whoever runs
in a context of its own, has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from zerofold.activation.store import CheckpointStore
from zerofold.parallel.mesh import Mesh


@dataclass(frozen=True)
class Keeping:
    store: CheckpointStore | None = None
    """None: on the device, where they are."""
    synchronizes: bool = False
    """The device is waited for before and after each checkpointed call."""
    profiles: bool = False
    """Each call says how long it took, in forward and when it is made again."""


_KEEPING: ContextVar[Keeping | None] = ContextVar("zerofold_checkpoints", default=None)


def keeping() -> Keeping:
    """As it was said last.

    >>> keeping().store is None
    True
    """
    return _KEEPING.get() or Keeping()


def keep_as(section: Mapping[str, Any], tensor_ranks: Mesh | dist.ProcessGroup | None = None) -> None:
    """From now on as a section "activation_checkpointing" says; memory of what was said before goes with its graphs.

    tensor_ranks   over whom `partition_activations` cuts inputs; all of them must call this

    >>> keep_as({"cpu_checkpointing": True})
    >>> keeping().store.tier.value
    'host'
    >>> keep_as({})
    """
    store = None
    partition = tensor_ranks if section.get("partition_activations") else None
    if section.get("cpu_checkpointing"):
        store = CheckpointStore("host", partition=partition)
    elif section.get("contiguous_memory_optimization") or partition is not None:
        store = CheckpointStore("device", partition=partition, expected=section.get("number_checkpoints") or 0)
    synchronizes, profiles = (bool(section.get(key)) for key in ("synchronize_checkpoint_boundary", "profile"))
    _KEEPING.set(Keeping(store, synchronizes, profiles))
