"""What the plan says of a run, line by line, beside what the ledger has measured of it."""

from __future__ import annotations

from typing import Any, NamedTuple

from zerofold.engine import Engine
from zerofold.observe.recording import Recording
from zerofold.placement import Tier

BYTES, SECONDS = "bytes", "seconds"


class Line(NamedTuple):
    """One number twice. `where` is a memory, or "time"."""

    line: str
    where: str
    unit: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """By how much the measured one is larger, as a part of what was predicted."""
        return None if self.measured is None or not self.predicted else self.measured / self.predicted - 1


def predictions(engine: Engine, recording: Recording, measured: dict[str, Any]) -> list[Line]:
    """`measured` is a snapshot of the ledger. States are compared at their peaks."""
    if engine.offloading.plan is not None:
        return _of_offload(engine, recording, measured)
    return _of_states(engine, recording)


def _of_offload(engine: Engine, recording: Recording, measured: dict[str, Any]) -> list[Line]:
    assert engine.offloading.plan is not None
    found = []
    for tier, states in engine.offloading.plan.predicted.items():
        for state, predicted in states.items():
            if predicted:
                held = measured["tier_bytes"][tier.value].get(state, 0)
                peak = recording.tier_peaks.get(tier.value, {}).get(state, held)
                found.append(Line(state, tier.value, BYTES, predicted, max(held, peak)))
    return found


def _of_states(engine: Engine, recording: Recording) -> list[Line]:
    """By the formulas of the ZeRO paper: bytes a parameter, over the ranks where a state is cut."""
    row, groups = engine.row, engine.groups
    ranks = groups.gather.size
    parameters = optimizer = 0.0
    for slab in engine.slabs():
        size, dtypes = sum(parameter.numel() for parameter in slab.parameters), slab.dtypes
        part = 1 / ranks if row.parameters.is_cut else 1.0
        if not dtypes.has_master:
            parameters += size * dtypes.compute.itemsize * part
        elif not row.parameters.is_cut and ranks > 1:
            parameters += size * dtypes.compute.itemsize
        if slab.requires_grad:
            kept = size / ranks if row.optimizer.is_cut else size
            optimizer += kept * (dtypes.master.itemsize if dtypes.has_master else 0)
            optimizer += kept * _moments(engine) * engine.precision.moments.itemsize
    lines = {"parameters": parameters, "optimizer": optimizer}
    return [
        Line(state, Tier.DEVICE.value, BYTES, round(predicted), recording.peaks[state])
        for state, predicted in lines.items()
        if predicted
    ]


def _moments(engine: Engine) -> int:
    """Numbers that the optimizer keeps for each parameter."""
    settings = engine.optimizers[0].defaults if engine.optimizers else {}
    return 2 if "betas" in settings else int(bool(settings.get("momentum")))
