"""What a run knows of itself besides model and optimizer. It goes into every checkpoint."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any

REPORT_EVERY = 10  # steps; the loss and the speed shown are means over as many


@dataclass
class RunState:
    step: int = 0
    seconds: float = 0.0
    """Spent on the run so far, in all its parts, by rank 0's clock."""
    first_loss: float = math.nan
    losses: list[float] = field(default_factory=list)
    """Of the last steps, so that a mean over them is the same after a resume."""
    validation_loss: float | None = None
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes sent by rank 0 before this part of the run, by operation."""

    def add_loss(self, loss: float) -> None:
        if self.step == 1:
            self.first_loss = loss
        self.losses = [*self.losses, loss][-REPORT_EVERY:]

    @property
    def loss(self) -> float:
        return fmean(self.losses)

    def sent_with(self, since: dict[str, int]) -> dict[str, int]:
        return {name: self.sent.get(name, 0) + since.get(name, 0) for name in {**self.sent, **since}}

    def saved(self, sent_since: dict[str, int]) -> dict[str, Any]:
        return {**asdict(self), "sent": self.sent_with(sent_since)}
