"""`zf.tensor_parallel`: layers that ranks share give what one process gives, with every row of ZeRO over the data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel

import models
import zerofold as zf
import zoo
from zerofold.bench import gpt as bench
from zerofold.parallel.known import Wish, plan_for
from zerofold.parallel.styles import VocabularyRows
from zerofold.train import gpt as train

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
    return train.GPT(train.GPTConfig(layers=2, hidden=24, heads=2, seq=models.SEQUENCE, vocab=models.VOCABULARY))


def bench_gpt() -> nn.Module:
    return bench.GPT(bench.GPTSize(vocab=models.VOCABULARY, width=24, layers=2, heads=2, seq=models.SEQUENCE))


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


def half_of(batch: Batch, number: int) -> Batch:
    return {key: value[SAMPLES // 2 * number : SAMPLES // 2 * (number + 1)] for key, value in batch.items()}


@cache
def alone(name: str) -> list[float]:
    """One process, all samples: in halves, since an auxiliary loss of all is not the mean of those of the halves."""
    model, optimizer = build(name)
    losses = []
    for step in range(STEPS):
        loss = sum((loss_of(model, half_of(MODELS[name][1](step), half)) for half in (0, 1)), torch.zeros(())) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mean_of(loss: Tensor) -> float:
    """Over the data axis; the ranks of the tensor axis have the same."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, name: str, mesh: zf.Mesh) -> list[float]:
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, half_of(MODELS[name][1](step), mesh.coordinate["data"]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_of(loss))
    zf.close(model)
    return losses


def spread(name: str, stage: int, wishes: dict[str, bool] | None = None, **settings: Any) -> list[float]:
    """The same, over data 2 x tensor 2."""
    torch.set_num_threads(1)
    model, optimizer = build(name)
    mesh = zf.mesh(tensor=2, device="cpu")
    if wishes:
        zf.tensor_parallel(model, mesh, **wishes)
    zf.prepare(model, optimizer, stage=stage, mesh=mesh, **settings)
    return steps(model, optimizer, name, mesh)


def test_as_many_distances_as_words_are_no_words() -> None:
    """T5 has 32 distances in its bias by default, of which each rank has those of its heads."""
    model = zoo.t5()
    model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias = nn.Embedding(models.VOCABULARY, 2)
    plan = plan_for(model, Wish(ranks=2))
    (bias,) = {type(style) for name, style in plan.items() if name.endswith("relative_attention_bias")}
    assert bias is ColwiseParallel
    assert isinstance(plan["shared"], VocabularyRows)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_losses_are_those_of_one_process(ranks: Any, name: str, stage: int) -> None:
    expected = alone(name)
    for losses in ranks(4, spread, name, stage):
        assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("name", ["tests", "train", "bench", "llama", "gpt2", "qwen3", "t5", "mixtral"])
@pytest.mark.parametrize(
    "wishes",
    [{"sequence_parallel": True}, {"loss_parallel": True}, {"sequence_parallel": True, "loss_parallel": True}],
    ids=["sequence", "loss", "both"],
)
def test_parts_of_the_sequence_and_of_the_words(ranks: Any, name: str, wishes: dict[str, bool]) -> None:
    for losses in ranks(4, spread, name, 3, wishes):
        assert losses == pytest.approx(alone(name), abs=1e-5)


def norm_of(stage: int | None) -> float:
    """Of the gradients of one batch; in one process without a stage. AdamW would forgive a wrong one."""
    torch.set_num_threads(1)
    model, optimizer = build("llama")
    if stage is not None:
        mesh = zf.mesh(tensor=2, device="cpu")
        zf.tensor_parallel(model, mesh, sequence_parallel=True)
        zf.prepare(model, optimizer, stage=stage, mesh=mesh, clip=0.1)
    loss_of(model, labelled(0)).backward()
    if stage is None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
    optimizer.step()
    norm = zf.last_step(model).norm
    zf.close(model)
    return norm


@pytest.mark.parametrize("stage", [0, 3])
def test_the_norm_is_that_of_one_process(ranks: Any, stage: int) -> None:
    for norm in ranks(4, norm_of, stage):
        assert norm == pytest.approx(norm_of(None), rel=1e-5)
