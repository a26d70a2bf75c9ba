"""Runs a few steps of an engine in a modelled world, and reads off what one of them took."""

from __future__ import annotations

import statistics
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from zerofold.plan.machine import Machine
from zerofold.plan.wires import Wires, free
from zerofold.simulation.clocks import Clock, CudaClock, VirtualClock, WallClock
from zerofold.simulation.device import ModelledDevice
from zerofold.simulation.engines import ENGINES, Ready, Training
from zerofold.simulation.group import Network, modelled_world
from zerofold.simulation.result import Simulation

DEVICES = ("meta", "cpu", "cuda")
_NOTES = {
    ("fsdp2", "cpu"): "FSDP2 waits for every message at once on the CPU",
    ("fsdp2", "cuda"): "FSDP2 lets streams of its own wait, so which collective is exposed cannot be told",
}
_WINDOWS = 3  # of steps, with wires and without
_WARM = 2  # the first step makes the optimizer's states, the second is the first that knows the order of units


@dataclass(frozen=True, kw_only=True)
class World:
    """What is around rank 0."""

    size: int
    wires: Wires
    machine: Machine
    """What a device computes in which time; of no meaning where time really passes."""
    device: str = "meta"
    is_virtual: bool | None = None
    """By default on the meta device, where nothing else is possible."""

    @property
    def has_virtual_clock(self) -> bool:
        return self.device == "meta" if self.is_virtual is None else self.is_virtual


def simulate(training: Training, world: World, *, engine: str = "zerofold", steps: int = 3) -> Simulation:
    """A step of `training` as rank 0 of `world`. torch.distributed must not be initialised.

    >>> import torch, zerofold as zf
    >>> from zerofold.plan.machine import Link
    >>> from zerofold.plan.presets import preset
    >>> from zerofold.plan.wires import Wires
    >>> from zerofold.simulation import Training, World
    >>> build = lambda: torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    >>> loss = lambda model, device: model(torch.ones(8, 64, device=device)).sum()
    >>> training = Training(name="three layers", build=build, loss=loss, batch=8, units=torch.nn.Linear)
    >>> slow = Wires(inside=Link(rate=1e6), across=Link(rate=1e6))
    >>> found = zf.simulate(training, World(size=8, wires=slow, machine=preset("H200")))
    >>> found.exposed_seconds > 0.9 * found.step_seconds
    True
    """
    _check(training, world, engine, steps)
    device = torch.device(world.device, 0) if world.device == "cuda" else torch.device(world.device)
    clock = _clock(world, device)
    network = Network(world.wires, clock, device)
    modelled = ModelledDevice(world.machine, clock, device) if isinstance(clock, VirtualClock) else None
    with ExitStack() as stack:
        stack.enter_context(modelled_world(world.size, network))
        with torch.device("meta"):
            model = training.build()
        psi = sum(parameter.numel() for parameter in model.parameters())
        if modelled is not None:
            stack.enter_context(modelled)
            network.on_send.append(modelled.live.look)
        ready = ENGINES[engine](training, model, device, world.wires.per_node)
        for _ in range(_WARM):
            ready.step()
        found = _virtual(ready, modelled, network) if modelled is not None else _real(ready, network, device, steps)
        ready.close()
    return Simulation(
        engine=engine,
        world=world.size,
        nodes=world.wires.span(range(world.size)).nodes,
        stage=training.stage,
        model=training.name,
        parameters=psi,
        device=world.device,
        clock="real" if modelled is None else "virtual",
        batch=training.batch,
        device_memory=world.machine.device_memory if modelled is not None else None,
        step_seconds=found.step,
        compute_seconds=found.compute,
        exposed_seconds=found.exposed_total,
        exposed={} if (engine, world.device) == ("fsdp2", "cuda") else found.exposed,
        wire_seconds=found.wire,
        sent_bytes=found.sent,
        peak_bytes=found.peak,
        state_bytes=found.states,
        flops=found.flops,
        notes=tuple(note for key, note in _NOTES.items() if key == (engine, world.device)),
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    step: float
    compute: float
    exposed_total: float
    exposed: dict[str, float]
    wire: dict[str, float]
    sent: dict[str, float]
    peak: int | None
    states: dict[str, int]
    flops: float | None = None


def _virtual(ready: Ready, modelled: ModelledDevice, network: Network) -> _Found:
    """One step is enough: the next would be the same."""
    clock = modelled.clock
    network.forget()
    clock.forget()
    modelled.live.start_again()
    modelled.flops, begin = 0.0, clock.now()
    ready.step()
    took = clock.now() - begin
    modelled.live.look()
    return _Found(
        step=took,
        compute=clock.busy,
        exposed_total=sum(clock.exposed.values()),
        exposed=dict(clock.exposed),
        wire=dict(network.seconds),
        sent=dict(network.sent),
        peak=modelled.live.peak,
        states=ready.state_bytes(),
        flops=modelled.flops,
    )


def _real(ready: Ready, network: Network, device: torch.device, steps: int) -> _Found:
    """What is exposed is what steps on the same wires take longer than on wires that take no time."""
    clock, wires = network.clock, network.wires
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    took, alone = [], []
    for _ in range(_WINDOWS):  # turn by turn: a GPU that grows warm is slower
        network.wires = wires
        network.forget()
        clock.forget()
        took.append(_window(ready, clock, steps))
        exposed = {operation: waited / steps for operation, waited in clock.exposed.items()}
        wire = {operation: seconds / steps for operation, seconds in network.seconds.items()}
        sent = {operation: nbytes / steps for operation, nbytes in network.sent.items()}
        network.wires = free(wires.per_node)
        alone.append(_window(ready, clock, steps))
    network.wires = wires
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    with_wires, without = statistics.median(took), statistics.median(alone)
    return _Found(
        step=with_wires,
        compute=without,
        exposed_total=max(0.0, statistics.median(one - other for one, other in zip(took, alone, strict=True))),
        exposed=exposed,
        wire=wire,
        sent=sent,
        peak=peak,
        states=ready.state_bytes(),
    )


def _window(ready: Ready, clock: Clock, steps: int) -> float:
    """Seconds of a step, among several in a row: what a step leaves to the next one is not waited for in between."""
    begin = clock.now()
    for _ in range(steps):
        ready.step()
    return (clock.now() - begin) / steps


def _clock(world: World, device: torch.device) -> Clock:
    if world.has_virtual_clock:
        return VirtualClock()
    return CudaClock(device) if device.type == "cuda" else WallClock()


def _check(training: Training, world: World, engine: str, steps: int) -> None:
    if not isinstance(training, Training) or not isinstance(world, World):
        raise TypeError(
            f"zf.simulate(training, world) takes a zerofold.simulation Training and World, not a "
            f"{type(training).__name__} and a {type(world).__name__}"
        )
    if engine not in ENGINES:
        raise ValueError(f"there is no engine {engine!r}; the engines are {', '.join(ENGINES)}")
    if world.device not in DEVICES:
        raise ValueError(f"device={world.device!r} must be one of {', '.join(DEVICES)}")
    if world.device == "meta" and not world.has_virtual_clock:
        raise ValueError("on the meta device nothing is computed, so there is no real time: use a virtual clock")
    if world.device == "cuda" and world.has_virtual_clock:
        raise ValueError("a virtual clock does not follow a GPU's streams: use it on the meta device")
    if world.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device='cuda', but this machine has no GPU that torch can use; use the meta device")
    if world.size < 1 or training.batch < 1 or steps < 1:
        raise ValueError(f"size={world.size}, batch={training.batch}, steps={steps}: each must be at least 1")
