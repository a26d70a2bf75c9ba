"""Several prepared models in one program: one loss over two of them, a frozen teacher, alternating optimizers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import largest_difference
from tests.test_unusual import Averaging, Net, inputs
from torch import Tensor, nn

import zerofold as zf

PAIRS = [((3, None), (3, None)), ((2, None), (3, "whole")), (("dp", None), (1, "whole")), ((0, None), (3, None))]


def build(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)


def combined(first: Any, second: Any, optimizers: tuple[Any, Any], step: int) -> None:
    """One backward goes through both, one of them used twice."""
    hidden = first(inputs(step))
    (second(hidden).pow(2).mean() + second(inputs(step + 9)).abs().mean() + hidden.mean()).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def adversarial(generator: Any, critic: Any, optimizers: tuple[Any, Any], step: int) -> None:
    """The critic's gradients from the generator's turn are thrown away; its own turn sees a detached sample."""
    of_generator, of_critic = optimizers
    critic(generator(inputs(step))).mean().backward()
    of_generator.step()
    of_generator.zero_grad()
    of_critic.zero_grad()
    (critic(inputs(step + 5)).mean() - critic(generator(inputs(step)).detach()).mean()).pow(2).backward()
    of_critic.step()
    of_critic.zero_grad()


def distilled(student: Any, teacher: Any, optimizers: tuple[Any, Any], step: int) -> None:
    with torch.no_grad():
        target = teacher(inputs(step))
    (student(inputs(step)) - target).pow(2).mean().backward()
    optimizers[0].step()
    optimizers[0].zero_grad()


WAYS = {"combined": combined, "adversarial": adversarial, "distilled": distilled}


def difference(way: str, rows: tuple[tuple[Any, Any], ...]) -> float:
    def train(models: tuple[Net, Net], optimizers: tuple[Any, Any]) -> list[Tensor]:
        for step in range(4):
            WAYS[way](*models, optimizers, step)
        return [zf.full(p) for model in models for p in model.parameters()]

    plain = build(1), build(2)
    expected = train(plain, (Averaging(adam(plain[0])), Averaging(adam(plain[1]))))
    models = build(1), build(2)
    if way == "distilled":
        models[1].requires_grad_(False)
        zf.shard(models[1], stage=rows[1][0], cut=rows[1][1])
        _, optimizer = zf.prepare(models[0], adam(models[0]), stage=rows[0][0], cut=rows[0][1])
        found = train(models, (optimizer, None))
    else:
        pairs = [
            zf.prepare(model, adam(model), stage=stage, cut=cut)
            for model, (stage, cut) in zip(models, rows, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "gradients were reduced and cleared")  # as the critic's are, once
            found = train(models, (pairs[0][1], pairs[1][1]))
    for model in models:
        zf.close(model)
    return largest_difference(expected, found)


@pytest.mark.parametrize("rows", PAIRS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_two_models_train_as_two_plain_ones(ranks: Any, way: str, rows: tuple[tuple[Any, Any], ...]) -> None:
    assert max(ranks(2, difference, way, rows)) <= 1e-6


def follows_at_once(offload: str | dict[str, str]) -> bool:
    """A copy that is a sharded model of its own is brought up to date right after step(): only the other one waits."""
    model, copy = build(1), zf.shard(build(2), stage=3)
    zf.prepare(model, optimizer := adam(model), stage=3, offload=offload)
    model(inputs(0)).pow(2).mean().backward()
    optimizer.step()
    pairs = list(zip(copy.parameters(), model.parameters(), strict=True))
    with torch.no_grad():
        for mine, p in pairs:
            mine.copy_(p)
    same = all(torch.equal(zf.full(mine), zf.full(p)) for mine, p in pairs)
    zf.close(model)
    zf.close(copy)
    return same


@pytest.mark.parametrize("offload", ["host", {"optimizer": "host", "parameters": "host"}], ids=str)
def test_parameters_read_beside_those_of_another_model_wait_for_their_update(ranks: Any, offload: Any) -> None:
    assert ranks(2, follows_at_once, offload) == [True, True]


class OfManyKinds(nn.Module):
    """Buffers of dtypes that few backends know; all of them written to in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        for dtype in KINDS:
            self.register_buffer("of_" + str(dtype).split(".")[-1], torch.zeros(3, 2).to(dtype).t())
        self.register_buffer("scalar", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> Tensor:
        for buffer in self.buffers():
            buffer.copy_(torch.full(buffer.shape, x.detach().sum().item() > 0).to(buffer.dtype))
        y: Tensor = self.layer(x)
        return y


KINDS = (torch.bool, torch.int16, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64)


class Replacing(nn.Module):
    """Puts a new tensor in the place of its buffer, as running means are often written."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        y: Tensor = self.layer(x - self.mean)
        return y


def replaced_buffers(stage: int) -> tuple[float, float]:
    def train(model: Any, step_model: Any, optimizer: Any) -> None:
        for step in range(4):
            step_model(inputs(step)[:, :8]).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    torch.manual_seed(0)
    reference = Replacing()
    wrapped = nn.parallel.DistributedDataParallel(reference)
    train(reference, wrapped, torch.optim.SGD(reference.parameters(), lr=0.1))
    dist.broadcast(reference.mean, 0)
    torch.manual_seed(0)
    model = Replacing()
    zf.prepare(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    train(model, model, optimizer)
    zf.close(model)
    weights = largest_difference(list(reference.parameters()), list(model.parameters()))
    return weights, (reference.mean - model.mean).abs().max().item()


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_that_a_forward_replaces_follow_rank_zero(ranks: Any, stage: int) -> None:
    assert ranks(2, replaced_buffers, stage) == [(0.0, 0.0)] * 2


def buffers_follow(stage: int) -> list[bool]:
    model = OfManyKinds()
    zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage)
    sign = 1.0 if dist.get_rank() == 0 else -1.0  # rank 0 writes ones, the other zeros
    model(sign * torch.ones(2, 8)).sum().backward()
    found = [bool((buffer.to(torch.complex64) == 1).all()) for buffer in model.buffers()]
    zf.close(model)
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_buffers_of_any_dtype_follow_rank_zero(ranks: Any, stage: int) -> None:
    for found in ranks(2, buffers_follow, stage):
        assert len(found) == len(KINDS) + 1
        assert all(found)
