"""Where inputs of checkpointed blocks are to wait for backward, by the plan's memory and time of one step.

What blocks compute is known of the stream alone, the tensor that goes from block to block: its bytes, and the numbers
that a transformer's block keeps for each of them (`zerofold.plan.transformer`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from zerofold.placement import Tier, Tiers
from zerofold.plan.activities import Shares
from zerofold.plan.batching import choose_batching
from zerofold.plan.machine import GIB, Machine
from zerofold.plan.memory import memory
from zerofold.plan.point import Memory, Point
from zerofold.plan.predict import lacks
from zerofold.plan.shape import ROOT, Activity, ModelShape, Moment, PerSample, Phase, UnitShape, Work
from zerofold.plan.states import Widths
from zerofold.plan.times import times
from zerofold.plan.transformer import BACKWARD, KEPT, LOGIT_BYTES, NO_GRAPH


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What goes from block to block on one rank, of one micro-batch."""

    nbytes: int
    tokens: int
    vocab: int = 0
    """Of the head, where there is one: its logits may be the peak."""
    tensor: int = 1
    """Ranks that share the inside of every block, and hold the same stream."""
    at_once: int = 1
    """Micro-batches that are on their way through a pipeline."""
    own: int | None = None
    """Bytes of this rank's part of it, where the ranks have cut it along the sequence. The first block gets all."""
    stays: bool = False
    """No store takes it, as with a DTensor."""
    others: int = 0
    """Bytes of all other inputs of blocks in a forward, each kept once: an encoder's result, T5's bias."""
    whole: int = 0
    """Of them, those that tensor ranks do not hold alike: they are kept whole where the rest is cut."""


class Choice(NamedTuple):
    """A place, whether in parts (P_a), and why."""

    keep: str
    partition: bool
    fits: bool
    sentence: str

    @property
    def distance(self) -> tuple[int, bool]:
        """From the device, for comparison."""
        return [tier.value for tier in Tier].index(self.keep), self.partition


def choose(
    units: Sequence[UnitShape],
    stream: Stream,
    machine: Machine,
    point: Point,
    *,
    can_cut: bool = False,
    widths: Widths | None = None,
    tiers: Mapping[str, Tiers] | None = None,
) -> Choice:
    """The first place that leaves room for the rest of training: the device, in parts where tensor-parallel ranks hold
    the same inputs (`can_cut`), the host, the disk. `units` are those of one rank, the root first.

    >>> from zerofold.plan.presets import preset
    >>> units = [UnitShape(name="", trained=10**8), *(UnitShape(name=f"b.{i}", trained=10**8) for i in range(40))]
    >>> short, long = (Stream(nbytes=n * 4096 * 2, tokens=n) for n in (2**13, 2**18))
    >>> point = Point(stage="3", checkpoint_every=1)
    >>> choose(units, short, preset("A100-80"), point).keep, choose(units, long, preset("A100-80"), point).keep
    ('device', 'host')
    """
    tried = list(_candidates(point, machine, stream, can_cut))
    held: list[Memory] = []
    for place in tried:
        shape = _shape(units, stream, place)
        # The shape has parts already. On the device they lie in a block, which stays.
        in_a_block = place.partition and not place.keeps_away
        asked = replace(place, partition=False, contiguous_checkpoints=in_a_block)
        held.append(memory(shape, machine, asked, widths=widths, tiers=tiers))
        missing = lacks(held[-1], machine)
        if not missing or place is tried[-1]:
            late = _lateness(units, stream, machine, point, place)
            said = _sentence(held, machine, place, late, missing)
            if place.partition and stream.whole:
                said += (
                    f"; {stream.whole / 2**20:.1f} MiB of them, which tensor ranks do not hold alike, are kept whole"
                )
            if len(held) == 1 and not missing and not tiers and stream.at_once == 1:
                said += _what_pays(shape, machine, place)
            return Choice(place.checkpoints_on, place.partition, not missing, said)
    raise AssertionError("there is always the device")


def _candidates(point: Point, machine: Machine, stream: Stream, can_cut: bool) -> Iterator[Point]:
    parts = can_cut and stream.tensor > 1
    yield replace(point, checkpoints_on=Tier.DEVICE.value, partition=False)
    if stream.stays:
        return
    if parts:
        yield replace(point, checkpoints_on=Tier.DEVICE.value, partition=True)
    yield replace(point, checkpoints_on=Tier.HOST.value, partition=parts)
    if machine.disk:
        yield replace(point, checkpoints_on=Tier.NVME.value, partition=parts)


