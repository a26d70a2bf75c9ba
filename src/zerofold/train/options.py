"""What a training run is told, checked before any process starts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from zerofold.placement import row
from zerofold.precision import policy_of
from zerofold.train.gpt import GPTConfig

DEFAULT_STEPS = 300
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    out: Path
    """The run folder: config.json and metrics.jsonl."""
    gpt: GPTConfig = field(default_factory=GPTConfig)
    stage: int = 3
    precision: str = "fp32"
    """fp32, tf32, bf16 or fp16."""
    steps: int | None = None
    """Stop after so many optimizer steps. With neither this nor `minutes`: 300."""
    minutes: float | None = None
    """Stop after so much time. With both, whichever comes first."""
    batch: int = 8
    """Sequences per rank and step."""
    lr: float = 3e-3
    seed: int = 0
    plain: bool = False
    """Lines instead of a progress bar."""
    validate_every: int = 50
    sample_bytes: int = 160
    """Length of the text written at the end."""

    def __post_init__(self) -> None:
        row(self.stage)
        policy_of(self.precision)
        for name in ("batch", "validate_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}: give at least 1, or minutes instead")
        for name in ("minutes", "lr"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}: give a number above 0")
        if self.seed < 0:
            raise ValueError(f"seed is {self.seed}: give 0 or more")
        if (self.out / METRICS_FILE).exists():
            raise ValueError(f"{self.out} already holds a run: name another folder with --out")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file: name a folder with --out")

    @property
    def step_limit(self) -> int | None:
        if self.steps is None and self.minutes is None:
            return DEFAULT_STEPS
        return self.steps

    def progress(self, steps: int, seconds: float) -> float:
        """How much of the run is done, from 0 to 1, by steps or by time."""
        by_steps = steps / self.step_limit if self.step_limit else 0.0
        by_time = seconds / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))
