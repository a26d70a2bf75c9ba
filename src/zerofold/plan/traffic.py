"""What a rank sends in a step: the table of docs/design.md, with padding and with what stays gathered.

    row           parameters gathered                        gradients reduced
    dp, 1         once, after the step                       once a step
    2             once, after the step                       in each micro-batch
    3, hsdp, hpz  twice in each micro-batch, less what       in each micro-batch; hsdp across groups once
                  stays gathered from forward to backward
    0             never                                      once a step, all-reduced

A stage is not asked for by name: all of this follows from its row of placements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from zerofold.placement import ACROSS, Placement, Row, row
from zerofold.plan.held import units_of_rank, widths_of
from zerofold.plan.machine import Machine
from zerofold.plan.mesh import Mesh, mesh_of
from zerofold.plan.pipelining import crossings
from zerofold.plan.point import Point, Traffic
from zerofold.plan.shape import ROOT, ModelShape, UnitShape
from zerofold.plan.slabs import slabs_of
from zerofold.plan.states import Widths

TENSOR, PIPELINE, ALL = "tensor", "pipeline", "all"
_LOSS_BYTES = 4  # of a number, whatever the model computes in


class Exchange(NamedTuple):
    """Equal collectives of one group: `size` is all that is gathered or reduced, in elements."""

    collective: str
    group: str
    ranks: int
    size: float
    itemsize: int
    times: float

    @property
    def sent(self) -> float:
        """Elements of one rank, as a ring sends them."""
        if self.collective == "send":
            return self.size * self.times
        rounds = 2 if self.collective == "all_reduce" else 1
        return rounds * self.size * self.times * (self.ranks - 1) / self.ranks


class GatherCounts(NamedTuple):
    """Of one unit in a step: over all the ranks that its parameters are cut over, and inside a group by a copy."""

    whole: float
    copies: float


def traffic(
    model: ModelShape,
    machine: Machine,
    point: Point,
    *,
    with_activations: bool = True,
    widths: Widths | None = None,
) -> Traffic:
    """Elements and bytes that a rank sends in a step, by collective and by group: "all", "inside", "across" as the
    ledger names them, "tensor" and "pipeline", which carry activations. Agreements of a few numbers are left out.
    `widths`: instead of those of the point's precision.

    >>> from zerofold.plan.machine import Link
    >>> link = Link(rate=1e9)
    >>> machine = Machine(name="four", devices=4, device_memory=0, host_memory=0, flops=1, flops_fp32=1, memory_rate=1,
    ...                   inside=link, across=link, to_host=link, host_update=1)
    >>> model = ModelShape(name="m", units=(UnitShape(name="", trained=0), UnitShape(name="b", trained=100, count=8)))
    >>> traffic(model, machine, Point(stage="2", precision="fp32")).elements
    {('all_gather', 'all'): 600.0, ('reduce_scatter', 'all'): 600.0}
    """
    elements: defaultdict[tuple[str, str], float] = defaultdict(float)
    nbytes: defaultdict[tuple[str, str], float] = defaultdict(float)
    for exchange in exchanges(model, machine, point, with_activations=with_activations, widths=widths):
        if exchange.sent:
            key = exchange.collective, exchange.group
            elements[key] += exchange.sent
            nbytes[key] += exchange.sent * exchange.itemsize
    return Traffic(elements=dict(sorted(elements.items())), bytes=dict(sorted(nbytes.items())))


def exchanges(
    model: ModelShape,
    machine: Machine,
    point: Point,
    *,
    with_activations: bool = True,
    widths: Widths | None = None,
) -> Iterator[Exchange]:
    mesh, widths, chosen = mesh_of(machine, point), widths or widths_of(point.precision), row(point.stage)
    units = units_of_rank(model, point)
    stays = kept(units, widths.compute, point.live_bytes)
    for unit, staying in zip(units, stays, strict=True):
        yield from _gathers(unit, staying, chosen, mesh, widths, point)
        yield from _reductions(unit, chosen, mesh, widths, point)
    if with_activations:
        yield from model_exchanges(model, point)


def kept(units: Sequence[UnitShape], itemsize: int, live_bytes: int | None = None) -> list[int]:
    """How many of each unit stay gathered from forward to backward: the root, and the last ones that fit the bound on
    live bytes together. By default that is the root and twice the largest block, as in `zerofold.dealing`.

    >>> root, block = UnitShape(name="", trained=10), UnitShape(name="block", trained=100, count=6)
    >>> kept([root, block], 2), kept([root, block], 2, live_bytes=220), kept([root, block], 2, live_bytes=1000)
    ([1, 2], [1, 1], [1, 4])
    """
    sizes = [unit.parameters * itemsize for unit in units]
    blocks = [size for unit, size in zip(units, sizes, strict=True) if unit.name != ROOT]
    roots = sum(unit.count * size for unit, size in zip(units, sizes, strict=True) if unit.name == ROOT)
    left = 2 * max(blocks, default=0) if live_bytes is None else max(0, live_bytes - roots)
    found = [unit.count for unit in units]
    for index in _backward_order([unit.name for unit in units]):
        unit, size = units[index], sizes[index]
        if unit.name == ROOT:
            continue
        stays = unit.count if not size else min(unit.count, left // size)
        left = left - stays * size if stays == unit.count else 0  # a run from the end, without holes
        found[index] = stays
    return found


def _backward_order(names: Sequence[str]) -> list[int]:
    """Of units in forward order, by number: backward enters a unit before those inside it.

    >>> _backward_order(["", "a", "a.0", "a.1", "b"])
    [0, 4, 1, 3, 2]
    """
    left: list[int] = []  # in the order in which forward leaves them
    around: list[int] = []
    for index, name in enumerate(names):
        while around and names[around[-1]] != ROOT and not name.startswith(f"{names[around[-1]]}."):
            left.append(around.pop())
        around.append(index)
    return (left + around[::-1])[::-1]


def gathers_in_step(unit: UnitShape, staying: int, chosen: Row, mesh: Mesh, point: Point) -> GatherCounts:
    """Of all `count` units together. With a pipeline they stay gathered over all micro-batches of a step."""
    if not chosen.parameters.is_cut:
        return GatherCounts(unit.count if chosen.refreshes_after_step else 0, 0)
    if point.pipeline > 1:
        return GatherCounts(unit.count, 0)
    uses = point.accumulate * (2 * unit.count - staying)
    if chosen.copy is None or mesh.ranks(chosen.copy) == mesh.data:
        return GatherCounts(uses, 0)
    return GatherCounts(unit.count, uses - unit.count)


def reductions_in_step(chosen: Row, point: Point) -> int:
    """Gradients that are cut as they come are reduced in every micro-batch, whole sums once."""
    return point.accumulate if chosen.gradients.is_cut and point.pipeline == 1 else 1


def group_name(placement: Placement, mesh: Mesh) -> str:
    ranks = mesh.ranks(placement)
    return ALL if ranks == mesh.data else placement.axes[0]


def flat_size(unit: UnitShape, chosen: Row, mesh: Mesh, widths: Widths, *, with_frozen: bool = False) -> int:
    """Elements of a unit in its flat spaces, with padding where its tensors are known."""
    if not unit.tensors:
        return unit.trained + unit.frozen * with_frozen
    slabs = slabs_of(unit, chosen, widths, mesh.ranks(chosen.optimizer))
    return sum(slab.size for slab in slabs if slab.is_trained or with_frozen)


def _gathers(
    unit: UnitShape, staying: int, chosen: Row, mesh: Mesh, widths: Widths, point: Point
) -> Iterator[Exchange]:
    home = chosen.parameters if chosen.parameters.is_cut else chosen.optimizer
    if not home.is_cut:
        return
    counts = gathers_in_step(unit, staying, chosen, mesh, point)
    # The layout is that of the shards, whoever gathers. What is frozen never changes: whole parameters are sent once in
    # a run, and so is a group's copy, which every later gather is made from.
    trained = flat_size(unit, chosen, mesh, widths)
    frozen = flat_size(unit, chosen, mesh, widths, with_frozen=True) - trained if chosen.parameters.is_cut else 0
    has_copies = chosen.copy is not None and mesh.ranks(chosen.copy) < mesh.data
    for placement, times in ((home, counts.whole), (chosen.copy, counts.copies)):
        if placement is not None and times:
            ranks = mesh.ranks(placement)
            size = trained if has_copies else trained + frozen
            yield Exchange("all_gather", group_name(placement, mesh), ranks, size, widths.compute, times)
    if chosen.copy is not None and has_copies and frozen:
        ranks, times = mesh.ranks(chosen.copy), counts.whole + counts.copies
        yield Exchange("all_gather", group_name(chosen.copy, mesh), ranks, frozen, widths.compute, times)


def _reductions(unit: UnitShape, chosen: Row, mesh: Mesh, widths: Widths, point: Point) -> Iterator[Exchange]:
    times = unit.count * reductions_in_step(chosen, point)
    owners = mesh.ranks(chosen.optimizer)
    size = flat_size(unit, chosen, mesh, widths)
    if not chosen.reduces_to_owner:
        yield Exchange("all_reduce", ALL, mesh.data, size, widths.wire, times)
        return
    name = group_name(chosen.optimizer, mesh)
    yield Exchange("reduce_scatter", name, owners, size, widths.wire, times)
    if chosen.reduces_across and mesh.groups > 1:
        across = ALL if mesh.groups == mesh.data else ACROSS
        # What was summed is averaged across groups in the dtype in which it is summed, once a step.
        yield Exchange("all_reduce", across, mesh.groups, size / owners, widths.gradient, unit.count)


class Share(NamedTuple):
    """What of a model's row of blocks and of its ends a rank has."""

    blocks: int
    has_embedding: bool = True
    has_head: bool = True
    sends: float = 0.0
    """Of a micro-batch: outputs that go to another stage, and gradients that go back to one."""


