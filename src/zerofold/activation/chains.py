"""Blocks that follow each other, and what a group of them is called with."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.nested import tensors_in
from zerofold.parallel.marks import stage_of

NO_BLOCKS = "checkpoint_blocks: no repeated blocks were found in this model: name them with units="
NO_CHAIN = (
    "the blocks of this model do not simply follow each other, so several cannot be recomputed together: use every=1"
)


def groups_of(blocks: Mapping[str, nn.Module], every: int) -> list[list[nn.Module]]:
    """Neighbours in the same list, `every` at a time: those of an encoder and a decoder are not mixed, nor those of
    several stages of a pipeline that a rank has.

    >>> blocks = {f"{part}.{index}": nn.Identity() for part in ("encoder", "decoder") for index in range(3)}
    >>> [len(group) for group in groups_of(blocks, 2)]
    [2, 1, 2, 1]
    """
    rows: dict[tuple[str, int | None], list[nn.Module]] = {}
    for name, block in blocks.items():
        rows.setdefault((name.rpartition(".")[0], stage_of(block)), []).append(block)
    return [row[start : start + every] for row in rows.values() for start in range(0, len(row), every)]


def run_in_turn(calls: Sequence[Callable[..., Any]], args: Any, kwargs: Any) -> Any:
    """The first gets the arguments; each other one the same, with what the one before made in the first's place."""
    result = calls[0](*args, **kwargs)
    for call in calls[1:]:
        args, kwargs = with_first(args, kwargs, first_of(result))
        result = call(*args, **kwargs)
    return result


def first_of(value: Any) -> Tensor | None:
    """The stream of a transformer: the first tensor of what a block takes or returns."""
    return next(iter(tensors_in(value)), None)


def with_first(args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor | None) -> tuple[Any, dict[str, Any]]:
    """The same arguments with another first tensor."""
    for index, value in enumerate(args):
        if isinstance(value, Tensor):
            return (*args[:index], tensor, *args[index + 1 :]), kwargs
    for key, value in kwargs.items():
        if isinstance(value, Tensor):
            return args, {**kwargs, key: tensor}
    raise ValueError(NO_CHAIN)


def same_but_first(given: tuple[Any, Any], later: tuple[Any, Any]) -> bool:
    """Whether a later block is called as the first one was, but for the stream."""
    first, second = (with_first(*each, None) for each in (given, later))
    return _is_same(first, second)


def bytes_of(tensor: Tensor) -> Hashable:
    """Which bytes it looks at, and how: unlike its id, the same for every object that autograd makes of it."""
    if not has_bytes(tensor):
        return id(tensor)
    where = tensor.untyped_storage()._cdata
    read_as = tensor.dtype, tensor.is_conj(), tensor.is_neg()  # a conjugate is the same bytes, read otherwise
    return where, tensor.storage_offset(), tensor.shape, tensor.stride(), read_as


def has_bytes(tensor: Tensor) -> bool:
    """Whether it lies in one memory, unlike a sparse or a nested one."""
    return tensor.layout is torch.strided and not tensor.is_nested


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return bytes_of(one) == bytes_of(other)  # a model may take a new view of the same table for each block
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return bool(one == other)
