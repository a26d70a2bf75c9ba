"""`zf.tensor_parallel`: layers that ranks share give what one process gives, with every row of ZeRO over the data axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import pytest
import torch
import zoo
from torch import Tensor, nn

import zerofold as zf
from zerofold.bench.gpt import GPT as BenchGPT
from zerofold.bench.gpt import GPTSize
from zerofold.train.gpt import GPT, GPTConfig

STEPS, SAMPLES = 10, 4
Batch = dict[str, Tensor]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def tiny_gpt() -> nn.Module:
    return models.TinyGPT(width=24, layers=2, key_bias=False)


def train_gpt() -> nn.Module:
    return GPT(GPTConfig(layers=2, hidden=24, heads=2, seq=models.SEQUENCE, vocab=models.VOCABULARY))


def bench_gpt() -> nn.Module:
    return BenchGPT(GPTSize(vocab=models.VOCABULARY, width=24, layers=2, heads=2, seq=models.SEQUENCE))


def tokens(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)
    data = torch.randint(3, models.VOCABULARY, (SAMPLES, models.SEQUENCE + 1), generator=generator)
    return {"tokens": data[:, :-1].contiguous(), "targets": data[:, 1:].contiguous()}


def indices(step: int) -> Batch:
    batch = tokens(step)
    return {"indices": batch["tokens"], "targets": batch["targets"]}


def labelled(step: int) -> Batch:
    batch = tokens(step)
    return {"input_ids": batch["tokens"], "labels": batch["targets"]}


def numbers(step: int) -> Batch:
    return {"x": torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(100 + step))}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "mlp": (MLP, numbers),
    "tests": (tiny_gpt, indices),
    "train": (train_gpt, tokens),
    "bench": (bench_gpt, tokens),
    "gpt2": (zoo.gpt2, labelled),
    "llama": (zoo.llama, labelled),
    "qwen3": (zoo.qwen3, labelled),
    "t5": (zoo.t5, labelled),
    "mixtral": (zoo.mixtral, labelled),
}


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(zoo.SEED)
    model = MODELS[name][0]().train()
    # eps: key biases have gradients of pure noise, of which Adam would make full-sized steps.
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    out = model(**batch)
    return out if isinstance(out, Tensor) else out.loss


def alone(name: str, clip: float | None = None) -> list[float]:
    """One process, all samples."""
    model, optimizer = build(name)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, MODELS[name][1](step))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def spread(name: str, stage: int, wishes: dict[str, bool] | None = None, **settings: Any) -> list[float]:
    """The same, over data 2 x tensor 2: a half of the samples each."""
    torch.set_num_threads(1)
    model, optimizer = build(name)
    mesh = zf.mesh(tensor=2, device="cpu")
    if wishes:
        zf.tensor_parallel(model, mesh, **wishes)
    zf.prepare(model, optimizer, stage=stage, mesh=mesh, **settings)
    half = slice(SAMPLES // 2 * mesh.coordinate["data"], SAMPLES // 2 * (mesh.coordinate["data"] + 1))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, {key: value[half] for key, value in MODELS[name][1](step).items()})
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses.append(mean.item() / 4)
    zf.close(model)
    return losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_one_process(ranks: Any, name: str, stage: int) -> None:
    expected = alone(name)
    for losses in ranks(4, spread, name, stage):
        assert losses == pytest.approx(expected, abs=1e-5)
