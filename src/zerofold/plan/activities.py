"""What of a model's activations is on one device: tensor-parallel ranks share some of them, pipeline stages their
blocks, and inputs of checkpointed blocks may wait in parts or elsewhere.

What tensor-parallel ranks keep of the 16 numbers a token and width of a block (`zerofold.plan.transformer`):

    whole     both norms' inputs and outputs                     4     with sequence-parallel norms: their outputs, 2,
    cut       query, key, value, attention's output, the MLP    12     which a matrix product keeps as it gets them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from zerofold.plan.pipelining import in_flight
from zerofold.plan.point import Point
from zerofold.plan.shape import ROOT, Activity, ModelShape, Moment, PerSample, Phase, Work

GROUPS_ON_DEVICE = 2  # of checkpointed blocks, whose inputs are there while the others wait elsewhere, or in parts
WHOLE, WHOLE_WITH_SEQUENCE = 4 / 16, 2 / 16
"""Of what a block computes: the part that every tensor-parallel rank has."""


class Shares(NamedTuple):
    """What a tensor-parallel rank has of each kind."""

    inside: float
    """Of what blocks compute."""
    stream: float
    """Of what goes from block to block, and is kept for recomputation."""
    logits: float

    @classmethod
    def of(cls, point: Point) -> Shares:
        """
        >>> Shares.of(Point(tensor=4))
        Shares(inside=0.4375, stream=1.0, logits=1.0)
        >>> Shares.of(Point(tensor=4, sequence_parallel=True, loss_parallel=True))
        Shares(inside=0.34375, stream=0.25, logits=0.25)
        """
        part = 1 / point.tensor
        whole = WHOLE_WITH_SEQUENCE if point.sequence_parallel else WHOLE
        return cls(
            inside=whole + (1 - whole) * part,
            stream=part if point.sequence_parallel else 1.0,
            logits=part if point.loss_parallel else 1.0,
        )


def activity_of(model: ModelShape, point: Point) -> Activity:
    """Of the fullest device. Where only parameters are known, units compute one after the other in no memory."""
    if model.activities:
        activity = _of_rank(model.activity(point.checkpoint_every), model, point)
        if point.keeps_away or point.keeps_parts:
            activity = _kept_elsewhere(activity, model, point)
        return _in_a_block(activity, model, point) if point.keeps_a_block else activity
    order = [index for index, unit in enumerate(model.units) if unit.name != ROOT] or [0]
    moments = [
        Moment(phase=phase, unit=index, alive=PerSample(), work=Work(), repeats=model.units[index].count)
        for phase, indices in ((Phase.FORWARD, order), (Phase.BACKWARD, order[::-1]))
        for index in indices
    ]
    return Activity(checkpoint_every=point.checkpoint_every, moments=tuple(moments))


def _kept_elsewhere(activity: Activity, model: ModelShape, point: Point) -> Activity:
    """Inputs off the device, or in parts: whole and here are those of two groups of blocks, on their way down or up,
    or put together for the block that is computed again and the one before it. All groups are taken for alike: of those
    that were traced, `growth` is no longer what one block leaves.
    """
    counted = list(_counted(activity, model, point))
    groups = max(each.most for each in counted)
    if groups <= GROUPS_ON_DEVICE:
        return activity
    one = _times(activity.checkpoints, 1 / groups)
    gone = 1.0 if point.keeps_away else 1 - 1 / point.tensor
    moments = [each.changed(_times(one, -max(0, each.kept - GROUPS_ON_DEVICE) * gone)) for each in counted]
    left = GROUPS_ON_DEVICE if point.keeps_away else groups / point.tensor
    return replace(activity, moments=tuple(moments), checkpoints=_times(one, left))


def _in_a_block(activity: Activity, model: ModelShape, point: Point) -> Activity:
    """What has gone, or has not come yet, has its place all the same: the block is that of the step before."""
    counted = list(_counted(activity, model, point))
    groups = max(each.most for each in counted)
    if not groups:  # nothing is computed again
        return activity
    one = _times(activity.checkpoints, 1 / groups)
    return replace(activity, moments=tuple(each.changed(_times(one, each.most - each.kept)) for each in counted))


class _Counted(NamedTuple):
    """A moment, and how many groups of blocks have an input kept in it, of how many at most."""

    moment: Moment
    kept: float
    most: float
    is_block: bool

    def changed(self, more: PerSample) -> Moment:
        alive = _positive(self.moment.alive + more)
        return replace(self.moment, alive=alive, growth=PerSample() if self.is_block else self.moment.growth)


def _counted(activity: Activity, model: ModelShape, point: Point) -> Iterator[_Counted]:
    stretches = dict.fromkeys(Phase, 0)
    for moment in activity.moments:
        stretches[moment.phase] += moment.repeats if model.units[moment.unit].name != ROOT else 0
    blocks, every, on_way = stretches[Phase.FORWARD], activity.checkpoint_every, in_flight(point)
    groups = -(-blocks // every)
    done = dict.fromkeys(Phase, 0)
    for moment in activity.moments:
        is_block, before = model.units[moment.unit].name != ROOT, done[moment.phase]
        done[moment.phase] += moment.repeats if is_block else 0
        if moment.phase is Phase.FORWARD:
            kept = done[Phase.FORWARD]
        else:  # in backward a block has a stretch, or two where its group is computed again first
            kept = blocks - before * blocks // max(1, stretches[Phase.BACKWARD])
        # The root's last moments are those of the last stage, which has one micro-batch.
        others = groups * (on_way - 1) if is_block else 0
        yield _Counted(moment, -(-kept // every) + others, groups + others, is_block)


def _of_rank(activity: Activity, model: ModelShape, point: Point) -> Activity:
    """Of a pipeline's stages the first keeps the most blocks' activations, for as many micro-batches as are on their
    way, and the last has the logits, for one."""
    if point.tensor == point.pipeline == 1:
        return activity
    shares, stages, on_way = Shares.of(point), point.pipeline, in_flight(point)
    grown = shares.stream if activity.checkpoint_every else shares.inside
    kept = PerSample()
    for moment in activity.moments:
        if moment.phase is Phase.FORWARD:
            kept = kept + _times(moment.growth, moment.repeats * grown)
    moments = []
    for moment in activity.moments:
        is_root = model.units[moment.unit].name == ROOT
        alive, growth = _of_tensor_rank(moment, activity, shares, is_root=is_root), _times(moment.growth, grown)
        if is_root:
            alive, repeats = alive + _times(kept, 1 / stages - 1), moment.repeats
        else:
            repeats = -(-moment.repeats // stages)
            alive = alive + _times(growth, repeats * on_way - moment.repeats)
        # Gradients, where there are any, are those of a whole model that was followed.
        moments.append(replace(moment, alive=_positive(alive), growth=growth, repeats=repeats, gradients=None))
    share = -(-(model.layers or stages) // stages) * on_way / (model.layers or stages)
    return replace(
        activity,
        moments=tuple(moments),
        checkpoints=_times(activity.checkpoints, share * shares.stream),
        logits=_times(activity.logits, shares.logits),
    )


def _of_tensor_rank(moment: Moment, activity: Activity, shares: Shares, *, is_root: bool) -> PerSample:
    """What is alive is kept inputs, where the root computes logits, and what is computed, as far as they are in it."""
    left, found = moment.alive, PerSample()
    kinds = [(activity.checkpoints, shares.stream)] + ([(activity.logits, shares.logits)] if is_root else [])
    for kind, share in kinds:
        if kind.each <= left.each and kind.fixed <= left.fixed:
            left, found = left + _times(kind, -1), found + _times(kind, share)
    return found + _times(left, shares.inside)


def _times(number: PerSample, factor: float) -> PerSample:
    return PerSample(number.fixed * factor, number.each * factor)


def _positive(number: PerSample) -> PerSample:
    return PerSample(max(0.0, number.fixed), max(0.0, number.each))
