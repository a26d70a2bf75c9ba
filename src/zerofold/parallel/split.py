"""A model cut into stages in place: this rank keeps its modules under their names, stand-ins take the other places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from zerofold.activation.blocks import computed_again_with
from zerofold.parallel.anatomy import Anatomy, places_of
from zerofold.parallel.balance import balance
from zerofold.parallel.marks import leave_stage
from zerofold.parallel.stand_ins import (
    BlockStandIn,
    Course,
    EmbeddingStandIn,
    NotReached,
    PassedOver,
    Seat,
    StandIn,
)
from zerofold.part import Part, part_of, set_part

Cost = Callable[[str, nn.Module], float]
"""What a module costs in a step, by its name and itself; only proportions count."""


@dataclass(frozen=True)
class Stage:
    """One stage of a pipeline: a range of blocks."""

    index: int
    rank: int  # of the pipeline axis
    first: int
    stop: int
    parameters: int  # with what runs before or after the blocks


class Tied(NamedTuple):
    """A parameter that the first stage and the last stage both have."""

    name: str
    parameter: nn.Parameter


@dataclass(frozen=True)
class Split:
    """Where everything went."""

    stages: tuple[Stage, ...]
    own: tuple[Stage, ...]
    blocks: tuple[Seat, ...]  # of this rank
    before: tuple[Seat, ...]  # modules of this rank that run before the blocks
    tied: tuple[Tied, ...]  # where another rank has them too
    course: Course

    def seat(self, index: int | None) -> None:
        """The modules of the stage of this index, or all of this rank's."""
        for seat in (*self.blocks, *self.before):
            seat.take(seat.own if index is None or seat.of_stage == index else seat.stand_in)

    def seat_beginning(self) -> None:
        """What runs before the blocks, and the first block, of the rank that has them."""
        for seat in self.blocks[1:]:
            seat.take(seat.stand_in)
        for seat in (*self.before, self.blocks[0]):
            seat.take(seat.own)


def plan_stages(
    anatomy: Anatomy, owners: Sequence[int], split: Sequence[str] | None, cost: Cost | None
) -> tuple[Stage, ...]:
    """Which stage has which blocks: as `split` says, else in balance."""
    names = list(anatomy.blocks)
    if len(names) < len(owners):
        raise ValueError(
            f"pipeline: {len(names)} blocks cannot make {len(owners)} stages: use fewer pipeline ranks, or fewer "
            "chunks_per_rank"
        )
    weigh = cost or multiplied_parameters
    if split is not None:
        starts = _given(list(split), names, len(owners))
    else:
        before = sum(weigh(name, module) for name, module in anatomy.before.items())
        after = sum(weigh(name, module) for name, module in anatomy.after.items())
        costs = [weigh(name, block) for name, block in anatomy.blocks.items()]
        starts = balance(costs, len(owners), before=before, after=after)
    sizes = [sum(whole_numel(p) for p in block.parameters()) for block in anatomy.blocks.values()]
    stages = []
    for index, (rank, first, stop) in enumerate(zip(owners, starts, [*starts[1:], len(names)], strict=True)):
        around = {p for module in (anatomy.before if index == 0 else {}).values() for p in module._parameters.values()}
        around |= {
            p
            for module in (anatomy.after if index == len(owners) - 1 else {}).values()
            for p in module._parameters.values()
        }
        parameters = sum(sizes[first:stop]) + sum(whole_numel(p) for p in around if p is not None)
        stages.append(Stage(index, rank, first, stop, parameters))
    return tuple(stages)


def multiplied_parameters(name: str, module: nn.Module) -> float:
    """Parameters that every token is multiplied with: those of embeddings are looked up, which takes no time."""
    holders = (inner for inner in module.modules() if not isinstance(inner, (nn.Embedding, nn.EmbeddingBag)))
    return float(sum(whole_numel(p) for inner in holders for p in inner._parameters.values() if p is not None))


def whole_numel(parameter: nn.Parameter) -> int:
    """Of all tensor ranks together: they must come to the same stages, even where their pieces differ in size."""
    part = part_of(parameter)
    return parameter.numel() if part is None else part.shape.numel()


