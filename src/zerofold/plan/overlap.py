"""What of the communication is not hidden: units one after the other, each beside the one that computes.

forward, parameters cut            one unit is fetched while another computes, no further ahead: the bound on live bytes
    wire      [g0][g1  ][g2  ]
    compute       [f0].[f1].[f2]          waits max(0, g − f) for each, and for the first all of g

backward                           on the wire beside a unit: the one before it is fetched, the one after it reduced
    wire      [g1][g0 r2][r1 ][r0]
    compute   [b2   ][b1   ][b0]  .       waits max(0, g + r − b) for each, and for the last reduction all of r

next forward, after a step         everything was queued at once: whole parameters on their way, updates on the host
    queue     [q0][q1][q2]
    compute       [f0][f1][f2]            unit k waits for q0 + … + qk
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Lane(NamedTuple):
    """`repeats` equal units on one device: seconds of each."""

    repeats: int
    kept: int
    """Of them, gathered in forward and still there in backward."""
    forward: float
    backward: float
    gather: float = 0.0
    reduce: float = 0.0
    queued: float = 0.0
    """What goes on since the last step, and must be over before this unit's forward."""


def waits_in_forward(lanes: Iterable[Lane]) -> float:
    """
    >>> waits_in_forward([Lane(3, 0, forward=1.0, backward=2.0, gather=1.5)])
    2.5
    """
    waited = hides = 0.0
    for lane in lanes:
        waited += max(0.0, lane.gather - hides) + (lane.repeats - 1) * max(0.0, lane.gather - lane.forward)
        hides = lane.forward
    return waited


def waits_in_backward(lanes: Iterable[Lane]) -> float:
    """
    >>> waits_in_backward([Lane(3, 1, forward=1.0, backward=2.0, gather=1.5, reduce=1.0)])
    1.5
    """
    waited = 0.0
    for number, lane in enumerate(lanes):
        last = 1 if number == 0 else 0  # the first unit of all is reduced when nothing computes any more
        both = max(0, lane.repeats - lane.kept - last)
        waited += both * max(0.0, lane.gather + lane.reduce - lane.backward)
        waited += (lane.repeats - both - last) * max(0.0, lane.reduce - lane.backward)
        if last:
            waited += lane.reduce + (max(0.0, lane.gather - lane.backward) if lane.kept < lane.repeats else 0.0)
    return waited


def waits_for_queue(lanes: Iterable[Lane]) -> float:
    """How much longer a forward takes because units are not there before their turn in the queue.

    >>> waits_for_queue([Lane(4, 0, forward=1.0, backward=2.0, queued=0.5)])
    0.5
    >>> waits_for_queue([Lane(4, 0, forward=1.0, backward=2.0, queued=2.0)])
    5.0
    """
    queue = now = alone = 0.0
    for lane in lanes:
        every = lane.repeats * lane.forward
        # Of equal units either all but the first come in time, or each waits for the queue.
        now = max(now + every, queue + lane.queued + every, queue + lane.repeats * lane.queued + lane.forward)
        queue += lane.repeats * lane.queued
        alone += every
    return max(0.0, now - alone)
