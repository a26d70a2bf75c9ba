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
    stored: float = 0.0
    """What it keeps for backward goes off the device, the other way than what is fetched."""
    fetched: float = 0.0
    """And comes back before its backward, whether the unit itself is still there or not."""


def waits_in_forward(lanes: Iterable[Lane]) -> float:
    """
    >>> waits_in_forward([Lane(3, 0, forward=1.0, backward=2.0, gather=1.5)])
    2.5
    >>> waits_in_forward([Lane(3, 0, forward=1.0, backward=2.0, gather=0.5, stored=1.5)])
    1.5
    """
    waited = hides = 0.0
    for lane in lanes:
        late = lane.stored - lane.forward  # two blocks' are on the device at most: each must be gone before the next
        waited += max(0.0, lane.gather - hides, late)
        waited += (lane.repeats - 1) * max(0.0, lane.gather - lane.forward, late)
        hides = lane.forward
    return waited


def waits_in_backward(lanes: Iterable[Lane]) -> float:
    """
    >>> waits_in_backward([Lane(3, 1, forward=1.0, backward=2.0, gather=1.5, reduce=1.0)])
    1.5
    >>> waits_in_backward([Lane(1, 1, 1.0, 2.0), Lane(3, 3, forward=1.0, backward=2.0, fetched=2.5)])
    1.5
    """
    waited = 0.0
    for number, lane in enumerate(lanes):
        last = 1 if number == 0 else 0  # the first unit of all is reduced when nothing computes any more
        both = max(0, lane.repeats - lane.kept - last)
        waited += both * max(0.0, lane.gather + lane.fetched + lane.reduce - lane.backward)
        waited += (lane.repeats - both - last) * max(0.0, lane.fetched + lane.reduce - lane.backward)
        if last:
            comes = lane.fetched + (lane.gather if lane.kept < lane.repeats else 0.0)
            waited += lane.reduce + max(0.0, comes - lane.backward)
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
