"""The axes of a run besides data: how many ranks share a layer, how many follow each other, and who reads what."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import zerofold as zf
from zerofold.placement import ROWS, Row, row
from zerofold.samples import Shares
from zerofold.train.data import Batch, ByteText
from zerofold.train.gpt import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """As the command line has them; `data` is what is left of the ranks, unless it is given.

    >>> Degrees(tensor=2, pipeline=2).data_ranks(8)
    2
    """

    row: Row = field(default_factory=lambda: row(3))
    tensor: int = 1
    pipeline: int = 1
    data: int | None = None
    group: int | None = None

    @property
    def of_model(self) -> int:
        """Ranks that hold one copy of the model between them."""
        return self.tensor * self.pipeline

    def check(self, gpt: GPTConfig) -> None:
        for name in ("tensor", "pipeline", "data", "group"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"--{name} {number} is no number of ranks: use 1 or more")
        if self.group is not None and not self.row.has_groups:
            have = " or ".join(name for name in ROWS if row(name).has_groups)
            raise ValueError(
                f"--group {self.group} is for rows with groups, and --stage {self.row.name} has none: leave it out, or "
                f"choose --stage {have}"
            )
        heads, layers = gpt.heads, gpt.layers
        if heads % self.tensor:
            raise ValueError(f"--tensor {self.tensor} does not divide the {heads} heads: use --heads or another degree")
        if layers < self.pipeline:
            raise ValueError(f"--pipeline {self.pipeline} needs as many blocks, and there are {layers}: add --layers")

    def ranks(self, usual: int) -> int:
        """How many processes to start, where nobody says; `usual` without these axes."""
        return self.of_model * (self.data or max(1, usual // self.of_model))

    def data_ranks(self, world: int) -> int:
        """Ranks with other samples."""
        found, rest = divmod(world, self.of_model)
        given = {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}
        product = " x ".join(f"--{name} {number}" for name, number in given.items() if number is not None)
        if rest or self.data not in (None, found):
            fix = "leave --data out" if not rest else f"use a multiple of {self.of_model}"
            raise ValueError(f"{product} does not make {world} processes: {fix}, or change --nproc")
        if self.row.has_groups:
            self._check_groups(found)
        return found

    def _check_groups(self, ranks: int) -> None:
        if ranks == 1:
            raise ValueError(
                f"--stage {self.row.name} needs several groups, and there is 1 data-parallel rank: choose --stage 3, "
                "or a larger --nproc"
            )
        fitting = [size for size in range(1, ranks) if ranks % size == 0]
        if self.group is not None and self.group not in fitting:
            why = "is all of" if self.group == ranks else "does not divide"
            raise ValueError(
                f"--group {self.group} {why} the {ranks} data-parallel ranks: use {', '.join(map(str, fitting))}, or "
                "--stage 3, which has one group"
            )

    def in_group(self, world: int) -> int:
        """Data-parallel ranks in a group; all of them where the row has no groups.

        By default those of a machine. Where that is all of them, groups would come to nothing: then half of them, or
        what else divides them.

        >>> Degrees(row=row("hsdp")).in_group(4), Degrees(row=row("hsdp")).in_group(9), Degrees().in_group(4)
        (2, 3, 4)
        """
        ranks = self.data_ranks(world)
        if self.group is not None or not self.row.has_groups:
            return self.group or ranks
        here = math.gcd(ranks, max(1, int(os.environ.get("LOCAL_WORLD_SIZE", world)) // self.tensor))
        return here if here < ranks else max(size for size in range(1, ranks) if ranks % size == 0)

    def stage_in_words(self, world: int) -> str:
        """As the plan names it.

        >>> Degrees().stage_in_words(4), Degrees(row=row("hsdp")).stage_in_words(4)
        ('stage 3', 'hsdp in groups of 2')
        """
        name = f"stage {self.row.name}" if self.row.name.isdigit() else self.row.name
        if not self.row.has_groups:
            return name
        return f"{name} in groups of {self.in_group(world)}"

    def mesh(self, world: int, device: torch.device) -> zf.Mesh | None:
        """None where all ranks are data-parallel, in one group: there is nothing to say."""
        ranks = self.data_ranks(world)
        if self.of_model == 1 and not self.row.has_groups:
            return None
        group = self.in_group(world)
        return zf.mesh(
            data=group, replicate=ranks // group, tensor=self.tensor, pipeline=self.pipeline, device=device.type
        )


def reader(mesh: zf.Mesh | None, rank: int) -> int:
    """Which of the data-parallel ranks this one is: those that share a model read the same."""
    if mesh is None:
        return rank
    return mesh.coordinate["replicate"] * mesh.data + mesh.coordinate["data"]


def cut(model: nn.Module, mesh: zf.Mesh | None, micro_batches: int) -> zf.Pipeline | None:
    """This rank's part of every layer, and its stage of the model where there are several."""
    if mesh is None:
        return None
    zf.tensor_parallel(model, mesh)
    return zf.pipeline(model, mesh, microbatches=micro_batches) if mesh.pipeline > 1 else None


def step_of_pipeline(pipe: zf.Pipeline, text: ByteText, indices: list[list[int]], device: torch.device) -> Tensor:
    """Forward and backward of all micro-batches; their mean loss, on every rank."""
    batch = text.window_batch([index for some in indices for index in some])
    return pipe.step(batch.tokens.to(device), targets=batch.targets.to(device)).float()


def loss_of_pipeline(pipe: zf.Pipeline, batch: Batch, device: torch.device) -> Tensor:
    return pipe.evaluate(batch.tokens.to(device), targets=batch.targets.to(device)).float()


def filled(shares: Shares, pipeline: int, *, is_given: bool) -> Shares:
    """A pipeline works on as many micro-batches as it has stages, at the least: where nobody said how many, a batch is
    cut into so many.

    >>> filled(Shares(8, 2, 1), 2, is_given=False)
    Shares(micro=4, ranks=2, accumulate=2)
    """
    if pipeline == 1:
        return shares
    if not is_given and shares.accumulate == 1 and not shares.micro % pipeline:
        return Shares(shares.micro // pipeline, shares.ranks, pipeline)
    if shares.accumulate >= pipeline:
        return shares
    needs = f"--pipeline {pipeline} needs at least {pipeline} micro-batches, one for each stage"
    if is_given:
        raise ValueError(
            f"{needs}, and a step has {shares.accumulate} of {shares.micro} sequences on a rank: use --accumulate "
            f"{pipeline} or more"
        )
    fitting = next((count for count in range(pipeline, shares.micro + 1) if shares.micro % count == 0), None)
    how = "" if fitting is None else f"use --accumulate {fitting}, or "
    raise ValueError(
        f"{needs}, and the {shares.micro} sequences of a rank do not divide by {pipeline}: {how}choose a "
        f"--global-batch that is a multiple of {pipeline * shares.ranks}"
    )
