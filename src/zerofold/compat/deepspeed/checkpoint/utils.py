"""Copies of state dicts that can be written alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """The same structure with every tensor copied, so that a file holds no more than the tensor's own elements.

    >>> whole = torch.zeros(1000)
    >>> clone_tensors_for_torch_save({"w": whole[:2]})["w"].untyped_storage().nbytes()
    8
    """
    where = torch.device(device)

    def copied(value: Any) -> Any:
        return value.detach().to(where, copy=True) if isinstance(value, Tensor) else value

    return pytree.tree_map(copied, item)