def cut_in_place(model: nn.Module, anatomy: Anatomy, stages: tuple[Stage, ...], rank: int) -> Split:
    """Every module that another rank has makes way for a stand-in without parameters."""
    course = Course(length_of_output=anatomy.length_of_output)
    has_first, has_last = stages[0].rank == rank, stages[-1].rank == rank
    places = places_of(model, {*anatomy.blocks.values(), *anatomy.before.values(), *anatomy.after.values()})
    tied = _tied(anatomy)
    _check_blocks_share_nothing(anatomy, stages)
    stage_of = [stage for stage in stages for _ in range(stage.first, stage.stop)]
    _check_groups(anatomy, stage_of)
    blocks, before = [], []
    for index, (name, block) in enumerate(anatomy.blocks.items()):
        seat = Seat(places[block], block, BlockStandIn(name, block, index, course), stage_of[index].index)
        if stage_of[index].rank == rank:
            leave_stage(block, seat.of_stage)
            blocks.append(seat)
        else:
            seat.take(seat.stand_in)
    for name, module in anatomy.before.items():
        shared = _shared(module, tied) if has_last else {}
        stand_in: StandIn = (
            EmbeddingStandIn(name, module, shared, course)
            if isinstance(module, nn.Embedding)
            else PassedOver(name, module, shared)
        )
        seat = Seat(places[module], module, stand_in, 0)
        if has_first:
            before.append(seat)
        else:
            seat.take(stand_in)
    for name, module in anatomy.after.items() if not has_last else ():
        stand_in = NotReached(name, module, _shared(module, tied) if has_first else {})
        Seat(places[module], module, stand_in, len(stages) - 1).take(stand_in)
    own = tuple(stage for stage in stages if stage.rank == rank)
    is_spread = stages[0].rank != stages[-1].rank
    if is_spread and (has_first or has_last):
        for each in tied:
            part = part_of(each.parameter) or Part(each.parameter.shape, None, 0, _length(each.parameter), counts=True)
            set_part(each.parameter, replace(part, counts=part.counts and has_first))
    held = tied if is_spread and (has_first or has_last) else ()
    return Split(stages, own, tuple(blocks), tuple(before), held, course)


def _tied(anatomy: Anatomy) -> tuple[Tied, ...]:
    held = {
        id(p): Tied(f"{name}.{attribute}", p)
        for name, module in anatomy.before.items()
        for attribute, p in module._parameters.items()
        if p is not None
    }
    after = {id(p) for module in anatomy.after.values() for p in module._parameters.values() if p is not None}
    for name, block in anatomy.blocks.items():
        for attribute, p in block.named_parameters():
            if id(p) in held or id(p) in after:
                raise ValueError(
                    f"pipeline: '{name}.{attribute}' is also a parameter of a module outside the blocks, which may be "
                    "on another stage: untie it"
                )
    return tuple(each for key, each in held.items() if key in after)


def _check_blocks_share_nothing(anatomy: Anatomy, stages: tuple[Stage, ...]) -> None:
    """With a block of another rank: each would train a copy of its own."""
    found: dict[int, tuple[str, int]] = {}
    ranks = [stage.rank for stage in stages for _ in range(stage.first, stage.stop)]
    for rank, (name, block) in zip(ranks, anatomy.blocks.items(), strict=True):
        for attribute, p in block.named_parameters():
            path, other = found.setdefault(id(p), (f"{name}.{attribute}", rank))
            if other != rank:
                raise ValueError(
                    f"pipeline: '{path}' is also '{name}.{attribute}', in a block of another stage, and each would "
                    "train its own: untie them, or put both blocks into one stage with split="
                )


def _check_groups(anatomy: Anatomy, stage_of: Sequence[Stage]) -> None:
    """Blocks that are computed again together must be: one stage would compute what the next has, and find that out
    in its backward alone."""
    stages = {block: stage.index for block, stage in zip(anatomy.blocks.values(), stage_of, strict=True)}
    for name, block in anatomy.blocks.items():
        if any(stages.get(other) != stages[block] for other in computed_again_with(block)):
            raise ValueError(
                f"pipeline: '{name}' is checkpointed together with a block of another stage: call zf.checkpoint_blocks "
                "after zf.pipeline, or with every=1"
            )


def _shared(module: nn.Module, tied: tuple[Tied, ...]) -> dict[str, nn.Parameter]:
    known = {id(each.parameter) for each in tied}
    return {name: p for name, p in module._parameters.items() if p is not None and id(p) in known}


def _length(parameter: nn.Parameter) -> int:
    return parameter.shape[0] if parameter.ndim else 1


def _given(split: list[str], names: list[str], stages: int) -> list[int]:
    unknown = [name for name in split if name not in names]
    if unknown:
        raise ValueError(f"split: '{unknown[0]}' is no block of the model; its blocks are {names[0]} to {names[-1]}")
    starts = [names.index(name) for name in split]
    if len(starts) == stages - 1 and 0 not in starts:
        starts = [0, *starts]
    if len(starts) != stages or starts[0] != 0 or sorted(set(starts)) != starts:
        raise ValueError(
            f"split={split} must name the first block of each of the {stages} stages in their order, from {names[0]} on"
        )
    return starts