def _shape(units: Sequence[UnitShape], stream: Stream, place: Point) -> ModelShape:
    return ModelShape(
        name="model", units=tuple(units), activities=(_activity(units, stream, place),), tokens=stream.tokens
    )


def _activity(units: Sequence[UnitShape], stream: Stream, place: Point) -> Activity:
    """A micro-batch counts as one sample. In parts, two of the inputs are whole at a time."""
    shares = Shares.of(Point(tensor=stream.tensor, sequence_parallel=stream.own is not None))
    every, inside = place.checkpoint_every, stream.nbytes * shares.inside
    own = stream.nbytes if stream.own is None else stream.own
    one = own / (stream.tensor if place.partition else 1)
    rebuilt = 2 * stream.nbytes if place.partition else 0
    blocks = [number for number, unit in enumerate(units) if unit.name != ROOT]
    groups = -(-len(blocks) // every)
    alike = stream.others - stream.whole
    beside = stream.nbytes - own + stream.whole + alike / (stream.tensor if place.partition else 1)
    others = (stream.at_once - 1) * groups * one + stream.at_once * beside
    logits = stream.tokens * stream.vocab * LOGIT_BYTES

    def moment(phase: Phase, unit: int, alive: float, passes: int) -> Moment:
        work = Work(PerSample(0, 2 * passes * stream.tokens * units[unit].parameters))
        return Moment(phase=phase, unit=unit, alive=PerSample(0, alive), work=work)

    kept = {block: others + -(-(place_in + 1) // every) * one for place_in, block in enumerate(blocks)}
    root = groups * one + beside + 3 * stream.nbytes + logits
    found = [moment(Phase.FORWARD, block, kept[block] + NO_GRAPH * inside, 1) for block in blocks]
    found += [moment(Phase.FORWARD, 0, root, 1), moment(Phase.BACKWARD, 0, root, 2)]
    computed = (every * KEPT + BACKWARD) * inside + rebuilt
    found += [moment(Phase.BACKWARD, block, kept[block] + computed, 3) for block in reversed(blocks)]
    return Activity(
        checkpoint_every=every,
        moments=tuple(found),
        checkpoints=PerSample(0, groups * one + beside),
        logits=PerSample(0, logits),
    )


def _lateness(units: Sequence[UnitShape], stream: Stream, machine: Machine, point: Point, place: Point) -> float:
    """By which part a step is longer for it."""
    here, there = (
        times(_shape(units, stream, each), machine, replace(each, partition=False, auto=False, tiers=Tiers())).step
        for each in (replace(point, checkpoints_on=Tier.DEVICE.value, partition=False), place)
    )
    return there / here - 1 if here else 0.0


def _what_pays(shape: ModelShape, machine: Machine, place: Point) -> str:
    """Whoever gives the samples decides how many at a time; where others would be worth it, they are told."""
    if place.accumulate == 1:
        return ""
    found = choose_batching(shape, machine, place, place.accumulate)
    if found is None or found.micro_batch == 1 or not found.saved:
        return ""
    return (
        f"; {found.micro_batch} of these micro-batches in one (accumulate={found.accumulate}) would pay by the plan: "
        f"with their inputs {_WHERE[found.keep]} a step would be {100 * found.saved:.0f}% shorter"
    )


_WHERE = {"device": "on the device", "host": "in host memory", "nvme": "on the disk"}


def _sentence(held: Sequence[Memory], machine: Machine, place: Point, late: float, missing: str) -> str:
    there = machine.device_memory / GIB
    what = "inputs of checkpointed blocks wait" + (" in parts" if place.partition else "")
    where = f"{what} {_WHERE[place.checkpoints_on]}"
    now = held[-1].device_need / GIB
    if len(held) == 1:
        return f"{where}: a step takes {now:.1f} of {there:.1f} GiB there"
    would = held[0].device_need / GIB
    before = f"{where}: with all of them on the device a step would take {would:.1f} of {there:.1f} GiB"
    if missing:
        return f"{before}, and so it takes {now:.1f}, which does not fit either ({missing})"
    return f"{before}; so it takes {now:.1f} and {100 * max(0.0, late):.0f}% longer"
