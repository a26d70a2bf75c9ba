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
        assert any("offload={'optimizer': 'host'" in note for note in notes)


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


TRAINER = """
import sys, torch
from pathlib import Path
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
import deepspeed
print("library", deepspeed.__version__)
folder = Path(sys.argv[1])
config = {
    "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto",
    "stage3_gather_16bit_weights_on_model_save": True}, "gradient_clipping": "auto", "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
}
tokens = [(torch.arange(64) * (i % 2 + 1)) % 97 for i in range(64)]
samples = [{"input_ids": each, "labels": each} for each in tokens]
def trainer():
    arguments = TrainingArguments(
        folder, max_steps=20, save_steps=10, logging_steps=1, per_device_train_batch_size=8, learning_rate=3e-3,
        bf16=True, deepspeed=config, report_to=[], gradient_checkpointing=True, lr_scheduler_type="constant")
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4))
    return Trainer(model, arguments, train_dataset=samples)
first = trainer()
first.train()
losses = [entry["loss"] for entry in first.state.log_history if "loss" in entry]
print("losses", losses[0], losses[-1])
first.save_model(folder / "model")
LlamaForCausalLM.from_pretrained(folder / "model")
written = load_file(folder / "model" / "model.safetensors")
print("device", first.model.device, "saved", written["model.norm.weight"].dtype)
again = trainer()
again.train(resume_from_checkpoint=str(folder / "checkpoint-10"))
resumed = [entry["loss"] for entry in again.state.log_history if "loss" in entry]
print("fell", losses[-1] < losses[0] - 1, "resumed", max(abs(a - b) for a, b in zip(losses[10:], resumed[10:])) < 1e-3)
"""


@needs_gpu
def test_the_trainer_on_a_gpu(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINER)
    command = [sys.executable, "-m", "zerofold", "launch", "--num_gpus", "1", "--as-deepspeed", "train.py", "out"]
    command.insert(-2, "--no_local_rank")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "zerofold" in done.stdout.partition("library")[2].splitlines()[0]
    assert "device cuda:0 saved torch.bfloat16" in done.stdout
    assert "fell True resumed True" in done.stdout, done.stdout[-3000:]


T5 = """
from types import SimpleNamespace
from tests.test_fsdp_t5 import fsdp_main
from zerofold.process_group import join_process_group
join_process_group()
for held in (False, True):
    args = SimpleNamespace(lr=1e-2, gamma=0.9, epochs=8, losses=[], precision=None, held=held)
    model = fsdp_main(args)
    print("held", held, next(model.parameters()).device, "fell", args.losses[-1] < args.losses[0] - 1, args.losses)
"""


@needs_gpu
def test_the_t5_example_on_a_gpu(tmp_path: Path) -> None:
    """Every line of it, those that need CUDA and those that find out about bf16 too."""
    (tmp_path / "t5.py").write_text(T5)
    command = [sys.executable, "-m", "zerofold", "launch", "--num_gpus", "1", "t5.py"]
    paths = [str(ROOT / "src"), str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "held False cuda:0 fell True" in done.stdout, done.stdout
    assert "held True cuda:0 fell True" in done.stdout, done.stdout
