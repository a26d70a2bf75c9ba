"""Small runs of FSDP2 and DeepSpeed that write checkpoints, and the true values to compare what is read from them with.

`python tests/foreign_runs.py` (from the repository, with DeepSpeed installed) makes the recorded ones in tests/data
again, for machines that have no DeepSpeed.
"""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from ranks import RankPool

DATA = Path(__file__).parent / "data"
STATES = ("exp_avg", "exp_avg_sq")
# Names of the runs: each shows another layout.
DEEPSPEED_RUNS: dict[str, dict[str, Any]] = {
    "stage0-bf16": {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}},
    "stage1": {"zero_optimization": {"stage": 1}},
    "stage1-bf16": {
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},  # another optimizer class, which keeps its padding
    },
    "stage2-round-robin": {"zero_optimization": {"stage": 2, "round_robin_gradients": True}, "bf16": {"enabled": True}},
    "stage3": {"zero_optimization": {"stage": 3}},
    "stage3-subgroups": {"zero_optimization": {"stage": 3, "sub_group_size": 20}, "bf16": {"enabled": True}},
}
CLIENT_STATE = {"epoch": 3, "note": "from the caller", "seen": (1, 2)}


class Tiny(nn.Module):
    """Odd sizes, a tied, a frozen and an untouched tensor: all that makes padding and special cases."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.up, self.norm = nn.Embedding(7, 5), nn.Linear(5, 3), nn.LayerNorm(3)
        self.frozen = nn.Linear(3, 3, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.down, self.head = nn.Linear(3, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.tokens.weight
        self.register_buffer("ticks", torch.arange(3.0))

    def forward(self, indices: Tensor) -> Tensor:
        return self.head(self.down(self.norm(self.frozen(self.up(self.tokens(indices)))))).logsumexp(-1).mean()


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
    ]


def indices() -> Tensor:
    return torch.randint(0, 7, (4,), generator=torch.Generator().manual_seed(dist.get_rank()))


def full(value: Any) -> Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def write_dcp(folder: str) -> dict[str, Tensor]:
    """Checkpoints of one FSDP2 run, in all the ways that people save it. The truth by "name" and "name/state"."""
    torch.manual_seed(1)
    model = Tiny()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.down, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-2)
    for _ in range(3):
        model(indices()).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    named = {"model": weights, "optim": states, "step": 3, "scheduler": {"last_epoch": 3}, "seen": {"tokens": [1, 2]}}
    dcp.save(named, checkpoint_id=f"{folder}/named")
    plain = {"app": {"model": model.state_dict(), "optimizer": optimizer.state_dict()}}
    dcp.save(plain, checkpoint_id=f"{folder}/numbered")
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/weights")
    # As torchtitan does: the model at the top, the optimizer flattened.
    flat = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    dcp.save({**model.state_dict(), "optimizer": flat, "train_state": {"step": 3}}, checkpoint_id=f"{folder}/flattened")
    # As Accelerate does.
    dcp.save({"model": weights}, checkpoint_id=f"{folder}/accelerate/pytorch_model_fsdp_0")
    dcp.save({"optimizer": states}, checkpoint_id=f"{folder}/accelerate/optimizer_0")
    truth = {name: full(value) for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            truth[f"{name}/{key}"] = full(value)
    return truth


def write_boxes(folder: str) -> Tensor:
    """One tensor, cut along its second dimension."""
    whole = torch.randn(7, 9, 2, generator=torch.Generator().manual_seed(5))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    dcp.save({"model": {"cut": distribute_tensor(whole, mesh, [Shard(1)])}}, checkpoint_id=folder)
    return whole


def write_deepspeed(folder: str, run: str) -> dict[str, Tensor]:
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "DS_ACCELERATOR": "cpu"}
    library: Any = importlib.import_module("deepspeed")
    library.init_distributed(dist_backend="gloo")
    torch.manual_seed(1)
    model = Tiny()
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
        "zero_allow_untested_optimizer": True,
        **DEEPSPEED_RUNS[run],
    }
    engine, *_ = library.initialize(model=model, model_parameters=groups_of(model), config=config)
    for _ in range(3):
        engine.backward(engine(indices()))
        engine.step()
    engine.save_checkpoint(folder, client_state=dict(CLIENT_STATE))
    truth = deepspeed_truth(library, engine, model)
    if dist.get_rank() == 0:
        save_file(truth, f"{folder}/truth.safetensors")
    dist.barrier()
    return truth


def deepspeed_truth(library: Any, engine: Any, model: nn.Module) -> dict[str, Tensor]:
    """Masters and moments as they are in the live engine, put together with collectives."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer, stage = engine.optimizer, engine.zero_optimization_stage()
    truth = {"ticks": model.ticks, "frozen.weight": model.frozen.weight}
    if stage == 0:
        for group, masters in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True):
            for parameter, master in zip(group, masters, strict=True):
                name, state = names[id(parameter)], optimizer.optimizer.state[master]
                truth |= {name: master} | {f"{name}/{key}": state[key] for key in STATES}
    elif stage == 3:
        with library.zero.GatheredParameters([model.frozen.weight]):
            truth["frozen.weight"] = model.frozen.weight.detach().clone()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                truth[name] = library.utils.safe_get_full_fp32_param(parameter)
                for key in STATES:
                    truth[f"{name}/{key}"] = library.utils.safe_get_full_optimizer_state(parameter, key)
    else:
        keeps_padding = hasattr(optimizer, "bf16_groups")
        groups = optimizer.bf16_groups if keeps_padding else optimizer.round_robin_bit16_groups
        flats = optimizer.fp32_groups_flat_partition if keeps_padding else optimizer.single_partition_of_fp32_groups
        for group, flat in zip(groups, flats, strict=True):
            for key in (None, *STATES):
                own = flat if key is None else optimizer.optimizer.state[flat][key]
                pieces = [torch.empty_like(own) for _ in range(dist.get_world_size())]
                dist.all_gather(pieces, own.detach())
                rest = torch.cat(pieces)
                for parameter in group:
                    name, value = names[id(parameter)], rest[: parameter.numel()].view(parameter.shape)
                    truth[name if key is None else f"{name}/{key}"] = value
                    rest = rest[parameter.numel() :]
                    # The order of the flat group is right if what the module computes with is the rounded master.
                    assert key is not None or torch.equal(value.to(parameter.dtype), parameter)
    return {name: tensor.detach().clone() for name, tensor in truth.items()}


