"""Small helpers that scripts import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psutil
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from zerofold.compat.deepspeed.accelerator import get_accelerator

_GIB = 2**30


def move_to_device(item: Any, device: Any, criterion_func: Callable[[Any], bool] | None = None) -> Any:
    """The same structure with its tensors on `device`, or those that the criterion takes.

    >>> import torch
    >>> move_to_device({"x": [torch.ones(1)], "note": "kept"}, "meta")
    {'x': [tensor(..., device='meta', size=(1,))], 'note': 'kept'}
    """

    def moved(value: Any) -> Any:
        is_taken = isinstance(value, Tensor) if criterion_func is None else criterion_func(value)
        return value.to(device) if is_taken else value

    return pytree.tree_map(moved, item)


def see_memory_usage(message: str, force: bool = False) -> None:
    """Prints what the device and the host have in use, on rank 0; only if `force`, as in DeepSpeed."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    device, host = get_accelerator(), psutil.virtual_memory()
    print(
        f"{message}: device {device.memory_allocated() / _GIB:.2f} GiB, at most "
        f"{device.max_memory_allocated() / _GIB:.2f} GiB; host {host.used / _GIB:.2f} GiB, {host.percent} %",
        flush=True,
    )


def empty_cache() -> None:
    get_accelerator().empty_cache()
