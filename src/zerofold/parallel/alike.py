"""What the ranks of a tensor axis must have alike: random numbers and batches."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zerofold.nested import tensors_in


@contextmanager
def own_random_state(axis: DeviceMesh) -> Iterator[None]:
    """torch gives all ranks the random state of the first when it makes its first DTensor: here it comes back."""
    before = [module.get_rng_state() for module in _generators(axis)]
    try:
        yield
    finally:
        for module, state in zip(_generators(axis), before, strict=True):
            module.set_rng_state(state)


def share_random_state(axis: DeviceMesh) -> None:
    """The first rank's, so that what all hold alike is dropped alike."""
    first = dist.get_global_rank(axis.get_group(), 0)
    for module in _generators(axis):
        state = module.get_rng_state()
        sent = state.to(axis.device_type)
        dist.broadcast(sent, first, group=axis.get_group())
        module.set_rng_state(sent.to(state.device))


def _generators(axis: DeviceMesh) -> Iterator[Any]:
    yield torch.random
    if axis.device_type != "cpu":
        yield torch.get_device_module(axis.device_type)


class FirstForward:
    """Before the first forward: the ranks of the axis look whether they got the same batch and random state.

    A sampler over all ranks gives each its own batch, and the sums over ranks would then be sums of nothing sensible.
    """

    def __init__(self, model: nn.Module, axis: DeviceMesh) -> None:
        self.axis = axis
        self.has_looked = False
        model.register_forward_pre_hook(self.look, with_kwargs=True)

    def __deepcopy__(self, memo: object) -> FirstForward:
        return self

    def look(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if self.has_looked:  # the hook stays: to take it away inside a forward would be a change of the model
            return
        self.has_looked = True
        inputs = checksum((args, kwargs))
        state = checksum([module.get_rng_state() for module in _generators(self.axis)])
        lowest = torch.tensor([inputs, state], dtype=torch.int64, device=self.axis.device_type)
        highest = lowest.clone()
        dist.all_reduce(lowest, dist.ReduceOp.MIN, group=self.axis.get_group())
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=self.axis.get_group())
        same_inputs, same_state = (lowest == highest).tolist()
        ranks = ", ".join(map(str, self.axis.mesh.flatten().tolist()))
        if not same_inputs:
            raise ValueError(
                f"ranks {ranks} share the inside of every layer and got different inputs: give them the same batch, "
                "chosen by mesh.coordinate['data']"
            )
        if not same_state and model.training and _drops(model):
            raise ValueError(
                f"ranks {ranks} share the inside of every layer and would draw different dropout masks: seed them "
                "alike, by mesh.coordinate['data']"
            )


def checksum(values: Any) -> int:
    """Of all tensors in it.

    >>> checksum({"tokens": torch.tensor([1, 2])}) == checksum([torch.tensor([1, 2])])
    True
    """
    return sum(zlib.crc32(_bytes(tensor)) for tensor in tensors_in(values))


def _bytes(tensor: Tensor) -> bytes:
    if tensor.device.type == "meta":
        return b""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _drops(model: nn.Module) -> bool:
    """Whether any module has a probability to drop with, under the names that torch and Hugging Face use."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return True
        if any("dropout" in name and isinstance(value, float) and value > 0 for name, value in vars(module).items()):
            return True
    return False
