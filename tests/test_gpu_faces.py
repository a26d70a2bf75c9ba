"""The faces on a GPU: configs, FSDP's and Accelerate's shapes, zero.Init, the launcher, and Hugging Face's Trainer."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.models import Block, TinyGPT, batches, largest_difference, make_model
from torch import Tensor

import zerofold as zf
from zerofold.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard, transformer_auto_wrap_policy

CONFIGS = sorted((Path(__file__).parent / "data" / "ds_configs").glob("*.json"))
ROOT = Path(__file__).parent.parent

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def on_gpu(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(x.cuda(), y.cuda()) for x, y in batches(count)]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(face: str, stage: int, bf16: bool) -> list[Tensor]:
    model = make_model().cuda()
    config = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}, "gradient_clipping": 0.0}
    optimizer: Any
    if face == "engine":
        engine = zf.initialize(model=model, optimizer=sgd(model.parameters()), config=config)[0]
        for batch in on_gpu(4):
            engine.backward(engine(*batch))
            engine.step()
    elif face == "accelerator":
        accelerator = zf.Accelerator(mixed_precision="bf16" if bf16 else "no", stage=stage, device_placement=False)
        wrapped, optimizer = accelerator.prepare(model, sgd(model.parameters()))
        for batch in on_gpu(4):
            accelerator.backward(wrapped(*batch))
            optimizer.step()
            optimizer.zero_grad()
    else:
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else None
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        wrapped = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, mixed_precision=precision, device_id=torch.cuda.current_device()
        )
        optimizer = sgd(wrapped.parameters())
        for batch in on_gpu(4):
            wrapped(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    found = [zf.full(p) for p in model.parameters()]
    zf.close(model)
    return found


def by_prepare(stage: int, bf16: bool) -> list[Tensor]:
    model = make_model().cuda()
    model, optimizer = zf.prepare(model, sgd(model.parameters()), stage=stage, precision="bf16" if bf16 else None)
    for batch in on_gpu(4):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [zf.full(p) for p in model.parameters()]
    zf.close(model)
    return found


def difference(face: str, stage: int, bf16: bool) -> float:
    return largest_difference(trained(face, stage, bf16), by_prepare(stage, bf16))


@needs_gpu
@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("face", ["engine", "accelerator", "fsdp"])
@pytest.mark.parametrize("world", [1, 2])
def test_faces_train_alike_on_a_gpu(ranks: Any, world: int, face: str, bf16: bool) -> None:
    assert max(ranks(world, difference, face, 3, bf16)) <= 1e-6


def fully_sharded() -> float:
    model = make_model().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = sgd(model.parameters())
    for batch in on_gpu(4):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [zf.full(p) for p in model.parameters()]
    zf.close(model)
    return largest_difference(found, by_prepare(3, False))


@needs_gpu
def test_fully_shard_on_a_gpu(ranks: Any) -> None:
    assert max(ranks(2, fully_sharded)) <= 1e-6


class Sized(TinyGPT):
    config = SimpleNamespace(hidden_size=40)


def train_with(path: str) -> tuple[list[float], list[str]]:
    torch.manual_seed(1)
    model = Sized().cuda()
    optimizer = None if '"optimizer"' in Path(path).read_text() else sgd(model.parameters())
    engine = zf.initialize(model=model, optimizer=optimizer, config=path)[0]
    engine.set_train_micro_batch_size(2)
    engine.set_gradient_accumulation_steps(2)
    (batch,) = on_gpu(1)
    losses = []
    for _ in range(12):
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    notes = [note.text for note in engine.settings.notes]
    engine.destroy()
    return losses, notes


@needs_gpu
@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_public_configs_train_on_a_gpu(ranks: Any, path: Path) -> None:
    losses, notes = ranks(1, train_with, str(path))[0]
    assert losses[-1] <= losses[0]
    if '"cpu"' in path.read_text():
        assert any("still to come" in note for note in notes)


SCRIPT = """
import sys, torch, zerofold as zf
from zerofold.compat.gathered import GatheredParameters
from zerofold.compat.zero_init import Init
config = {"train_batch_size": 4, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3},
          "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
with Init():
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
print("pieces on", model[0].weight.device)
with GatheredParameters([model[2].bias], modifier_rank=0):
    model[2].bias.data.fill_(0.125)
print("bias", zf.full(model[2].bias).item())
engine, *_ = zf.initialize(model=model, config=config)
x = torch.randn(4, 16, device=engine.device)
for step in range(20):
    loss = engine(x).float().square().mean()
    engine.backward(loss)
    engine.step()
print("device", engine.device, "dtype", engine.get_data_types()[0], sys.argv[1:])
print("fell" if loss.item() < 0.05 else f"loss {loss.item()}")
"""


@needs_gpu
def test_launch_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "zerofold", "launch", "--num_gpus", "1", "train.py", "--flag"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[rank 0] device cuda:0 dtype torch.bfloat16" in done.stdout
    assert "pieces on cuda:0" in done.stdout
    assert "bias 0.125" in done.stdout
    assert "['--flag']" in done.stdout
    assert "fell" in done.stdout
