"""How long a collective takes on the wires between devices: arithmetic alone.

A group of N ranks on n nodes, g = N / n on each; every device has a link to its node's others and one to other nodes.

    bytes      all-gather, reduce-scatter of S bytes     inside   S (N - 1) / N  over one device's link
               (S: the whole tensor)                     across   S (n - 1) / n  over the node's g links together
               both at the same time: the slower counts; an all-reduce is both of them after each other
               all-to-all of S bytes a rank              inside   S (g - 1) / N, across  S (n - 1) / n, own links
    latency    ring   (g - 1) × inside + (n - 1) × across        a message goes round
               tree   ⌈log2 g⌉ × inside + ⌈log2 n⌉ × across      it is doubled at every step

NCCL's rings leave a node over all of its network cards, hence the g links together. It uses rings for all-gather and
reduce-scatter over several nodes, whose latency grows with the number of nodes; trees show what would be left of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zerofold.plan.machine import Link

STEPS = ("ring", "tree")
_ROUNDS = {"all_reduce": 2.0}  # every other collective moves its bytes once


class Span(NamedTuple):
    """Where the ranks of a group are: how many, on how many nodes.

    >>> Span.of(range(16), per_node=8), Span.of(range(0, 64, 8), per_node=8).axis
    (Span(ranks=16, nodes=2), 'across')
    """

    ranks: int
    nodes: int

    @classmethod
    def of(cls, ranks: Sequence[int], *, per_node: int) -> Span:
        if ranks[-1] - ranks[0] == len(ranks) - 1:  # neighbours: no list of 100,000 has to be looked through
            return cls(len(ranks), ranks[-1] // per_node - ranks[0] // per_node + 1)
        return cls(len(ranks), len({rank // per_node for rank in ranks}))

    @property
    def axis(self) -> str:
        """The slowest way its messages take."""
        return "inside" if self.nodes == 1 else "across"


@dataclass(frozen=True, kw_only=True)
class Wires:
    """The links of every device, and how messages go over them.

    >>> wires = Wires(inside=Link(rate=400e9), across=Link(rate=50e9), per_node=8)
    >>> wires.seconds("all_gather", 8e9, Span(ranks=8, nodes=1))  # 7 GB into each device
    0.0175
    >>> wires.seconds("all_gather", 8e9, Span(ranks=64, nodes=8))  # 7 GB into each node, over 8 links
    0.0196875
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
        return Span.of(ranks, per_node=self.per_node)

    def seconds(self, operation: str, nbytes: float, span: Span) -> float:
        """`nbytes`: of the whole tensor; for an all-to-all, of what one rank sends."""
        if span.ranks == 1:
            return 0.0
        inside, across = self._shares(operation, nbytes, span)
        moving = max(inside / self.inside.rate, across / self.across.rate)
        return _ROUNDS.get(operation, 1.0) * (self._latency(span) + moving)

    def _shares(self, operation: str, nbytes: float, span: Span) -> tuple[float, float]:
        """Bytes over one device's link inside its node, and over its link to others."""
        each = span.ranks / span.nodes
        leaving = nbytes * (span.nodes - 1) / span.nodes
        if operation == "all_to_all":
            return nbytes * (each - 1) / span.ranks, leaving
        return nbytes * (span.ranks - 1) / span.ranks if each > 1 else 0.0, leaving / each

    def _latency(self, span: Span) -> float:
        each = span.ranks / span.nodes
        if self.steps == "ring":
            return (each - 1) * self.inside.latency + (span.nodes - 1) * self.across.latency
        return math.ceil(math.log2(each)) * self.inside.latency + math.ceil(math.log2(span.nodes)) * self.across.latency


def free(per_node: int = 8) -> Wires:
    """Wires on which everything is there at once: what is left of a step is not communication.

    >>> free().seconds("all_reduce", 1e12, Span(ranks=1024, nodes=128))
    0.0
    """
    nothing = Link(rate=math.inf)
    return Wires(inside=nothing, across=nothing, per_node=per_node)
