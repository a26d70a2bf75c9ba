"""Bytes that one parameter takes in each state, for every row of the table: the one source of these numbers.

What the table of placements says of a row, in bytes of an element:

              of the whole           of this rank's shard                  of its group's copy
parameters    compute, if whole      compute, if cut and without master    compute, where the row keeps one
gradients     local sums             accumulated mean
optimizer                            master and moments

A parameter that is cut and has a master is made from it while it is used, and takes nothing in between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from zerofold.placement import INSIDE, Cut, Row, row
from zerofold.precision import Dtypes, Precision, policy_of

ROWS = ("dp", "0", "1", "2", "3", "hsdp", "hpz")


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Bytes of an element by what it is for. The defaults are those of precision="bf16" with AdamW.

    >>> Widths.of("bf16") == Widths(), Widths.of("fp32").has_master
    (True, False)
    """

    compute: int = 2
    master: int = 4
    gradient: int = 4
    """In which gradients add up."""
    moments: int = 8
    """Of all of them together."""
    counters: int = 4
    """Of the numbers that the optimizer keeps for each tensor, not for each element: of its steps, mostly."""
    wire: int = 4
    """Of a gradient on its way between ranks."""
    has_master: bool = True
    """The optimizer changes another tensor than forward computes with."""
    is_apart: bool = True
    """What the optimizer reads is another tensor than autograd adds up in, whoever updates it."""
    keeps_range: bool = False
    """fp16: a gradient needs more range than the compute dtype has, once its loss scale is taken out."""

    @classmethod
    def of(cls, precision: str | Precision | None, *, moments: float = 2.0, counters: int = 4) -> Widths:
        """`moments`: how many numbers the optimizer keeps for each parameter; `counters`: bytes of others a tensor."""
        policy = policy_of(precision)
        like = torch.empty(0, dtype=torch.float32, requires_grad=True)
        dtypes = policy.dtypes(like, is_kept=False)
        found = cls.of_dtypes(dtypes, moments=round(moments * policy.moments.itemsize))
        return replace(found, is_apart=policy.is_mixed or policy.needs_one_pass, counters=counters)

    def beside(self, *, is_offloaded: bool) -> Widths:
        """Of a model of which something is offloaded: all of its gradients have a place of their own."""
        return replace(self, is_apart=True) if is_offloaded else self

    @classmethod
    def of_dtypes(cls, dtypes: Dtypes, *, moments: int) -> Widths:
        """`moments`: bytes of all that the optimizer keeps for one parameter."""
        return cls(
            compute=dtypes.compute.itemsize,
            master=dtypes.master.itemsize,
            gradient=dtypes.accumulation.itemsize,
            moments=moments,
            wire=dtypes.reduction.itemsize,
            has_master=dtypes.has_master,
            is_apart=dtypes.has_master,
            keeps_range=dtypes.compute is torch.float16,
        )

    @property
    def alignment(self) -> int:
        """Elements: every parameter starts on 128 bytes, in the narrowest of its storages."""
        return 128 // min(self.compute, self.master)


class StateBytes(NamedTuple):
    """What one rank holds of a model between steps."""

    parameters: float
    gradients: float
    optimizer: float  # with the masters

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer


class Kept(NamedTuple):
    """Bytes of an element: of the whole parameter, of this rank's shard of it, and of its group's copy."""

    whole: StateBytes
    shard: StateBytes
    copy: int


def kept(
    placed: Row,
    widths: Widths,
    *,
    alone: bool = False,
    accumulate: int | None = None,
    in_pipeline: bool = False,
) -> Kept:
    """`alone`: nobody else shares the states. `accumulate`: backwards that make a step; None for the most that a row
    may hold, which is what its placements say. Where the optimizer is not cut, the shard is the whole.

    >>> kept(row(3), Widths()).shard
    StateBytes(parameters=0, gradients=4, optimizer=12)
    >>> kept(row(3), Widths(), alone=True, accumulate=1).shard.gradients  # as autograd made them
    2
    """
    is_cut = placed.parameters.is_cut and not alone
    own = widths.compute if is_cut and not widths.has_master else 0
    # Alone, parameters with a master are made anew for each use; without one they are all there is.
    stays = not is_cut and not (alone and widths.has_master)
    mean, sums = widths.gradient, 0
    if keeps_sums(placed, widths, alone=alone, accumulate=accumulate, in_pipeline=in_pipeline):
        # Each rank adds up its own until the last backward of a step; the first stays as autograd made it.
        sums = widths.compute if accumulate == 2 else widths.gradient
    elif alone:
        mean = waiting_gradient(widths, alone=True, accumulate=accumulate or 2)
    elif not placed.gradients.is_cut and accumulate is None and placed.optimizer.is_cut:
        mean, sums = 0, widths.gradient
    optimizer = widths.moments + (widths.master if widths.has_master else 0)
    copy = widths.compute if placed.copy is not None and not alone else 0
    return Kept(
        StateBytes(widths.compute if stays else 0, sums, 0),
        StateBytes(own, mean, optimizer),
        copy,
    )