def usual_share(model: ModelShape, point: Point) -> Share:
    """Of a pipeline's ranks one that sends the most over its tensor axis: the last, with the head, of a long row. Sends
    to other stages are the mean of all, since the ends have one neighbour."""
    assert model.layers is not None
    blocks = -(-model.layers // point.pipeline)
    return Share(blocks, has_embedding=point.pipeline == 1, sends=2 * crossings(point) if point.pipeline > 1 else 0.0)


def model_exchanges(model: ModelShape, point: Point, share: Share | None = None) -> Iterator[Exchange]:
    """Activations between the devices that share a model; by default those of a usual rank."""
    if point.tensor == point.pipeline == 1:
        return
    if model.hidden is None or model.layers is None:
        raise ValueError(
            f"{model.name}: tensor={point.tensor}, pipeline={point.pipeline} send activations, and only its number of "
            "parameters is known; give layers and hidden, or leave both at 1"
        )
    itemsize = widths_of(point.precision).compute
    share = usual_share(model, point) if share is None else share
    tokens = point.micro_batch * model.tokens
    size = tokens * model.hidden
    if point.tensor > 1:
        # After attention and after the MLP, forward and backward; a recomputed forward makes them again. With sequence
        # parallelism each is a reduce-scatter and an all-gather, which send as much.
        passes = 3 if point.checkpoint_every else 2
        times = 2 * passes * point.accumulate * share.blocks
        for collective in ("reduce_scatter", "all_gather") if point.sequence_parallel else ("all_reduce",):
            yield Exchange(collective, TENSOR, point.tensor, size, itemsize, times)
        yield from _exchanges_at_the_ends(model, point, share, tokens, itemsize)
    if point.keeps_parts:  # each input is put together once, before its block is computed again
        groups = -(-share.blocks // point.checkpoint_every)
        yield Exchange("all_gather", TENSOR, point.tensor, size, itemsize, point.accumulate * groups)
    if point.pipeline > 1:
        shared = point.tensor if point.sequence_parallel else 1  # else each tensor-parallel rank sends all of it
        sends = point.accumulate * share.sends
        yield Exchange("send", PIPELINE, point.pipeline, size / shared, itemsize, sends)


def _exchanges_at_the_ends(
    model: ModelShape, point: Point, share: Share, tokens: float, itemsize: int
) -> Iterator[Exchange]:
    """Of an embedding and a head that are cut over the words, which are whole where they do not divide. Gradients of
    norms that see a part of the sequence are left out: a few numbers for every block."""
    if model.hidden is None or model.vocab is None or model.vocab % point.tensor:
        return
    size, times, ranks = tokens * model.hidden, point.accumulate, point.tensor
    if share.has_embedding:  # a rank looks up the words that it has
        yield Exchange("all_reduce", TENSOR, ranks, size, itemsize, times)
    if point.sequence_parallel:  # cut before the first block and put together after the last: one way has to gather
        ends = share.has_embedding + share.has_head
        yield Exchange("all_gather", TENSOR, ranks, size, itemsize, times * ends)
    if share.has_head:
        yield Exchange("all_reduce", TENSOR, ranks, size, itemsize, times)  # the gradient of what it reads
        if point.loss_parallel:  # four numbers of each token: the largest logit, and three sums
            yield Exchange("all_reduce", TENSOR, ranks, 4 * tokens, _LOSS_BYTES, times)
        else:
            yield Exchange("all_gather", TENSOR, ranks, tokens * model.vocab, itemsize, times)