def recorded(run: str, into: Path) -> tuple[Path, dict[str, Tensor]]:
    """A recorded checkpoint and its truth."""
    with tarfile.open(DATA / f"deepspeed-{run}.tar.xz") as archive:
        archive.extractall(into, filter="data")
    return into / run, load_file(into / run / "truth.safetensors")


def record() -> None:
    DATA.mkdir(exist_ok=True)
    pool = RankPool(keep=1)
    with tempfile.TemporaryDirectory() as folder:
        for run in DEEPSPEED_RUNS:
            pool(2, write_deepspeed, f"{folder}/{run}", run)
            for script in Path(folder, run).glob("*.py"):
                script.unlink()
        make_universal(Path(folder, "stage1"), Path(folder, "universal"))
        for run in (*DEEPSPEED_RUNS, "universal"):
            with tarfile.open(DATA / f"deepspeed-{run}.tar.xz", "w:xz") as archive:
                archive.add(f"{folder}/{run}", arcname=run, filter=_anonymous)
    pool.close()


def make_universal(source: Path, target: Path) -> None:
    """With DeepSpeed's own converter."""
    [tag] = source.glob("global_step*")
    folders = ["--input_folder", str(tag), "--output_folder", str(target / f"{tag.name}_universal")]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    converter = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    subprocess.run([*converter, *folders, *workers], check=True)
    shutil.copy(source / "truth.safetensors", target)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    # By its own name, since the rank processes look its functions up there.
    importlib.import_module("foreign_runs").record()
