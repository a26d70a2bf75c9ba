"""Where the groups of a plan are on the wires of a machine."""

from __future__ import annotations

from zerofold.plan.machine import Machine
from zerofold.plan.mesh import Mesh
from zerofold.plan.wires import Span, Wires


def wires_of(machine: Machine) -> Wires:
    """Messages in trees: NCCL has them for all-reduces and, since 2.23, for the others too. A ring over 100,000 ranks
    would wait a second for its latencies alone."""
    return Wires(inside=machine.inside, across=machine.across, per_node=machine.per_node, steps="tree")


def span_of(ranks: int, local: int) -> Span:
    """Of a group with `local` ranks in each node that it reaches.

    >>> span_of(16, 8), span_of(4, 8)
    (Span(ranks=16, nodes=2), Span(ranks=4, nodes=1))
    """
    return Span(ranks, -(-ranks // max(1, min(ranks, local))))


def send_seconds(nbytes: float, mesh: Mesh, machine: Machine) -> float:
    """To the next stage of a pipeline, which is in another node unless the whole pipeline is in one."""
    link = machine.inside if machine.devices <= machine.per_node else machine.across
    return link.latency + nbytes / link.rate if mesh.pipeline > 1 else 0.0


def tensor_span(mesh: Mesh, machine: Machine) -> Span:
    return span_of(mesh.tensor, machine.per_node)


def data_span(mesh: Mesh) -> Span:
    """All data-parallel ranks."""
    return span_of(mesh.data, mesh.local)


def inside_span(mesh: Mesh) -> Span:
    """A group of hsdp or hpz: neighbours."""
    return span_of(mesh.inside, mesh.local)


def across_span(mesh: Mesh) -> Span:
    """One rank of every group."""
    return span_of(mesh.groups, max(1, mesh.local // mesh.inside))
