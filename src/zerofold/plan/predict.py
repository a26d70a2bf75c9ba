"""Memory, traffic and time of one point, and whether it fits."""

from __future__ import annotations

from zerofold.plan.away import node_ranks
from zerofold.plan.ground import Ground
from zerofold.plan.machine import GB, Machine
from zerofold.plan.memory import memory as memory_of
from zerofold.plan.mesh import mesh_of
from zerofold.plan.point import Memory, Point, Prediction
from zerofold.plan.shape import ModelShape
from zerofold.plan.times import times
from zerofold.plan.traffic import traffic


def predict(
    model: ModelShape,
    machine: Machine,
    point: Point,
    *,
    memory: Memory | None = None,
    ground: Ground | None = None,
) -> Prediction:
    """What training takes at this point. `memory` and `ground`, for whoever has them already.

    >>> from zerofold.plan.presets import preset
    >>> from zerofold.plan.transformer import from_parameters
    >>> found = predict(from_parameters(70e9), preset("H100", devices=8), Point(stage="3", checkpoint_every=1))
    >>> found.fits, found.lacks
    (False, 'device memory: 151.9 GB needed, 82.5 there')
    """
    found = memory if memory is not None else memory_of(model, machine, point)
    sent = traffic(model, machine, point)
    spent = times(model, machine, point, found, sent, ground=ground)
    missing = lacks(found, machine)
    samples = point.samples * mesh_of(machine, point).data
    return Prediction(
        point=point,
        memory=found,
        traffic=sent,
        times=spent,
        fits=not missing,
        lacks=missing,
        samples_per_second=samples / spent.step if spent.step else 0.0,
    )


def lacks(memory: Memory, machine: Machine) -> str:
    """Which memories are too small, and by how much; nothing where all fits. A node's ranks share its host and disk.

    >>> from zerofold.plan.machine import Link
    >>> link = Link(rate=1)
    >>> machine = Machine(name="m", devices=2, device_memory=80 * GB, host_memory=100 * GB, flops=1, flops_fp32=1,
    ...                   memory_rate=1, inside=link, across=link, to_host=link, host_update=1)
    >>> lacks(Memory(device={}, device_peak=90 * GB), machine)
    'device memory: 90.0 GB needed, 80.0 there'
    >>> lacks(Memory(device={}, host={"optimizer": 60 * GB}), machine)
    'host memory of a node: 120.0 GB needed, 100.0 there'
    """
    ranks = node_ranks(machine)
    on_device, on_host = memory.device_need, ranks * sum(memory.host.values())
    if machine.kind == "cpu":  # one memory
        on_host += ranks * on_device
    wanted = (
        ("device memory", on_device, machine.device_memory),
        ("host memory of a node", on_host, machine.host_memory),
        ("disk of a node", ranks * sum(memory.disk.values()), machine.disk),
    )
    return "; ".join(
        f"{name}: {needed / GB:.1f} GB needed, {there / GB:.1f} there"
        for name, needed, there in wanted
        if needed > there
    )
