"""Time and peaks of one model while it trains, from the tape that its engine writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch

from zerofold.engine import Engine
from zerofold.observe.states import Totals, totals
from zerofold.placement import Tier
from zerofold.schedule import in_backward
from zerofold.timing import Tape
from zerofold.unit import Unit

_LOOKED_FIRST, _LOOKED_AT, _LOOKED_EVERY = 4, (0, 16, 32), 64
STATES = ("parameters", "gradients", "optimizer", "gathered", "cached", "buffers", "other")

_TEMPORARY = ("gathered", "cached", "buffers")


class CommRow(NamedTuple):
    """What one collective has sent in a step, on the average, to one group of ranks."""

    operation: str
    group: str
    calls: float
    nbytes: float


class _Gradients(NamedTuple):
    """Of one unit, in bytes."""

    everywhere: int = 0
    states: int = 0
    """Of slabs whose gradients are on the device, local sums among them."""
    passing: int = 0
    """On the device, of slabs whose gradients are elsewhere."""
    sums: int = 0
    """Of the states: what this rank alone has added up so far."""
    passing_sums: int = 0


class Recording:
    """Begins when it is made; `stop` ends it, and what it has seen stays."""

    def __init__(self, engine: Engine, *, trace: bool, keep: int) -> None:
        if engine.clock.tape is not None:
            raise RuntimeError("this model is being recorded already: stop that recording first")
        self._engine = engine
        self.steps = 0
        """Optimizer steps since it began; the times of the last one may not be known yet."""
        self.peaks = dict.fromkeys(STATES, 0)
        self.unit_peaks: dict[str, int] = {}
        """Of gradients, by unit."""
        self.step_gradients = 0
        """Bytes of gradients on the device when an optimizer has stepped: those it steps by, with none on their way."""
        self.device_gradients = 0
        """The most of them at any time."""
        self.sums, self.passing_sums = 0, 0
        """The most that local sums took between two micro-batches, or before a pipeline's reduction: of slabs whose
        gradients are on the device, and of others."""
        self.device_peak = 0
        self.tier_peaks: dict[str, dict[str, int]] = {}
        self._gradients: dict[int, _Gradients] = {}
        self._sums = _Gradients()
        self._totals_of: object = None
        self._totals = Totals(0, 0, 0, 0)
        self._sent, self._calls = dict(engine.traffic.sent), dict(engine.traffic.counts)
        self._keep = keep
        self.tape = Tape(engine.device, traces=trace, keep=keep)
        self.tape.sample, self.tape.after_step = self._sample, self._after_step
        self.tape.take_sample()
        engine.clock.tape, engine.recording = self.tape, self

    def stop(self) -> None:
        """Ends it. A second time does nothing."""
        if self._engine.clock.tape is self.tape:
            self._engine.clock.tape = None
            if self._engine.device.type == "cuda":
                torch.cuda.synchronize(self._engine.device)
            self.tape.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """What is inside is no part of a step, neither its time nor what it sends: an evaluation, a checkpoint."""
        traffic = self._engine.traffic
        sent, calls = dict(traffic.sent), dict(traffic.counts)
        with self.tape.paused():
            yield
        for key, nbytes in traffic.sent.items():
            self._sent[key] = self._sent.get(key, 0.0) + nbytes - sent.get(key, 0.0)
            self._calls[key] = self._calls.get(key, 0) + traffic.counts[key] - calls.get(key, 0)

    def time(self) -> dict[str, float]:
        """Seconds of the mean step by what they were spent on, and all together as "step"."""
        return mean_step(self.tape.seconds, self.tape.steps)

    def comm(self) -> list[CommRow]:
        traffic, steps = self._engine.traffic, max(1, self.steps)
        return [
            CommRow(
                operation,
                group,
                (traffic.counts[operation, group] - self._calls.get((operation, group), 0)) / steps,
                (sent - self._sent.get((operation, group), 0.0)) / steps,
            )
            for (operation, group), sent in list(traffic.sent.items())
            if traffic.counts[operation, group] > self._calls.get((operation, group), 0)
        ]

    def peak_bytes(self) -> dict[str, int]:
        """By memory. On the CPU the device's is what the states and buffers took together, activations not counted."""
        found = {Tier.DEVICE.value: self.device_peak}
        if self._engine.device.type == "cuda":
            found[Tier.DEVICE.value] = torch.cuda.max_memory_allocated(self._engine.device)
        return found | {tier: sum(states.values()) for tier, states in self.tier_peaks.items() if states}

    def _after_step(self) -> None:
        self.steps += 1
        if self.tape.looks:  # what the update has made counts, be it shown or not
            self._sample(None)
        self.tape.looks = is_looked_at(self.steps + 1, keep=self._keep)
        self.tape.take_sample()
        self.step_gradients = max(self.step_gradients, self._sums.states)
        memory = self._engine.offloading.memory
        for tier in (Tier.HOST, Tier.NVME) if self._engine.is_offloaded else ():
            peaks = self.tier_peaks.setdefault(tier.value, {})
            for state, nbytes in memory.bytes_by_state(tier).items():
                peaks[state] = max(nbytes, peaks.get(state, 0))

    def _sample(self, unit: Unit | None) -> dict[str, int]:
        """Only the unit that something has happened to is looked at anew, so that this costs little in large models.
        All are where a forward begins or ends: what is there then of other backwards are sums, and no gradient that is
        on its way."""
        engine = self._engine
        is_between = unit is engine.schedule.root and not in_backward()
        for each in engine.units if unit is None or is_between else (unit,):
            before, now = self._gradients.get(each.index, _Gradients()), _gradients_of(each)
            if now != before:
                self._gradients[each.index] = now
                self._sums = _Gradients(*(s + n - b for s, n, b in zip(self._sums, now, before, strict=True)))
                self.unit_peaks[each.name] = max(now.everywhere, self.unit_peaks.get(each.name, 0))
        if is_between or (unit is None and engine.pipeline is not None):
            self.sums = max(self.sums, self._sums.sums)
            self.passing_sums = max(self.passing_sums, self._sums.passing_sums)
        known = sum(len(optimizer.state) for optimizer in engine.optimizers), engine.changes.count
        if known != self._totals_of:
            self._totals_of, self._totals = known, totals(engine)
        found = {
            "parameters": self._totals.parameters,
            "gradients": self._sums.everywhere,
            "optimizer": self._totals.optimizer,
            "gathered": engine.schedule.live,
            "cached": engine.cache.nbytes,  # of units that have been released, for the next ones
            "buffers": engine.pool.nbytes,
            "other": 0,
        }
        gradients = self._sums.states + self._sums.passing
        held = self._totals.on_device + gradients + sum(found[name] for name in _TEMPORARY)
        if engine.device.type == "cuda":
            stats = torch.cuda.memory.memory_stats_as_nested_dict(engine.device)
            allocated = stats["allocated_bytes"]["all"]["current"] if stats else 0
            found["other"] = max(0, allocated - held)
        self.device_gradients = max(self.device_gradients, self._sums.states)
        self.device_peak = max(self.device_peak, held + found["other"])
        for state, nbytes in found.items():
            self.peaks[state] = max(self.peaks[state], nbytes)
        return found


