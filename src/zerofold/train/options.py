"""What a training run is told, checked before any process starts."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerofold.activation.automatic import AUTO
from zerofold.checkpoint.manifest import candidates
from zerofold.observe.run import check_writers
from zerofold.observe.run_files import CONFIG_FILE, METRICS_FILE
from zerofold.offload.wishes import read_offload
from zerofold.placement import ROWS, Tier, row
from zerofold.precision import policy_of
from zerofold.samples import Shares, share
from zerofold.train.gpt import GPTConfig
from zerofold.train.spread import Degrees, filled

DEFAULT_STEPS = 300
DEFAULT_BATCH = 8
CHECKPOINTS = "checkpoints"

# What may be another when a run goes on; anything else would make it another run.
CHANGEABLE = frozenset(
    {
        "out",
        "resume",
        "stage",
        "offload",
        "offload_path",
        "checkpoint_every",
        "keep",
        "tensor",
        "pipeline",
        "data",
        "group",
        "precision",
        "steps",
        "minutes",
        "batch",
        "accumulate",
        "save_every",
        "plain",
        "csv",
        "tensorboard",
        "prometheus",
        "wandb",
    }
)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    out: Path
    """The run folder: config.json, metrics.jsonl, ledger.json, timeline.json and checkpoints."""
    resume: bool = False
    """Go on from the last whole checkpoint in `out`; begin where there is none."""
    gpt: GPTConfig = field(default_factory=GPTConfig)
    stage: int | str = 3
    """A row of the table in `zerofold.placement`, as zf.prepare takes it."""
    precision: str = "fp32"
    """fp32, tf32, bf16 or fp16."""
    offload: str | None = None
    """host, nvme, auto, or the part of the optimizer's states that goes to the host, from 0 to 1."""
    offload_path: str | None = None
    """The folder for what goes to the disk."""
    checkpoint_every: int = 0
    """Blocks that are computed again in backward from one kept input; 0: everything is kept."""
    keep: str = AUTO
    """Where those inputs wait: device, host, or nvme, a file in `offload_path`; auto: wherever there is room."""
    tensor: int = 1
    """Ranks that share the inside of every layer."""
    pipeline: int = 1
    """Ranks that follow each other, each with some of the blocks; `accumulate` are its micro-batches."""
    data: int | None = None
    """Ranks with other sequences; those that are left."""
    group: int | None = None
    """Ranks in a group, where the stage has groups: by default those of a machine."""
    steps: int | None = None
    """Stop after so many optimizer steps. With neither this nor `minutes`: 300."""
    minutes: float | None = None
    """Stop after so much time. With both, whichever comes first."""
    batch: int | None = None
    """Sequences at a time on a rank."""
    accumulate: int | None = None
    """Batches of a rank that make a step."""
    global_batch: int | None = None
    """Sequences in a step, of all ranks: their batches times `accumulate`. Two of the three give the third."""
    at_once: int | None = None
    """Where only `global_batch` is given: the most sequences at a time on a rank; 8, or with keep="auto" as many as the
    plan says."""
    lr: float = 3e-3
    seed: int = 0
    plain: bool = False
    """Lines instead of a progress bar."""
    csv: bool = False
    tensorboard: bool = False
    prometheus: str | None = None
    """A file for node_exporter's textfile collector."""
    wandb: str | None = None
    """A project of Weights & Biases."""
    validate_every: int = 50
    save_every: int = 100
    """Steps from one checkpoint to the next; the last step has one too. 0: never."""
    sample_bytes: int = 160
    """Length of the text written at the end."""

    def __post_init__(self) -> None:
        if str(self.stage) not in ROWS:
            raise ValueError(f"--stage {self.stage} does not exist: choose one of {', '.join(ROWS)}")
        read_offload(self.offload_wish)
        policy_of(self.precision)
        check_writers(tensorboard=self.tensorboard, wandb=self.wandb)
        for name in ("batch", "accumulate", "global_batch", "validate_every"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least 1")
        if self.steps is not None and self.steps < 1:
            raise ValueError(f"steps is {self.steps}: give at least 1, or minutes instead")
        for name in ("minutes", "lr"):
            value = getattr(self, name)
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}: give a number above 0")
        self._check_checkpoints()
        self.degrees.check(self.gpt)
        for name in ("seed", "save_every", "checkpoint_every"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more")
        if (self.out / METRICS_FILE).exists() and not self.resume:
            raise ValueError(
                f"{self.out} already holds a run: --resume {self.out} goes on with it, --out names another folder"
            )
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"{self.out} is a file: name a folder with --out")

    def _check_checkpoints(self) -> None:
        tiers = [*(tier.value for tier in Tier), AUTO]
        if self.keep not in tiers:
            raise ValueError(f"--keep {self.keep} is not known: use {', '.join(tiers)}")
        if self.keep not in (Tier.DEVICE.value, AUTO) and not self.checkpoint_every:
            raise ValueError(f"--keep {self.keep} is about inputs of checkpointed blocks: add --checkpoint-every 1")
        if self.keep == Tier.NVME.value and self.offload_path is None:
            raise ValueError("--keep nvme needs a folder on the disk: add --offload-path DIR")

    @property
    def offload_wish(self) -> dict[str, Any] | None:
        """As offload= of zf.prepare takes it."""
        if self.offload is None:
            is_for_inputs = self.checkpoint_every and self.keep in (Tier.NVME.value, AUTO)
            if self.offload_path is not None and not is_for_inputs:
                raise ValueError(f"--offload-path {self.offload_path} says where, not what: add --offload nvme or auto")
            return None
        if self.offload == Tier.NVME.value and self.offload_path is None:
            raise ValueError("--offload nvme needs a folder on the disk: add --offload-path DIR")
        part = re.fullmatch(r"\d*\.?\d+", self.offload)
        wish: dict[str, Any] = {"optimizer": float(self.offload) if part else self.offload}
        return wish if self.offload_path is None else {**wish, "path": self.offload_path}

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

    @property
    def checkpoints(self) -> Path:
        return self.out / CHECKPOINTS

    @property
    def last_checkpoint(self) -> Path | None:
        found = candidates(self.checkpoints) if self.checkpoints.is_dir() else []
        return found[0] if found else None

    @property
    def degrees(self) -> Degrees:
        return Degrees(
            row=row(self.stage), tensor=self.tensor, pipeline=self.pipeline, data=self.data, group=self.group
        )

    def shares(self, world: int) -> Shares:
        """How the sequences of a step are shared by the data-parallel ranks among all: batch × ranks × accumulate."""
        is_given = self.batch is not None or self.accumulate is not None
        return filled(self._shares(self.degrees.data_ranks(world)), self.pipeline, is_given=is_given)

    @property
    def leaves_batch_open(self) -> bool:
        """The plan chooses how many sequences there are at a time: it has all it needs for that, and nobody else has
        said it. A pipeline's micro-batches are as many as it needs, and states off the device have plans of their own.
        """
        asks = self.keep == AUTO and self.checkpoint_every > 0 and self.global_batch is not None
        return asks and self.batch is None and self.accumulate is None and self.pipeline == 1 and self.offload is None

    def _shares(self, ranks: int) -> Shares:
        if self.global_batch is None:
            return Shares(self.batch or DEFAULT_BATCH, ranks, self.accumulate or 1)
        each = share(self.global_batch, ranks).micro
        if self.batch is None and self.accumulate is None:
            most = self.at_once or DEFAULT_BATCH
            return share(self.global_batch, ranks, max(n for n in range(1, most + 1) if each % n == 0))
        if self.batch is None:
            assert self.accumulate is not None
            if each % self.accumulate:
                raise ValueError(
                    f"a global batch of {self.global_batch} on {ranks} ranks is {each} sequences on each, which do not "
                    f"divide into {self.accumulate} batches: {each} = {self.accumulate} x {each // self.accumulate} + "
                    f"{each % self.accumulate}"
                )
            return Shares(each // self.accumulate, ranks, self.accumulate)
        shares = share(self.global_batch, ranks, self.batch)
        if self.accumulate not in (None, shares.accumulate):
            raise ValueError(
                f"batch {self.batch} x {ranks} ranks x accumulate {self.accumulate} = "
                f"{self.batch * ranks * (self.accumulate or 1)}, not the global batch of {self.global_batch}: leave "
                "one of the three out"
            )
        return shares

    @classmethod
    def of_run(cls, run: Path, given: dict[str, Any]) -> TrainOptions:
        """The options to go on with a run: its own, but for what is `given` and may change."""
        try:
            config = json.loads((run / CONFIG_FILE).read_text())
            gpt = GPTConfig(**config["gpt"])
            # As many ranks as there are this time, and groups of them.
            left_out = {"out", "gpt", "resume", "batch", "accumulate", "data", "group"}
            names = {each.name for each in dataclasses.fields(cls)} - left_out
            saved = {name: config[name] for name in names if name in config}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{run} holds no run to go on with: its {CONFIG_FILE} cannot be read ({error})") from error
        for name, value in given.items():
            before = config["gpt"].get(name, saved.get(name))
            if name not in CHANGEABLE and value != before:
                raise ValueError(f"the run in {run} has {name} {before}, not {value}: leave it out, or begin a new run")
        changed = {name: value for name, value in given.items() if name in CHANGEABLE - {"batch", "accumulate"}}
        # The same command may be given for another number of ranks: the global batch stays, and this one is a bound.
        if given.get("batch") is not None:
            changed["at_once"] = given["batch"]
        return cls(**{**saved, "gpt": gpt, **changed, "out": run, "resume": True})
