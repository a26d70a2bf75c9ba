"""Tensors of all ranks: gathered, summed, padded to one size; inside lists, tuples and dicts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from zerofold.compat.accelerator_data import PreparedLoader
from zerofold.nested import map_tensors, tensors_in


def gathered(value: Any) -> Any:
    """Every tensor becomes that of all ranks, one after another along its first dimension; a number, a list of them.

    >>> gathered({"loss": torch.tensor(2.0), "ids": torch.tensor([1, 2])})
    {'loss': tensor([2.]), 'ids': tensor([1, 2])}
    """
    return map_tensors(_gathered, value)


def _gathered(tensor: Tensor) -> Tensor:
    sent = tensor.detach().contiguous()
    sent = sent[None] if sent.dim() == 0 else sent
    shapes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shapes, tuple(sent.shape))
    if len(set(shapes)) > 1:
        raise ValueError(
            f"gather: the ranks have tensors of shapes {shapes}: bring them to one size with "
            "pad_across_processes, or gather objects"
        )
    raw = sent.view(torch.uint8) if sent.dtype is torch.bool else sent  # not every backend sends bools
    parts = [torch.empty_like(raw) for _ in shapes]
    dist.all_gather(parts, raw)
    return torch.cat(parts).view(sent.dtype)


def gathered_objects(value: Any) -> list[Any]:
    """Of all ranks in one list; lists are put end to end."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return [item for each in found for item in (each if isinstance(each, list) else [each])]


def has_tensors_only(value: Any) -> bool:
    """Whether there is nothing in it but tensors, in lists, tuples and dicts."""
    if isinstance(value, dict):
        return all(has_tensors_only(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return all(has_tensors_only(item) for item in value)
    return isinstance(value, Tensor) or (hasattr(value, "__dict__") and any(True for _ in tensors_in(value)))


def shortened(value: Any, length: int) -> Any:
    """Without what stands after the first `length` along the first dimension."""
    if isinstance(value, list) and not any(isinstance(item, Tensor) for item in value):
        return value[:length]
    return map_tensors(lambda tensor: tensor[:length], value)


def reduced(value: Any, reduction: str, scale: float) -> Any:
    if reduction not in ("sum", "mean", "none"):
        raise ValueError(f"reduce: reduction={reduction!r} must be 'sum', 'mean' or 'none'")

    def reduce(tensor: Tensor) -> Tensor:
        total = tensor.detach().clone()
        if reduction != "none":
            dist.all_reduce(total)
        if reduction == "mean":
            total = total / dist.get_world_size()
        return total * scale if scale != 1.0 else total

    return map_tensors(reduce, value)


def padded(value: Any, dim: int, pad_index: float, pad_first: bool) -> Any:
    """Every tensor is made as long as the longest of all ranks along `dim`."""

    def pad(tensor: Tensor) -> Tensor:
        if tensor.dim() <= (dim if dim >= 0 else -dim - 1):
            return tensor
        sizes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(sizes, tensor.shape[dim])
        missing = max(sizes) - tensor.shape[dim]
        after_it = 2 * (tensor.dim() - 1 - dim % tensor.dim())  # F.pad counts from the last dimension
        amounts = [0] * after_it + ([missing, 0] if pad_first else [0, missing])
        return F.pad(tensor, amounts, value=pad_index) if missing else tensor

    return map_tensors(pad, value)


class Gathering:
    """What an Accelerator does with tensors of all ranks."""

    def __init__(self) -> None:
        self._active: list[PreparedLoader] = []  # loaders being iterated, innermost last

    def gather(self, tensor: Any) -> Any:
        """The tensors of all ranks, one after another along the first dimension."""
        return gathered(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """The same, without the samples that the last batch was filled up with. Other objects come in one list."""
        as_objects = use_gather_object or not has_tensors_only(input_data)
        found = gathered_objects(input_data) if as_objects else gathered(input_data)
        loader = self._active[-1] if self._active else None
        if loader is None or loader.remainder is None:
            return found
        return shortened(found, loader.remainder)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        return reduced(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False) -> Any:
        return padded(tensor, dim, pad_index, pad_first)
