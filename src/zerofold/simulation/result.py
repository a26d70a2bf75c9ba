"""What a simulated step took."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One step of one engine as rank 0 of `world`. Times are those of a step that has others like it around."""

    engine: str
    world: int
    nodes: int
    stage: str
    model: str
    parameters: int
    device: str
    clock: str
    """ "virtual": numbers added up; "real": time that passed."""
    batch: int
    """Samples of this rank."""
    step_seconds: float
    compute_seconds: float
    """Virtual: of kernels. Real: of a step on wires that take no time."""
    exposed_seconds: float
    """For which the device waits for messages."""
    exposed: dict[str, float]
    """The same by collective; empty where that cannot be told."""
    wire_seconds: dict[str, float]
    """For which the wires are occupied, by collective."""
    sent_bytes: dict[str, float]
    """By this rank, as a ring sends them."""
    peak_bytes: int | None = None
    """Of the device's memory; None where it was not counted."""
    state_bytes: dict[str, int] = field(default_factory=dict)
    """Of the parameters, gradients and optimizer states among them, after the step."""
    flops: float | None = None
    """Of matrix products, recomputation included."""
    device_memory: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def other_seconds(self) -> float:
        """Neither computing nor waiting for a message: the device has not been given its next kernel yet."""
        return max(0.0, self.step_seconds - self.compute_seconds - self.exposed_seconds)

    @property
    def overlap(self) -> float | None:
        """The part of the wires' time that is hidden behind computing; None where nothing is sent, as on one rank."""
        occupied = sum(self.wire_seconds.values())
        return None if occupied == 0 else max(0.0, 1 - self.exposed_seconds / occupied)

    @property
    def samples_per_second(self) -> float:
        """Of all ranks."""
        return self.world * self.batch / self.step_seconds

    @property
    def fits(self) -> bool | None:
        if self.peak_bytes is None or self.device_memory is None:
            return None
        return self.peak_bytes <= self.device_memory

    def to_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "other_seconds": self.other_seconds,
            "overlap": self.overlap,
            "samples_per_second": self.samples_per_second,
            "fits": self.fits,
        }