def is_looked_at(step: int, *, keep: int) -> bool:
    """Whether memory is looked at in it, so that a timeline can show it: one step is like the other, and looking takes
    as long as launching many kernels. Steps from 1, as many in a row as a timeline shows.

    >>> [step for step in range(1, 140) if is_looked_at(step, keep=2)]
    [1, 2, 3, 4, 16, 17, 32, 33, 64, 65, 128, 129]
    """
    begun = step - step % _LOOKED_EVERY if step >= _LOOKED_EVERY else max(at for at in _LOOKED_AT if at <= step)
    return step <= _LOOKED_FIRST or step - begun < max(1, keep)


def _gradients_of(unit: Unit) -> _Gradients:
    everywhere = states = passing = sums = passing_sums = 0
    for slab in unit.slabs:
        gradients = slab.gradients
        everywhere += gradients.nbytes
        if slab.tiers.gradients is Tier.DEVICE:
            states += gradients.device_nbytes
            sums += gradients.local_nbytes
        else:
            passing += gradients.device_nbytes
            passing_sums += gradients.local_nbytes
    return _Gradients(everywhere, states, passing, sums, passing_sums)


def mean_step(seconds: dict[str, float], steps: int) -> dict[str, float]:
    """
    >>> mean_step({"compute": 3.0, "gather": 1.0}, 2)
    {'compute': 1.5, 'gather': 0.5, 'step': 2.0}
    """
    each: dict[str, Any] = {category: spent / max(1, steps) for category, spent in seconds.items()}
    return {**each, "step": sum(each.values())}
