"""The axes of a run besides data: how many ranks share a layer, how many follow each other, and who reads what."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import zerofold as zf
from zerofold.samples import Shares
from zerofold.train.data import Batch, ByteText
from zerofold.train.gpt import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Degrees:
    """As the command line has them; `data` is what is left of the ranks, unless it is given.

    >>> Degrees(tensor=2, pipeline=2).data_ranks(8)
    2
    """

    tensor: int = 1
    pipeline: int = 1
    data: int | None = None

    @property
    def of_model(self) -> int:
        """Ranks that hold one copy of the model between them."""
        return self.tensor * self.pipeline

    def check(self, gpt: GPTConfig) -> None:
        for name in ("tensor", "pipeline", "data"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ValueError(f"--{name} {number} is no number of ranks: use 1 or more")
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
        return found

    def mesh(self, world: int, device: torch.device) -> zf.Mesh | None:
        """None where all ranks are data-parallel: there is nothing to say."""
        data = self.data_ranks(world)
        if self.of_model == 1:
            return None
        return zf.mesh(data=data, tensor=self.tensor, pipeline=self.pipeline, device=device.type)


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
