"""What a config comes to: everything the engine needs, typed, with no "auto" left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from zerofold.config.batch import TRAIN, Batch
from zerofold.config.errors import shown
from zerofold.config.keys import Note
from zerofold.config.kinds import AUTO
from zerofold.precision import Precision


@dataclass(frozen=True)
class Component:
    """An optimizer or a scheduler: its name in the config, and its parameters with every "auto" replaced."""

    type: str
    params: dict[str, Any]


@dataclass(frozen=True)
class FileMonitor:
    """Numbers written to output_path/job_name; `kind` is "tensorboard" or "csv_monitor"."""

    kind: str
    output_path: str
    job_name: str


@dataclass(frozen=True)
class WandbMonitor:
    project: str
    group: str | None
    team: str | None
    kind: str = "wandb"


@dataclass(frozen=True)
class FlopsProfiler:
    profile_step: int
    module_depth: int
    top_modules: int
    detailed: bool
    output_file: str | None


@dataclass(frozen=True)
class CommsLogger:
    verbose: bool
    operations: tuple[str, ...]
    """Those to be shown; empty for all."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A config resolved for one model, one device and a number of ranks.

    >>> import torch
    >>> from zerofold.config import resolve
    >>> config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}
    >>> settings = resolve(config, world=2, device=torch.device("cpu"))
    >>> settings.stage, settings.micro_batch, settings.clip
    (2, 4, 1.0)
    >>> print(*settings.table(), sep=chr(10))
    train_batch_size 8 = 4 per rank x 1 accumulated x 2 ranks
    gradient_clipping: auto -> 1.0, what Hugging Face's Trainer uses
    """

    stage: int | str
    """0 to 3, "hpz" or "hsdp"."""
    group: int | None
    """Ranks in a group, for hpz and hsdp."""
    precision: Precision | None
    autocast: torch.dtype | None
    """Of torch.autocast around the engine's forward; None for none."""
    train_batch: int
    micro_batch: int
    accumulate: int
    managed_accumulation: bool
    """False: every step() is a boundary, whatever `accumulate` says."""
    clip: float | None
    optimizer: Component | None
    scheduler: Component | None
    offload: Mapping[str, Any]
    """As offload= of zf.shard takes it; empty where all states stay on the device."""
    buffer_bytes: int
    overlap: bool
    activation_checkpointing: Mapping[str, Any]
    gather_16bit_on_save: bool
    tag_validation: str
    """ "Ignore", "Warn" or "Fail" where the ranks name a checkpoint differently."""
    dataloader_drop_last: bool
    monitors: tuple[FileMonitor | WandbMonitor, ...]
    steps_per_print: int | None
    wall_clock_breakdown: bool
    memory_breakdown: bool
    throughput: bool
    dump_state: bool
    flops_profiler: FlopsProfiler | None
    comms_logger: CommsLogger | None
    device_type: str
    world: int
    notes: list[Note] = field(default_factory=list)
    """What was mapped, and what every "auto" became."""
    resolved: dict[str, Any] = field(default_factory=dict)
    """The config as it was given, with every "auto" replaced and the batch numbers filled in."""

    def table(self) -> list[str]:
        """Lines to print once: the batch arithmetic, then what "auto" became and what has another form here."""
        lines = [Batch(self.train_batch, self.micro_batch, self.accumulate).line(self.world)]
        honoured = [note for note in self.notes if note.fate == "honoured" and note.key != TRAIN]
        lines += [f"{note.key}: {_given(note)}{note.text}" for note in honoured]
        by_text: dict[str, list[Note]] = {}
        for note in self.notes:
            if note.fate == "mapped":
                by_text.setdefault(note.text, []).append(note)
        return lines + [f"{_keys(notes)}: {text}" for text, notes in by_text.items()]


def _given(note: Note) -> str:
    return f"{AUTO} -> " if note.value == AUTO else f"{shown(note.value)}, " if note.value is not None else ""


def _keys(notes: list[Note]) -> str:
    """Several keys of one section share its name: "zero_optimization: a 1, b 2"."""
    sections = {note.key.rpartition(".")[0] for note in notes}
    if len(notes) == 1 or sections == {""} or len(sections) > 1:
        return ", ".join(f"{note.key} {shown(note.value)}" for note in notes)
    names = ", ".join(f"{note.key.rpartition('.')[2]} {shown(note.value)}" for note in notes)
    return f"{sections.pop()} ({names})"
