"""What a rank sends, counted around the functions of torch.distributed, outside any engine's own counter.

Every rank counts its even share of a call, so the mean over ranks is what a rank sends, whoever is the root:

    broadcast, reduce, scatter, gather     n (N-1)/N      n: all that reaches the other ranks or the root
    all-gather, reduce-scatter             n (N-1)/N      n: the whole tensor
    all-reduce                             2n (N-1)/N
    all-to-all, send                       what goes to another rank
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass
class Wire:
    """The count of one rank so far."""

    elements: float = 0.0


def _share(count: int, world: int) -> float:
    """Whatever moves `count` elements past every rank once: in a ring, or over ranks on average."""
    return count * (world - 1) / world


def _numel(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _sent_to_others(call: Mapping[str, Any], world: int, rank: int) -> float:
    rows: Tensor = call["input"]
    splits = call.get("input_split_sizes")
    if not splits:
        return _share(rows.numel(), world)
    kept: int = splits[rank] * (rows.numel() // max(1, rows.shape[0]))
    return rows.numel() - kept


# Name of the function → elements sent, from its arguments, the size of the group and this rank in it.
_RULES: Mapping[str, Callable[[Mapping[str, Any], int, int], float]] = MappingProxyType(
    {
        "broadcast": lambda call, world, _: _share(call["tensor"].numel(), world),
        "reduce": lambda call, world, _: _share(call["tensor"].numel(), world),
        # In both, `tensor` is one rank's piece, and the root keeps its own.
        "scatter": lambda call, world, _: _share(call["tensor"].numel(), world),
        "gather": lambda call, world, _: _share(call["tensor"].numel(), world),
        "all_reduce": lambda call, world, _: 2 * _share(call["tensor"].numel(), world),
        "all_gather": lambda call, world, _: _share(_numel(call["tensor_list"]), world),
        "all_gather_single": lambda call, world, _: _share(call["output_tensor"].numel(), world),
        "all_gather_into_tensor": lambda call, world, _: _share(call["output_tensor"].numel(), world),
        "reduce_scatter": lambda call, world, _: _share(_numel(call["input_list"]), world),
        "reduce_scatter_single": lambda call, world, _: _share(call["input"].numel(), world),
        "reduce_scatter_tensor": lambda call, world, _: _share(call["input"].numel(), world),
        "all_to_all_single": _sent_to_others,
        "all_to_all": lambda call, _, rank: _numel(call["input_tensor_list"]) - call["input_tensor_list"][rank].numel(),
        "send": lambda call, _world, _rank: call["tensor"].numel(),
        "isend": lambda call, _world, _rank: call["tensor"].numel(),
        "batch_isend_irecv": lambda call, _world, _rank: _numel(
            each.tensor for each in call["p2p_op_list"] if each.op.__name__ == "isend"
        ),
    }
)


@contextmanager
def count_elements() -> Iterator[Wire]:
    """Count what this rank sends through the functions of torch.distributed while the context is open.

    One of these functions may call another; only the outermost call counts.
    """
    wire, lock, nesting = Wire(), threading.Lock(), threading.local()

    def counted(function: Callable[..., Any], rule: Callable[[Mapping[str, Any], int, int], float]) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(nesting, "inside", False):
                return function(*args, **kwargs)
            call = signature.bind(*args, **kwargs).arguments
            group = call.get("group")
            rank = dist.get_rank(group)
            if rank >= 0:  # not a member otherwise, and the call does nothing
                sent = rule(call, dist.get_world_size(group), rank)
                with lock:
                    wire.elements += sent
            nesting.inside = True
            try:
                return function(*args, **kwargs)
            finally:
                nesting.inside = False

        return wrapper

    # Both modules hold the same functions, and P2POp compares with those of the second.
    homes = (dist, dist.distributed_c10d)
    originals = {name: getattr(dist, name) for name in _RULES if hasattr(dist, name)}
    for name, function in originals.items():
        replacement = counted(function, _RULES[name])
        for home in homes:
            setattr(home, name, replacement)
    try:
        yield wire
    finally:
        for name, function in originals.items():
            for home in homes:
                setattr(home, name, function)