def keeps_sums(placed: Row, widths: Widths, *, alone: bool, accumulate: int | None, in_pipeline: bool = False) -> bool:
    """Whether there are local sums besides the flat gradient that they are reduced into when a step is complete. A rank
    alone has both too, unless the optimizer reads the sums themselves, as after all micro-batches of a pipeline.

    >>> [keeps_sums(row(stage), Widths(), alone=True, accumulate=2) for stage in (0, 1, 2)]
    [True, True, False]
    >>> keeps_sums(row(0), Widths.of("fp32"), alone=True, accumulate=2)
    False
    """
    if accumulate is None or accumulate == 1 or placed.gradients.is_cut:
        return False
    return not alone or (not in_pipeline and (placed.optimizer.is_cut or widths.is_apart))


def waiting_gradient(widths: Widths, *, alone: bool, accumulate: int) -> int:
    """Bytes in which an element of the gradient waits for the update: alone, that of a single backward stays as it was
    made."""
    return widths.compute if alone and accumulate == 1 and not widths.keeps_range else widths.gradient


def cut_over(placed: Row, ranks: int, group: int = 0) -> int:
    """Among how many of the ranks the optimizer states are cut; `group`: ranks inside one, 0 for all.

    >>> cut_over(row(3), 64), cut_over(row("hsdp"), 64, 8), cut_over(row(0), 64)
    (64, 8, 1)
    """
    if not placed.optimizer.is_cut:
        return 1
    return (group or ranks) if placed.optimizer.axes == (INSIDE,) else ranks


def state_bytes(
    parameters: float, stage: int | str, ranks: int, *, group: int = 0, widths: Widths | None = None
) -> StateBytes:
    """What the states of a model take on one rank (with "dp" on the first), as the row's placements say; no padding.

    >>> state_bytes(1000, 2, 4)
    StateBytes(parameters=2000.0, gradients=1000.0, optimizer=3000.0)
    >>> state_bytes(1000, 3, 4).total
    4000.0
    """
    placed = row(stage)
    each = kept(placed, widths or Widths())
    over = 1 if placed.cut is Cut.FIRST else cut_over(placed, ranks, group)
    found = [parameters * whole + parameters * own / over for whole, own in zip(each.whole, each.shard, strict=True)]
    found[0] += parameters * each.copy / (group or ranks)
    return StateBytes(*(float(number) for number in found))


def paper_bytes(
    parameters: float, stage: int | str, ranks: int, *, group: int = 0, each: StateBytes | None = None
) -> StateBytes:
    """The same as the ZeRO paper counts: 2 + 2 + 12 bytes a parameter, each state divided where the row cuts it.

    It has 16-bit gradients, and 16-bit parameters beside their masters also where both are cut.

    >>> [round(paper_bytes(7.5e9, stage, 64).total / 1e9, 1) for stage in range(4)]
    [120.0, 31.4, 16.6, 1.9]
    """
    placed, each = row(stage), each or StateBytes(2, 2, 12)

    def over(axes: tuple[str, ...]) -> int:
        return ranks if len(axes) > 1 else (group or ranks) if axes else 1

    return StateBytes(
        parameters * each.parameters / over(placed.parameters.axes)
        + (0 if placed.copy is None else parameters * each.parameters / over(placed.copy.axes)),
        parameters * each.gradients / over(placed.gradients.axes),
        parameters * each.optimizer / (1 if placed.cut is Cut.FIRST else over(placed.optimizer.axes)),
    )


def elements_sent(stage: int | str, ranks: int, *, group: int = 0) -> float:
    """By one rank for each parameter in a step of one micro-batch, as a ring sends them; nothing stays gathered.

    >>> [elements_sent(stage, 2) for stage in (0, 1, 2, 3)]
    [1.0, 1.0, 1.0, 1.5]
    """
    placed, group = row(stage), group or ranks
    share_all, share_inside, groups = (ranks - 1) / ranks, (group - 1) / group, ranks / group
    if not placed.parameters.is_cut:
        return 2 * share_all  # reduced and gathered, or all-reduced
    if placed.copy is not None:
        return 2 * share_all + share_inside
    if placed.reduces_across:
        return 3 * share_inside + 2 / group * (groups - 1) / groups
    return 3 * share_all
