"""One training script behind each face, the same weights; and configs from public documentation, which train as is."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models import Block, TinyGPT, batches, make_model, train_ddp
from torch import Tensor

import zerofold as zf
from zerofold.fsdp import FullyShardedDataParallel, fully_shard, transformer_auto_wrap_policy

CONFIGS = sorted((Path(__file__).parent / "data" / "ds_configs").glob("*.json"))
STEPS = 4


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def deepspeed_face(model: TinyGPT) -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    engine, _, _, _ = zf.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    for batch in batches(STEPS):
        engine.backward(engine(*batch))
        engine.step()


def fsdp_face(model: TinyGPT) -> None:
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=policy)
    optimizer = adamw(wrapped.parameters())
    for batch in batches(STEPS):
        wrapped(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp2_face(model: TinyGPT) -> None:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = adamw(model.parameters())
    for batch in batches(STEPS):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def accelerate_face(model: TinyGPT) -> None:
    accelerator = zf.Accelerator()
    prepared, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    for batch in batches(STEPS):
        accelerator.backward(prepared(*batch))
        optimizer.step()
        optimizer.zero_grad()


def config_face(model: TinyGPT) -> None:
    config = {"zero_optimization": {"stage": 3}, "gradient_clipping": 0.0}
    _, optimizer = zf.prepare(model, adamw(model.parameters()), config=config)
    for batch in batches(STEPS):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()


FACES = (deepspeed_face, fsdp_face, fsdp2_face, accelerate_face, config_face)


def weights_of_each() -> list[list[Tensor]]:
    found = []
    for face in FACES:
        model = make_model()
        face(model)
        found.append([zf.full(p) for p in model.parameters()])
        zf.close(model)
    expected, _ = train_ddp(adamw, STEPS)
    return [*found, expected]


def test_every_face_gives_the_weights_of_ddp(ranks: Any) -> None:
    *found, expected = ranks(2, weights_of_each)[0]
    for face, weights in zip(FACES, found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True)), face.__name__


class Sized(TinyGPT):
    """With a size in its config, from which "auto" takes some numbers, as Hugging Face's models have it."""

    config = SimpleNamespace(hidden_size=40)


def train_with(path: str) -> dict[str, Any]:
    torch.manual_seed(1)
    model = Sized()
    optimizer = None if '"optimizer"' in Path(path).read_text() else adamw(model.parameters())
    engine, _, _, _ = zf.initialize(model=model, optimizer=optimizer, config=path)
    engine.set_train_micro_batch_size(2)
    engine.set_gradient_accumulation_steps(2)
    (batch,) = batches(1)
    losses = []
    for _ in range(12):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"losses": losses, "steps": engine.global_steps - engine.skipped_steps, "config": engine.config}
    engine.destroy()
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_public_configs_train(ranks: Any, path: Path) -> None:
    found = ranks(2, train_with, str(path))[0]
    assert found["steps"] > 0
    assert all(loss == loss for loss in found["losses"])
    assert found["losses"][-1] <= found["losses"][0]  # one batch over and over; some warm up for thousands of steps
    assert "'auto'" not in str(found["config"])
