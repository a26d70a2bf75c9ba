"""What one rank holds of every unit: its states, what gathering takes, local gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from zerofold.offload.sizes import UnitSize
from zerofold.placement import INSIDE, Cut, Row, Tier, Tiers, row
from zerofold.plan.followed import greatest, greatest_common_divisor, least
from zerofold.plan.machine import Machine
from zerofold.plan.point import Point
from zerofold.plan.shape import ROOT, ModelShape, UnitShape
from zerofold.plan.slabs import SlabSize, slabs_of, unit_size
from zerofold.plan.states import StateBytes, Widths, cut_over, keeps_sums, kept

UPDATE_RING = 17 * 2**26
"""Bytes of the device: four chunks of 2**24 parameters on their way through it, where their states live elsewhere."""
_AWAY = Tiers(Tier.HOST, Tier.HOST, Tier.HOST)
ARENA_ALIGNMENT = 512
"""Bytes: where a slab's gradients begin in the block of `contiguous_gradients`, as CUDA's allocator starts its own."""
IN_FLIGHT = 2
"""Chunks of gradients on the wire at once, as in `zerofold.reduce`."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How many share what."""

    data: int
    group: int
    """Ranks inside a group of hsdp and hpz."""
    on_node: int
    """Ranks that share a host."""
    placed: Row

    @property
    def alone(self) -> bool:
        return self.data == 1

    @property
    def gathering(self) -> int:
        """Ranks that a unit's parameters come from."""
        return self.group if self.placed.parameters.axes == (INSIDE,) else self.data

    @property
    def optimizer_cut(self) -> int:
        return cut_over(self.placed, self.data, self.group)


