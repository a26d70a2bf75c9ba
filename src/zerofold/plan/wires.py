"""The wires between the ranks of a simulation: arithmetic alone, and the same as the plan's (`plan.collectives`).

What is added to it: where the ranks of a group are, rings across nodes, and the all-to-all.

    ring   (M - 1) steps across M nodes, which is what NCCL's rings take; the plan's own trees take ⌈log2 M⌉
    all-to-all of n bytes a rank, P in a node      inside n (P - 1) / PM, across n (M - 1) / M, over its own links
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from zerofold.plan.collectives import Span, seconds
from zerofold.plan.machine import Link

STEPS = ("tree", "ring")


def span_of(ranks: Sequence[int], *, per_node: int) -> Span:
    """Where the ranks of a group are.

    >>> span_of(range(16), per_node=8), span_of(range(0, 64, 8), per_node=8)
    (Span(local=8, nodes=2), Span(local=1, nodes=8))
    """
    if ranks[-1] - ranks[0] == len(ranks) - 1:  # neighbours: no list of 100,000 has to be looked through
        nodes = ranks[-1] // per_node - ranks[0] // per_node + 1
    else:
        nodes = len({rank // per_node for rank in ranks})
    return Span(-(-len(ranks) // nodes), nodes)


def axis_of(span: Span) -> str:
    """The slowest way that messages of such a group take."""
    return "inside" if span.nodes == 1 else "across"


@dataclass(frozen=True, kw_only=True)
class Wires:
    """The links of every device, and how messages go over them.

    >>> wires = Wires(inside=Link(rate=400e9), across=Link(rate=50e9), per_node=8)
    >>> wires.seconds("all_gather", 8e9, Span(local=8, nodes=1))  # 7 GB into each device
    0.0175
    >>> wires.seconds("all_gather", 8e9, Span(local=8, nodes=16))  # 7.5 GB into each node, over 8 links
    0.01875
    """

    inside: Link
    across: Link
    per_node: int = 8
    steps: str = "tree"

    def __post_init__(self) -> None:
        for name, link in (("inside", self.inside), ("across", self.across)):
            if not link.rate > 0 or not link.latency >= 0:
                raise ValueError(f"{name}: rate {link.rate} must be positive and latency {link.latency} at least 0")
        if self.per_node < 1:
            raise ValueError(f"per_node={self.per_node} must be at least 1")
        if self.steps not in STEPS:
            raise ValueError(f"steps={self.steps!r} must be one of {', '.join(STEPS)}")

    def span(self, ranks: Sequence[int]) -> Span:
        return span_of(ranks, per_node=self.per_node)

    def seconds(self, operation: str, nbytes: float, span: Span) -> float:
        """`nbytes`: of the whole tensor; for an all-to-all, of what one rank sends."""
        if span.ranks == 1:
            return 0.0
        rounds = 2 if operation == "all_reduce" else 1
        more = (span.nodes - 1 - math.ceil(math.log2(span.nodes))) * self.across.latency if self.steps == "ring" else 0
        if operation != "all_to_all":
            return seconds(operation, nbytes, span, self) + rounds * more
        inside = nbytes * (span.local - 1) / span.ranks / self.inside.rate
        across = nbytes * (span.nodes - 1) / span.nodes / self.across.rate
        return max(inside, across) + seconds(operation, 0, span, self) + more


def free(per_node: int = 8) -> Wires:
    """Wires on which everything is there at once: what is left of a step is not communication.

    >>> free().seconds("all_reduce", 1e12, Span(local=8, nodes=128))
    0.0
    """
    nothing = Link(rate=math.inf)
    return Wires(inside=nothing, across=nothing, per_node=per_node)
