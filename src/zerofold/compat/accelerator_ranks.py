"""Who this rank is among the others, as Accelerate tells it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerofold.process_group import group_device, join_or_be_alone

T = TypeVar("T")

KINDS = {"cuda": "GPU"}
"""What Accelerate calls kinds of devices, where that is another name."""


@dataclass(frozen=True)
class State:
    """What Accelerate's scripts log at the start, and ask for plugins, of which there are none."""

    distributed_type: str
    num_processes: int
    process_index: int
    local_process_index: int
    device: torch.device
    mixed_precision: str
    deepspeed_plugin: None = None
    fsdp_plugin: None = None


class Ranks:
    """Numbers of this rank, its device, and what one rank does before or instead of the others."""

    mixed_precision: str

    def __init__(self, *, cpu: bool) -> None:
        self._started_group = not dist.is_initialized()
        if self._started_group:
            self.device = join_or_be_alone("cpu" if cpu else None)
        else:
            self.device = torch.device("cpu") if cpu else group_device()
        self._triggered = False
        accelerate: Any = sys.modules.get("accelerate.state")
        if accelerate is not None:
            # Its loggers and helpers ask there, and raise where no Accelerator of its own has been made.
            accelerate.PartialState(cpu=self.device.type == "cpu")

    @property
    def state(self) -> State:
        return State(
            self.distributed_type,
            self.num_processes,
            self.process_index,
            self.local_process_index,
            self.device,
            self.mixed_precision,
        )

    @property
    def num_processes(self) -> int:
        return dist.get_world_size()

    @property
    def process_index(self) -> int:
        return dist.get_rank()

    @property
    def local_process_index(self) -> int:
        """On this machine, by the launcher's word."""
        return int(os.environ.get("LOCAL_RANK", dist.get_rank()))

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def use_distributed(self) -> bool:
        return self.num_processes > 1

    @property
    def distributed_type(self) -> str:
        """Equal to Accelerate's DistributedType, whose members are text: "NO", "MULTI_CPU", "MULTI_GPU", …"""
        return f"MULTI_{KINDS.get(self.device.type, self.device.type.upper())}" if self.use_distributed else "NO"

    def set_trigger(self) -> None:
        """Has `check_trigger` say yes on all ranks: to stop early where one rank finds that it should."""
        self._triggered = True

    def check_trigger(self) -> bool:
        """Whether any rank has called `set_trigger` since this was asked last. All ranks must ask."""
        told = torch.tensor(int(self._triggered), device=self.device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX)
        self._triggered = False
        return bool(told.item())

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """This rank's share of a list, a tuple, a tensor or a dict of such, in order; the first ranks have one more.

        With `apply_padding` all have as many: the last one is repeated. Where there are fewer inputs than ranks, ranks
        without one have the last one in any case.
        """
        yield _share(inputs, self.process_index, self.num_processes, padded=apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """On the first rank of each machine."""
        if self.is_local_main_process:
            print(*args, **kwargs)

    def wait_for_everyone(self) -> None:
        dist.barrier()

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Rank 0 runs what is inside before the others do."""
        with _first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """The first rank of each machine runs what is inside before the others of all machines do."""
        with _first(self.is_local_main_process):
            yield

    def on_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        """The function runs on rank 0 alone; elsewhere it gives None."""
        return _only(function, lambda: self.is_main_process)

    def on_local_main_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        return _only(function, lambda: self.is_local_main_process)

    def on_last_process(self, function: Callable[..., T]) -> Callable[..., T | None]:
        return _only(function, lambda: self.is_last_process)

    def end_training(self) -> None:
        """Ends the process group, where this Accelerator has started it."""
        if self._started_group and dist.is_initialized():
            sys.stdout.flush()
            dist.destroy_process_group()


def _share(inputs: Any, rank: int, ranks: int, *, padded: bool) -> Any:
    if isinstance(inputs, dict):
        if len({len(value) for value in inputs.values()}) > 1:
            raise ValueError(
                "split_between_processes: the values of the dict have different lengths: give each input one of each"
            )
        return {key: _share(value, rank, ranks, padded=padded) for key, value in inputs.items()}
    if not isinstance(inputs, (list, tuple, torch.Tensor)):
        raise TypeError(
            f"split_between_processes: a {type(inputs).__name__} was given; give a list, a tuple, a tensor or a dict"
        )
    each, more = divmod(len(inputs), ranks)
    start = rank * each + min(rank, more)
    share: Any = inputs[start : start + each + (rank < more)] if start < len(inputs) else inputs[-1:]
    missing = each + (more > 0) - len(share) if padded and len(inputs) else 0
    if missing <= 0:
        return share
    last = share[-1:]
    # Never more than one is missing.
    return torch.cat([share, last]) if isinstance(share, torch.Tensor) else share + last


@contextmanager
def _first(is_first: bool) -> Iterator[None]:
    if not is_first:
        dist.barrier()
    try:
        yield
    finally:  # also after an error: the others are waiting
        if is_first:
            dist.barrier()


def _only(function: Callable[..., T], is_here: Callable[[], bool]) -> Callable[..., T | None]:
    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> T | None:
        return function(*args, **kwargs) if is_here() else None

    return run
