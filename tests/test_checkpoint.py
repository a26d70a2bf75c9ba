"""zf.save and zf.load: what is loaded trains on as if nothing had happened, whoever saved it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tests.ranks import RankPool, raised
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zerofold as zf
from zerofold.checkpoint.native import verify_native

BATCH, STEPS, SAVED_AT = 12, 5, 3
STAGES = [0, 1, 2, 3]


class Odd(nn.Module):
    """Tied and frozen parameters, buffers of other dtypes, sizes that no number of ranks divides."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(31, 18)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(18), nn.Linear(18, 18), nn.GELU()) for _ in range(2))
        self.frozen = nn.Linear(18, 18).requires_grad_(False)
        self.head = nn.Linear(18, 31, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        y = self.tokens(x)
        for block in self.blocks:
            y = y + block(y)
        return F.cross_entropy(self.head(self.dropout(self.frozen(y))).flatten(0, 1), x.roll(1, -1).flatten())


def data_of(step: int) -> Tensor:
    whole = torch.randint(0, 31, (BATCH, 5), generator=torch.Generator().manual_seed(step))
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def make(seed: int, *, dropout: float = 0.0, lr: float = 0.01, kind: Any = torch.optim.AdamW, **settings: Any) -> Any:
    torch.manual_seed(seed)
    model = Odd(dropout)
    trained = [p for p in model.parameters() if p.requires_grad]
    # Without weight decay on the first, so that there are two groups.
    groups = [{"params": trained[:1], "weight_decay": 0.0}, {"params": trained[1:]}]
    return zf.prepare(model, kind(groups, lr=lr), **settings)


def train(model: nn.Module, optimizer: Any, start: int, stop: int) -> list[float]:
    losses = []
    for step in range(start, stop):
        loss = model(data_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: zf.full(p) for name, p in model.named_parameters()}


def saved_run(folder: Path, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    model, optimizer = make(0, stage=stage)
    train(model, optimizer, 0, SAVED_AT)
    zf.save(model, optimizer, folder, extra={"step": SAVED_AT}, background=stage % 2 == 0)
    losses = train(model, optimizer, SAVED_AT, STEPS)
    found = weights(model)
    zf.close(model)
    return losses, found


def continued_runs(folders: list[Path], stage: int, own: Path) -> list[tuple[list[float], Any, int]]:
    """All of them loaded one after another into one model that has seen something else before.

    The last weights only of the one that was saved by as many ranks at the same stage.
    """
    found = []
    model, optimizer = make(1, stage=stage, lr=0.5)
    train(model, optimizer, 7, 8)
    for folder in folders:
        step = zf.load(model, optimizer, folder)["step"]
        losses = train(model, optimizer, step, STEPS)
        found.append((losses, weights(model) if folder == own else None, int(model.seen)))
    zf.close(model)
    return found


@pytest.mark.parametrize("counts", [(1, 3), (1, 2, 3, 4)])
def test_every_number_of_ranks_and_stage_loads_every_other(
    ranks: RankPool, tmp_path: Path, counts: tuple[int, ...]
) -> None:
    folders = {(n, stage): tmp_path / f"{n}-{stage}" for n in counts for stage in STAGES}
    saved = {key: ranks(key[0], saved_run, folder, key[1])[0] for key, folder in folders.items()}
    for m in counts:
        for stage in STAGES:
            found = ranks(m, continued_runs, list(folders.values()), stage, folders[m, stage])[0]
            for key, (losses, values, seen) in zip(folders, found, strict=True):
                expected, expected_values = saved[key]
                assert seen == STEPS
                if key == (m, stage):
                    assert losses == expected
                    assert all(torch.equal(values[name], expected_values[name]) for name in values)
                assert losses == pytest.approx(expected, abs=1e-5)


class Position:
    """A stand-in for a loader that knows where it is."""

    def __init__(self) -> None:
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def everything(folder: Path, settings: dict[str, Any], *, resumed: bool) -> dict[str, Any]:
    """A run with everything that has a state; the second half of it alone when `resumed`."""
    kind = settings.pop("kind", torch.optim.AdamW)
    model, optimizer = make(2 + resumed, dropout=0.2, kind=kind, accumulate=1, **mesh_of(settings))
    average = zf.EMA(model, decay=0.9)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)
    position = Position()
    if resumed:
        random.seed(5)
        extra = zf.load(model, optimizer, folder, scheduler=scheduler, data=position)
        assert extra["name"] == ("a", b"b")
        assert torch.equal(extra["values"][3], torch.arange(3))
    losses = []
    for step in range(position.at, 6):
        if step == 3 and not resumed:
            extra = {"name": ("a", b"b"), "values": {3: torch.arange(3)}}
            zf.save(model, optimizer, folder, scheduler=scheduler, data=position, extra=extra, background=True)
        losses += train(model, optimizer, step, step + 1)
        scheduler.step()
        position.at += 1
    averages = {name: zf.full(value) for name, value in average.state_dict().items()}
    drawn = (random.random(), float(numpy.random.rand()), torch.rand(()).item())
    info = zf.last_step(model)
    found = {
        "losses": losses[-3:],
        "weights": weights(model),
        "averages": averages,
        "drawn": drawn,
        "lr": [group["lr"] for group in optimizer.param_groups],
        "decay": [group.get("weight_decay") for group in optimizer.param_groups],
        "updates": average.updates,
        "scale": None if info is None else (info.loss_scale, info.skipped_total),
    }
    zf.close(model)
    return found


def mesh_of(settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("stage") in ("hsdp", "hpz"):
        return {**settings, "mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("across", "inside"))}
    return settings


EVERYTHING = {
    "fp32": (2, {"stage": 3}),
    "bf16": (2, {"stage": 2, "precision": "bf16"}),
    "bf16 alone": (1, {"stage": 1, "precision": "bf16"}),
    "fp16": (2, {"stage": 3, "precision": "fp16"}),
    "bf16 everywhere": (2, {"stage": 0, "precision": "bf16"}),
    "bf16 moments": (2, {"stage": 3, "precision": zf.Precision(parameters=torch.bfloat16, moments=torch.bfloat16)}),
    "whole cut": (3, {"stage": 3, "cut": "whole"}),
    "one rank updates": (2, {"stage": "dp"}),
    "groups": (4, {"stage": "hsdp"}),
    "copies": (4, {"stage": "hpz"}),
    "momentum": (2, {"stage": 1, "kind": torch.optim.RMSprop}),
    "factored": (2, {"stage": 2, "cut": "whole", "kind": torch.optim.Adafactor}),
}


@pytest.mark.parametrize("case", EVERYTHING)
def test_a_resumed_run_equals_one_that_was_not_interrupted_to_the_bit(
    ranks: RankPool, tmp_path: Path, case: str
) -> None:
    world, settings = EVERYTHING[case]
    first = ranks(world, everything, tmp_path, settings, resumed=False)
    second = ranks(world, everything, tmp_path, settings, resumed=True)
    for whole, rest in zip(first, second, strict=True):
        for name in ("losses", "drawn", "lr", "decay", "updates", "scale"):
            assert whole[name] == rest[name], name
        for kind in ("weights", "averages"):
            assert all(torch.equal(whole[kind][name], rest[kind][name]) for name in whole[kind]), kind
    (checkpoint,) = tmp_path.glob("save-*")
    assert verify_native(checkpoint) == []


def across(folder: Path, settings: dict[str, Any]) -> tuple[list[float], list[str]]:
    model, optimizer = make(4, **mesh_of(settings))
    before = Path(folder).exists()
    if before:
        zf.load(model, optimizer, folder)
        return train(model, optimizer, 3, 5), []
    train(model, optimizer, 0, 3)
    zf.save(model, optimizer, folder)
    return train(model, optimizer, 3, 5), sorted(weights(model))


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((4, {"stage": "hsdp"}), (3, {"stage": 2, "cut": "whole"})),
        ((3, {"stage": 3, "cut": "whole"}), (4, {"stage": "hpz"})),
        ((2, {"stage": "dp"}), (3, {"stage": 3, "units": nn.Linear})),
        ((2, {"stage": 3, "precision": "bf16"}), (1, {"stage": 0, "precision": "bf16"})),
    ],
)
def test_cuts_and_groups_load_each_other(ranks: RankPool, tmp_path: Path, saved: Any, loaded: Any) -> None:
    expected, _ = ranks(saved[0], across, tmp_path / "c", saved[1])[0]
    found, _ = ranks(loaded[0], across, tmp_path / "c", loaded[1])[0]
    # In bf16 the loss itself has eight bits.
    assert found == pytest.approx(expected, abs=1e-5 if "precision" not in saved[1] else 5e-2)


def written_bytes(folder: Path, stage: int) -> tuple[int, dict[str, int]]:
    model, optimizer = make(0, stage=stage)
    train(model, optimizer, 0, 1)
    before = zf.ledger(model).snapshot()["comm_bytes"]
    zf.save(model, optimizer, folder)
    after = zf.ledger(model).snapshot()["comm_bytes"]
    zf.close(model)
    return (folder / "save-00000001" / f"rank-{dist.get_rank():05d}.safetensors").stat().st_size, {
        operation: sent - before.get(operation, 0) for operation, sent in after.items()
    }


@pytest.mark.parametrize("stage", [0, 3])
def test_each_rank_writes_its_part_and_nothing_is_gathered(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    found = ranks(3, written_bytes, tmp_path, stage)
    sizes = [size for size, _ in found]
    assert max(sizes) < 1.35 * min(sizes)  # rank 0 has groups and buffers besides, and small tensors their names
    for _, sent in found:
        assert sum(sent.values()) < 300  # a few numbers to agree on, before writing and after
    pieces: dict[str, int] = {}
    for rank in range(3):
        for name, tensor in load_file(tmp_path / "save-00000001" / f"rank-{rank:05d}.safetensors").items():
            key = name.split("/", 2)[2] if name.startswith("piece/") else name
            pieces[key] = pieces.get(key, 0) + tensor.numel()
    model = Odd()
    for name, parameter in model.named_parameters():
        assert pieces[f"model/{name}"] == parameter.numel()
    assert pieces["model/seen"] == 1


def adapters(folder: Path, *, base_seed: int, dtype: str | None = None) -> str:
    torch.manual_seed(base_seed)
    model = Odd().requires_grad_(False)
    adapter = nn.Linear(18, 31, bias=False)
    torch.manual_seed(9)
    nn.init.zeros_(adapter.weight)
    model.head = adapter
    model, optimizer = zf.prepare(model, torch.optim.AdamW([adapter.weight]), stage=3, precision=dtype)
    if not folder.exists():
        train(model, optimizer, 0, 2)
        zf.save(model, optimizer, folder, trainable_only=True)
    else:
        zf.load(model, optimizer, folder)
    found = weights(model)["head.weight"].float().sum().item()
    zf.close(model)
    return f"{found:.7f}"


def test_adapters_are_saved_alone_and_know_their_base(ranks: RankPool, tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    first = ranks(2, adapters, folder, base_seed=0)
    total = sum(file.stat().st_size for file in folder.glob("*/*.safetensors"))
    assert total < 50_000  # three times the adapter, random states, names
    assert ranks(3, adapters, folder, base_seed=0)[0] == first[0]
    (message, *_) = ranks(2, raised, adapters, folder, base_seed=1)
    assert "trained on another base: 'tokens.weight' has other values" in message


def compiled(folder: Path) -> bool:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))
    model[0] = torch.compile(model[0], backend="eager")
    model = zf.shard(model, stage=3)
    zf.save(model, None, folder)
    zf.close(model)
    plain = zf.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(2))), stage=1)
    zf.load(plain, None, folder)
    zf.close(plain)
    return torch.equal(plain[0].weight, model[0].weight)


def test_compiled_and_other_models_share_names(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks(2, compiled, tmp_path) == [True, True]


def folders(path: Path) -> list[Any]:
    model = zf.shard(nn.Linear(8, 8), stage=3)
    seen: list[Any] = []
    for step in range(4):
        zf.save(model, None, path, tag=f"step-{step}", keep=2, background=step % 2 == 1)
    zf.save(model, None, path, tag="step-3", extra={"again": True}, keep=2)  # the same name: replaced
    dist.barrier()
    seen.append(sorted(entry.name for entry in path.iterdir()))
    seen.append(zf.load(model, None, path))
    zf.close(model)
    return seen


def test_old_checkpoints_go_and_the_latest_is_found(ranks: RankPool, tmp_path: Path) -> None:
    for seen in ranks(2, folders, tmp_path):
        assert seen == [["latest", "step-2", "step-3"], {"again": True}]
    manifest = json.loads((tmp_path / "step-3" / "manifest.json").read_text())
    assert manifest["about"]["world"] == 2
