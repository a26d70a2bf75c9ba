"""What a schedule of a pipeline costs: micro-batches whose activations are on the first stage at once, and the time for
which a stage waits, in times of a micro-batch.

    P stages, M micro-batches, v chunks of blocks a rank         at once          waits
    gpipe         all forwards, then all backwards               M                P − 1
    1f1b          a backward as soon as there is one             min(P, M)        P − 1
    interleaved   1f1b, of v chunks a rank                       P + (P − 1)/v    (P − 1)/v
    zero_bubble   interleaved, weights' gradients put into       min(P, M)        (P − 1)/v of a forward alone
                  what would be waiting
    zbv           the same with two chunks a rank in a V         min(P, M)        0, where forward, inputs' and
                                                                                  weights' gradients take the same
"""

from __future__ import annotations

from zerofold.parallel.schedules import SCHEDULES as KINDS
from zerofold.parallel.schedules import Names, are_allowed, check_counts, schedule_kind
from zerofold.plan.followed import least
from zerofold.plan.point import Point

GPIPE, ONE_F_ONE_B, INTERLEAVED, ZERO_BUBBLE, V = SCHEDULES = tuple(KINDS)
_NAMES = Names("accumulate", "chunks")


def check_schedule(point: Point) -> None:
    """Raises ValueError for one that `zf.pipeline` would refuse.

    >>> check_schedule(Point(schedule="2f2b"))
    Traceback (most recent call last):
    ...
    ValueError: schedule='2f2b' is unknown: did you mean '1f1b'?
    >>> check_schedule(Point(pipeline=4, accumulate=2))
    Traceback (most recent call last):
    ...
    ValueError: accumulate=2 cannot fill 4 stages with schedule='1f1b': give at least 4, or use schedule='gpipe'
    """
    kind = schedule_kind(point.schedule)
    if point.chunks < 0:
        raise ValueError(f"chunks={point.chunks} must be the chunks of blocks on a rank, or 0 for the schedule's own")
    if point.chunks and point.pipeline == 1:
        raise ValueError(f"chunks={point.chunks} is of a pipeline, and pipeline=1; give another pipeline=")
    if point.pipeline > 1:
        check_counts(point.schedule, point.pipeline, point.chunks or kind.usual_chunks, point.accumulate, _NAMES)


def can_run(point: Point) -> bool:
    """Whether `zf.pipeline` takes so many micro-batches.

    >>> [count for count in (1, 2, 3, 4, 9) if can_run(Point(pipeline=4, accumulate=count))]
    [4, 9]
    """
    return point.pipeline == 1 or are_allowed(point.schedule, point.pipeline, chunks_of(point), point.accumulate)


def chunks_of(point: Point) -> int:
    """Runs of blocks that follow each other on one rank."""
    return point.chunks or schedule_kind(point.schedule).usual_chunks if point.pipeline > 1 else 1


def in_flight(point: Point) -> float:
    """Micro-batches of which the first stage keeps activations at once, each for all of its blocks.

    >>> [in_flight(Point(pipeline=4, accumulate=16, schedule=each)) for each in SCHEDULES]
    [16, 4, 5.5, 4, 4]
    """
    stages, micro_batches = point.pipeline, point.accumulate
    if stages == 1:
        return 1
    if point.schedule == GPIPE:
        return micro_batches
    more = (stages - 1) / chunks_of(point) if point.schedule == INTERLEAVED else 0
    return least((micro_batches, stages + more))


def bubble_seconds(point: Point, forward: float, backward: float) -> float:
    """How long a stage waits for others in a step, of which a micro-batch computes so long in it.

    >>> [bubble_seconds(Point(pipeline=4, accumulate=16, schedule=each), 1.0, 2.0) for each in SCHEDULES]
    [9.0, 9.0, 4.5, 3.0, 0.0]
    """
    # F, B and W of the paper: weights' gradients take as long as a forward, and inputs' what is left of a backward.
    inputs, weights = backward - forward, forward
    waits = {ZERO_BUBBLE: forward + inputs - weights, V: forward + inputs - 2 * weights}
    if point.schedule == V:
        return (point.pipeline - 1) * max(0.0, waits[V])
    return (point.pipeline - 1) * max(0.0, waits.get(point.schedule, forward + backward)) / chunks_of(point)


def bubble_part(point: Point) -> float:
    """Of a step's arithmetic and waiting for other stages, the waiting: (P − 1)/(M + P − 1) with 1f1b.

    >>> bubble_part(Point(pipeline=4, accumulate=9)), bubble_part(Point())
    (0.25, 0.0)
    """
    waits = bubble_seconds(point, 1.0, 2.0)
    return waits / (3 * point.accumulate + waits)


def crossings(point: Point) -> float:
    """How often a micro-batch's stream goes from a rank to another in forward, by the rank in the mean.

    >>> [crossings(Point(pipeline=4, schedule=each)) for each in SCHEDULES]
    [0.75, 0.75, 1.75, 0.75, 1.5]
    """
    stages = point.pipeline
    chunks = chunks_of(point)
    turns = 1 if point.schedule == V else 0  # at the end of the V it stays where it is
    return (stages * chunks - 1 - turns) / stages
