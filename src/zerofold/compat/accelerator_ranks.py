"""Who this rank is among the others, as Accelerate tells it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerofold.process_group import group_device, join_or_be_alone

T = TypeVar("T")


class Ranks:
    """Numbers of this rank, its device, and what one rank does before or instead of the others."""

    def __init__(self, *, cpu: bool) -> None:
        self._started_group = not dist.is_initialized()
        if self._started_group:
            self.device = join_or_be_alone("cpu" if cpu else None)
        else:
            self.device = torch.device("cpu") if cpu else group_device()

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