def ranks_of(machine: Machine, point: Point) -> Ranks:
    """Raises ValueError where the degrees do not divide the devices."""
    over = point.tensor * point.pipeline
    if over < 1 or machine.devices % over:
        raise ValueError(
            f"tensor={point.tensor} and pipeline={point.pipeline} do not divide {machine.devices} devices; choose "
            "degrees whose product does"
        )
    data = machine.devices // over
    on_node = least((machine.per_node, machine.devices))
    group = point.group or greatest_common_divisor(greatest((1, on_node // point.tensor)), data)
    if data % group:
        raise ValueError(f"group={group} does not divide the {data} data-parallel ranks; choose a divisor of {data}")
    return Ranks(data=data, group=group, on_node=on_node, placed=row(point.stage))


@lru_cache(maxsize=64)
def widths_of(precision: str) -> Widths:
    return Widths.of(precision)


@dataclass(frozen=True)
class HeldUnit:
    """One unit on one rank, and how many like it there are. Bytes."""

    shape: UnitShape
    slabs: tuple[SlabSize, ...]
    states: StateBytes
    """On the device, where none of them is offloaded: what the ledger shows between backward and the step."""
    has_master: bool
    size: UnitSize
    counters: int
    """Of them, what stays on the device where the states are elsewhere."""
    arena: int = 0
    """Of the gradients: their room in one block, where they have one."""

    def gathered(self, ranks: Ranks, tiers: Tiers) -> int:
        """What its use takes besides. A rank alone, also in its group, makes parameters from masters, unless these are
        in another memory: then what forward computes with stays on the device, or comes from where it is, frozen or
        not."""
        is_cut = ranks.placed.parameters.is_cut
        if not ranks.alone and (ranks.gathering > 1 or not is_cut):
            return self.size.gathered_bytes if is_cut else 0
        if tiers.parameters is not Tier.DEVICE:
            return self.size.gathered_bytes
        if tiers.is_offloaded or not self.has_master:
            return 0
        return sum(slab.gathered_bytes for slab in self.slabs if slab.is_trained)

    @property
    def local_gradients(self) -> int:
        """As autograd makes them, of all of it."""
        return sum(slab.numel * slab.compute for slab in self.slabs if slab.is_trained)

    @property
    def largest_local_gradient(self) -> int:
        """Of one slab: the root's parameters get theirs at opposite ends of backward."""
        return greatest(slab.numel * slab.compute for slab in self.slabs if slab.is_trained)


def held_units(model: ModelShape, ranks: Ranks, widths: Widths, point: Point) -> list[HeldUnit]:
    return [_hold(unit, ranks, widths, point, model.built_bytes) for unit in units_of_rank(model, point)]


def units_of_rank(model: ModelShape, point: Point) -> tuple[UnitShape, ...]:
    """What the fullest device has of every unit: its part of each unit of the fullest pipeline stage."""
    units = tuple(_of_stage(unit, model, point) for unit in model.units)
    return units if point.tensor == 1 else tuple(_of_tensor_rank(unit, model, point.tensor) for unit in units)


def _of_stage(unit: UnitShape, model: ModelShape, point: Point) -> UnitShape:
    """Its share of the blocks. Of the root the fuller end: embeddings are on the first stage and the head is on the
    last; one table that both share is on both.
    """
    if unit.name != ROOT:
        return replace(unit, count=-(-unit.count // point.pipeline))
    tables = _tables(unit, model) if point.pipeline > 1 else []
    if len(tables) < 2:
        return unit
    left = list(unit.tensors)
    left.remove(min(tables))
    return replace(unit, trained=unit.trained - min(tables), tensors=tuple(left))


def _tables(unit: UnitShape, model: ModelShape) -> list[int]:
    """Those of the root's parameters that have a row for each word."""
    if not (model.vocab and model.hidden):
        return []
    least_of_one = model.vocab * model.hidden
    return [numel for numel in unit.tensors if numel >= least_of_one]


def _of_tensor_rank(unit: UnitShape, model: ModelShape, tensor: int) -> UnitShape:
    """Matrices, the biases of their columns and tables of words are cut; norms, the biases of rows and other tables are
    whole everywhere. Where only the number of parameters is known, all of them are taken for cut.
    """
    tables = _tables(unit, model)

    def part(numel: int) -> int:
        is_whole = model.hidden is not None and numel <= model.hidden
        if unit.name == ROOT and unit.tensors and model.vocab:
            is_whole |= numel not in tables or bool(model.vocab % tensor)
        return numel if is_whole else -(-numel // tensor)

    trained, frozen = tuple(map(part, unit.tensors)), tuple(map(part, unit.frozen_tensors))
    return replace(
        unit,
        trained=sum(trained) if trained else -(-unit.trained // tensor),
        frozen=sum(frozen) if frozen else -(-unit.frozen // tensor),
        tensors=trained,
        frozen_tensors=frozen,
    )


def _hold(unit: UnitShape, ranks: Ranks, widths: Widths, point: Point, built_bytes: int) -> HeldUnit:
    placed = ranks.placed
    slabs = slabs_of(unit, placed, widths, ranks.optimizer_cut, built_bytes=built_bytes)
    parameters = gradients = optimizer = 0.0
    arena = 0
    in_pipeline = point.pipeline > 1 and not point.contiguous_gradients
    trained = kept(placed, widths, alone=ranks.alone, accumulate=point.accumulate, in_pipeline=in_pipeline)
    frozen = kept(placed, replace(widths, has_master=False), alone=ranks.alone)
    copies = placed.copy is not None and ranks.group < ranks.data
    sums_too = has_both(placed, widths, point, alone=ranks.alone)
    for slab in slabs:
        each = trained if slab.is_trained else frozen
        parameters += each.whole.parameters * slab.size + each.shard.parameters * slab.shard
        parameters += each.copy * (slab.size // ranks.group) if copies else 0
        if slab.is_trained:
            # A rank alone keeps the tensors that autograd made, or adds them up where they are; else there is a flat
            # space. Moments are made for each piece of a parameter, masters for the shard.
            mean = each.shard.gradients * (slab.numel if ranks.alone and not sums_too else slab.shard)
            sums = each.whole.gradients * slab.numel
            if point.contiguous_gradients:
                mean = -(-each.shard.gradients * slab.shard // ARENA_ALIGNMENT) * ARENA_ALIGNMENT
                # Where the flat gradient is whole and as wide, autograd adds up in it.
                is_apart = placed.optimizer.is_cut or widths.is_apart
                sums = -(-sums // ARENA_ALIGNMENT) * ARENA_ALIGNMENT if is_apart else 0
                arena += math.trunc(mean + sums)
            gradients += mean + sums
            master = widths.master if widths.has_master else 0
            optimizer += widths.moments * slab.owned + master * slab.shard + widths.counters * slab.tensors
    size = unit_size(
        unit.name,
        slabs,
        placed,
        widths,
        alone=ranks.alone,
        accumulate=point.accumulate,
        copies=ranks.group if copies else 0,
    )
    counters = widths.counters * sum(slab.tensors for slab in slabs if slab.is_trained)
    states = StateBytes(parameters, gradients, optimizer)
    return HeldUnit(unit, tuple(slabs), states, widths.has_master, size, counters, arena)


def gathered_at_once(
    units: Sequence[HeldUnit],
    ranks: Ranks,
    point: Point,
    placed: Sequence[Collection[Tiers]] | None = None,
    *,
    with_next: bool = True,
) -> int:
    """The most that gathered parameters take: the root, the unit that computes with those around it, and what is
    fetched ahead. `placed`: the tiers of each unit, else the point's; with automatic ones, whatever asks for most.
    `with_next`: not in the last unit of backward, which no other follows.

    Alone, parameters that nobody cut are not fetched ahead; but in backward a unit begins before the last one ends. In
    a pipeline all units of a stage stay from its first micro-batch to its last.
    """
    usual = (_AWAY,) if point.auto else (point.tiers,)
    each = placed if placed is not None else [usual] * len(units)
    taken = [greatest(unit.gathered(ranks, one) for one in some) for unit, some in zip(units, each, strict=True)]
    total = sum(size * unit.shape.count for size, unit in zip(taken, units, strict=True))
    is_cut = ranks.placed.parameters.is_cut
    if point.pipeline > 1:
        return total
    if is_cut and point.live_bytes is not None and with_next:
        return least((total, point.live_bytes))
    # The bound on live bytes is made from whole units, whatever of them has to be gathered (`zerofold.dealing`).
    sizes = [unit.size.gathered_bytes for unit in units] if is_cut else taken
    by_name = dict(zip((unit.shape.name for unit in units), sizes, strict=True))
    needed = greatest(sum(by_name.get(outer, 0) for outer in _around(unit.shape.name)) for unit in units)
    ahead = greatest(size for size, unit in zip(sizes, units, strict=True) if unit.shape.name != ROOT)
    return least((total, needed + (ahead if with_next else 0)))


def _around(name: str) -> Iterator[str]:
    """
    >>> list(_around("blocks.0.mlp"))
    ['blocks.0.mlp', 'blocks.0', 'blocks', '']
    """
    while name != ROOT:
        yield name
        name = name.rpartition(".")[0]
    yield ROOT


def fused_buffers(units: Sequence[HeldUnit], ranks: Ranks, widths: Widths, point: Point, *, by_gloo: bool) -> int:
    """What the pool grows to: for each chunk in flight rows to send and rows received.

    gloo sends to each other rank its row and gets as many; others reduce and scatter, and get one. A rank that owns
    everything has nothing to send by gloo, and elsewhere sums rows where they are.
    """
    if ranks.alone or not any(unit.shape.trained for unit in units):
        return 0
    over, to_owner = ranks.optimizer_cut, ranks.placed.reduces_to_owner
    if not to_owner and not widths.is_apart:
        return 0  # all-reduced in place
    capacity = max(1, point.buffer_bytes // widths.wire)
    largest = greatest(slab.shard for unit in units for slab in unit.slabs if slab.is_trained)
    if not to_owner:
        return IN_FLIGHT * least((capacity, largest)) * widths.wire
    width = least((greatest((1, capacity // over)), largest))
    if ranks.placed.cut is Cut.FIRST:
        rows = over - 1 if by_gloo else 1
    else:
        rows = 2 * (over - 1) if by_gloo else over + 1
    return IN_FLIGHT * rows * width * widths.wire


def keeps_sent(ranks: Ranks, *, by_gloo: bool) -> bool:
    """Whether gradients stay until they are reduced: gloo's sums are made of them; others sum what was packed."""
    return by_gloo and ranks.optimizer_cut > 1


def local_gradients(unit: HeldUnit, ranks: Ranks, widths: Widths, point: Point, *, by_gloo: bool) -> int:
    """Of a unit in backward: what autograd makes, until it is reduced; one or two earlier ones may be on the wire."""
    made = unit.largest_local_gradient if unit.shape.name == ROOT else unit.local_gradients
    stays = not point.contiguous_gradients  # else they are copied into their place in the block
    if ranks.alone and stays and not point.auto and point.tiers.gradients is Tier.DEVICE:
        return 0  # they are the gradients that stay
    if point.pipeline > 1 or not keeps_sent(ranks, by_gloo=by_gloo):
        return made  # added to the stage's sums, or copied into a buffer or into the flat gradient at once
    in_chunks = made // widths.compute * widths.wire > point.buffer_bytes
    return made * (2 if in_chunks else 1 + IN_FLIGHT)


def has_both(placed: Row, widths: Widths, point: Point, *, alone: bool) -> bool:
    """Whether what stays on the device has sums among its states, besides the gradient that the optimizer reads."""
    in_pipeline = point.pipeline > 1 and not point.contiguous_gradients  # else its memory is there from the start
    return keeps_sums(placed, widths, alone=alone, accumulate=point.accumulate, in_pipeline=in_pipeline)
