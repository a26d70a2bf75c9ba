"""How long a collective takes on the links of a machine.

The model, for M nodes with P ranks of the group in each, and n bytes gathered or reduced in all:

    inside the nodes    (P−1) steps of a ring        n (P−1)/P bytes of each rank
    across them         ⌈log₂ M⌉ steps               (n/P)(M−1)/M bytes of each rank: P rails side by side

Both stages are cut into chunks that follow each other, so the slower one counts, and the latencies of both. Across
nodes NCCL takes trees and, for gathers and reduce-scatters, the parallel aggregated trees of NCCL 2.23, so the steps
grow with the logarithm: a ring over 100,000 ranks would wait a second for its latencies alone. What is not in the
model: congestion, and links that are shared with anybody else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from zerofold.plan.machine import Link, Machine
from zerofold.plan.mesh import Mesh


@dataclass(frozen=True)
class Span:
    """Where the ranks of a group are: so many in a node, in so many nodes."""

    local: int
    nodes: int

    @staticmethod
    def of(ranks: int, local: int) -> Span:
        """
        >>> Span.of(16, 8), Span.of(4, 8)
        (Span(local=8, nodes=2), Span(local=4, nodes=1))
        """
        here = max(1, min(ranks, local))
        return Span(here, -(-ranks // here))

    @property
    def ranks(self) -> int:
        return self.local * self.nodes


class Links(Protocol):
    """Of each device: to the others of its node, and to other nodes."""

    @property
    def inside(self) -> Link: ...
    @property
    def across(self) -> Link: ...


def seconds(collective: str, nbytes: float, span: Span, machine: Links) -> float:
    """Of one call. `nbytes` is the whole: what each rank has after a gather or before a reduction.

    >>> from zerofold.plan.machine import Link
    >>> machine = Machine(name="m", device_memory=0, host_memory=0, flops=1, flops_fp32=1, memory_rate=1, host_update=1,
    ...                   inside=Link(rate=100e9), across=Link(rate=10e9), to_host=Link(rate=1))
    >>> seconds("all_gather", 8e9, Span(8, 1), machine), seconds("all_gather", 8e9, Span(8, 2), machine)
    (0.07, 0.07)
    >>> seconds("all_reduce", 8e9, Span(1, 4), machine)
    1.2
    """
    if span.ranks == 1:
        return 0.0
    if collective == "all_reduce":  # its two halves
        return 2 * seconds("reduce_scatter", nbytes, span, machine)
    inside = nbytes * (span.local - 1) / span.local / machine.inside.rate
    across = nbytes / span.local * (span.nodes - 1) / span.nodes / machine.across.rate
    waits = (span.local - 1) * machine.inside.latency + math.ceil(math.log2(span.nodes)) * machine.across.latency
    return max(inside, across) + waits


def send_seconds(nbytes: float, mesh: Mesh, machine: Machine) -> float:
    """To the next stage of a pipeline, which is in another node unless the whole pipeline is in one."""
    link = machine.inside if machine.devices <= machine.per_node else machine.across
    return link.latency + nbytes / link.rate if mesh.pipeline > 1 else 0.0


def tensor_span(mesh: Mesh, machine: Machine) -> Span:
    return Span.of(mesh.tensor, machine.per_node)


def data_span(mesh: Mesh) -> Span:
    """All data-parallel ranks."""
    return Span.of(mesh.data, mesh.local)


def inside_span(mesh: Mesh) -> Span:
    """A group of hsdp or hpz: neighbours."""
    return Span.of(mesh.inside, mesh.local)


def across_span(mesh: Mesh) -> Span:
    """One rank of every group."""
    return Span.of(mesh.groups, max(1, mesh.local // mesh.inside))
