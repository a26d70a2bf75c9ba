"""How one parameter is cut over the ranks, and what all parameters of a model know about the step under way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from zerofold.comm import Comm


class StepScope:
    """What all sharded tensors of a model must know about the moment in which they are used; one for each model.

    is_open         An attached optimizer's step is running. Only then may what needs a whole tensor run on its owner
                    alone: elsewhere it would give the owner something that the other ranks do not have, a norm of its
                    own parameters for instance. Until `close`, gradients may be hidden from the optimizer.
    is_under_way    Copies or updates of offloaded states run beside everything else: `look` and `settle` wait for them.
    parked          States whose memory is on the host for a while: whoever touches one of them is refused.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.joins_norms = False  # a norm is taken over all ranks, who must all ask; else it is refused
        self.is_under_way = False  # copies or updates of states that nobody has waited for
        self.finish: Callable[[], None] | None = None  # waits for all of them
        self.parked: tuple[str, ...] = ()  # the states whose memory is on the host for a while
        self.model: Comm | None = None  # those who hold other parts of the model, for one verdict of all
        self._hidden: list[tuple[Tensor, Tensor]] = []

    def look(self, local: Tensor) -> None:
        """Called before a piece is touched. One in host memory may be under an update, which is waited for; on an
        accelerator streams keep the order. One that is parked has no memory, and reading it would crash the process.
        """
        if local.device.type == "cpu":
            self.settle()
        if self.parked and local.numel() and not local.untyped_storage().nbytes():
            self.refuse()

    def settle(self) -> None:
        """Returns when no update is under way."""
        if self.is_under_way and self.finish is not None:
            self.finish()
            self.is_under_way = False

    def need(self, *states: str) -> None:
        """Raises where one of these states is parked; any, if none is named."""
        if self.parked and (not states or set(states).intersection(self.parked)):
            self.refuse()

    def refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{', '.join(self.parked)} of this model are parked in host memory: call zf.reload_states(model) first"
        )

    def open(self, others: Iterable[Tensor]) -> None:
        """`others` belong to other ranks. Their gradients are empty here; without one, the optimizer skips them."""
        self.is_open = True
        for p in others:
            self.show(p, None)

    def show(self, p: Tensor, gradient: Tensor | None) -> None:
        """Until `close`, another gradient than the one that is there, or none."""
        self.is_open = True
        if p.grad is not None:
            self._hidden.append((p, p.grad))
            p.grad = gradient

    def close(self) -> None:
        self.is_open = False
        for p, gradient in self._hidden:
            p.grad = gradient
        self._hidden = []


class Loose(NamedTuple):
    """Of a parameter that was cut by itself, before any model was sharded: its place among all such. All ranks cut them
    in one order, so the place is the same everywhere and tells them apart."""

    started: int  # rank 0's clock, when the first of them was cut
    number: int
    numbers: Iterator[int]  # for copies

    @property
    def place(self) -> tuple[int, int]:
        return self.started, self.number


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """How one parameter is cut: shared by the parameter, its gradient and its optimizer states."""

    name: str
    unit: str
    shape: torch.Size
    ranges: Sequence[tuple[int, int]]  # of the flattened parameter, one per rank, in order, some empty
    comm: Comm
    has_owner: bool  # one rank has it all, and there it keeps its shape
    step: StepScope
    is_replicated: bool = False  # every rank has it all
    loose: Loose | None = None
    device: torch.device | None = None  # where the model is, if the piece is in another memory
    is_part: bool = False  # what is cut here is itself a part of a parameter, cut over a tensor axis

    @cached_property
    def identity(self) -> torch.UntypedStorage:
        """Memory of its own, to tell the parameter from others by: two names of one parameter have one of it."""
        return torch.UntypedStorage(1)

    @property
    def own(self) -> tuple[int, int]:
        return self.ranges[self.comm.rank]

    @property
    def is_owned_here(self) -> bool:
        return self.has_owner and self.own[1] > self.own[0]

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor, as a view where the memory allows it."""
        return self.shaped(whole.detach().reshape(-1)[slice(*self.own)])

    def shaped(self, piece: Tensor) -> Tensor:
        """A flat piece as optimizers see it: who has all of it has the parameter in its own shape."""
        return piece.view(self.shape) if self.is_owned_here or self.is_replicated else piece
