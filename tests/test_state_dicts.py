"""state_dict and load_state_dict of sharded models, and torch.distributed.checkpoint on top of them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.models import TinyGPT
from tests.ranks import RankPool
from torch import Tensor, nn

import zerofold as zf


def data_of(step: int) -> Tensor:
    return torch.randint(0, 64, (12, 16), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: Any, steps: range, *, whole: bool = False) -> None:
    for step in steps:
        x = data_of(step) if whole else data_of(step).chunk(dist.get_world_size())[dist.get_rank()]
        model(x, x.roll(1, -1)).backward()
        optimizer.step()
        optimizer.zero_grad()


def make(lr: float, **settings: Any) -> Any:
    torch.manual_seed(0)
    model = TinyGPT(key_bias=False, layers=2)
    return zf.prepare(model, torch.optim.AdamW(model.parameters(), lr=lr), **settings)


def from_ordinary_ones(stage: int, precision: str | None) -> tuple[bool, float, set[str]]:
    """Weights and optimizer states of plain torch, loaded and trained on beside it."""
    torch.manual_seed(1)
    reference = TinyGPT(key_bias=False, layers=2)
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    train(reference, plain, range(3), whole=True)
    model, optimizer = make(1.0, stage=stage, precision=precision)
    model.load_state_dict(reference.state_dict())
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    expected = dict(reference.named_parameters())
    equal = all(torch.equal(zf.full(p), expected[name]) for name, p in model.named_parameters())
    kinds = {type(value).__name__ for value in model.state_dict().values()}
    train(model, optimizer, range(3, 5))
    train(reference, plain, range(3, 5), whole=True)
    gap = max((zf.full(p) - expected[name]).abs().max().item() for name, p in model.named_parameters())
    zf.close(model)
    return equal, gap, kinds


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (1, None), (3, None), (2, "bf16"), (3, "bf16")])
def test_ordinary_state_dicts_load(ranks: RankPool, stage: int, precision: str | None) -> None:
    for equal, gap, kinds in ranks(3, from_ordinary_ones, stage, precision):
        assert equal
        assert gap < (1e-6 if precision is None else 5e-3)  # two updates of 1e-2, from gradients with 8 bits
        assert kinds == ({"Tensor"} if precision is None and stage < 3 else {"ShardedTensor"})


def saved_with_dcp(folder: str, stage: int) -> list[Tensor]:
    model, optimizer = make(1e-2, stage=stage)
    train(model, optimizer, range(2))
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)
    train(model, optimizer, range(2, 4))
    found = [zf.full(p) for p in model.parameters()]
    zf.close(model)
    return found


def loaded_with_dcp(folder: str, stage: int) -> list[Tensor]:
    model, optimizer = make(5e-3, stage=stage)
    train(model, optimizer, range(1))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    train(model, optimizer, range(2, 4))
    found = [zf.full(p) for p in model.parameters()]
    zf.close(model)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_torchs_distributed_checkpoint_saves_and_reshards(ranks: RankPool, tmp_path: Path, stage: int) -> None:
    expected = ranks(2, saved_with_dcp, str(tmp_path), stage)[0]
    for world, other in ((2, stage), (3, 3), (1, 0)):
        found = ranks(world, loaded_with_dcp, str(tmp_path), other)[0]
        bound = 0.0 if (world, other) == (2, stage) else 1e-6
        assert max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True)) <= bound


def around() -> list[Any]:
    """Wrong shapes, missing names, and a state dict taken while its unit is gathered."""
    model, optimizer = make(1e-2, stage=3, precision="bf16")
    whole = {name: zf.full(p) for name, p in model.named_parameters()}
    found: list[Any] = []
    try:
        model.load_state_dict({**whole, "head.weight": torch.zeros(3, 3)})
    except RuntimeError as error:
        found.append("size mismatch for head.weight" in str(error))
    del whole["head.weight"]
    found.append(model.load_state_dict(whole, strict=False).missing_keys)
    x = data_of(0)
    loss = model(x, x.roll(1, -1))
    state = model.state_dict()  # between forward and backward
    loss.backward()
    optimizer.step()
    found.append(torch.equal(zf.full(state["norm.weight"]), zf.full(model.norm.weight)))
    with zf.full_params(model):
        found.append({type(value) for value in model.state_dict().values()} == {Tensor})
    zf.close(model)
    return found


def test_what_torch_says_it_still_says(ranks: RankPool) -> None:
    assert ranks(2, around) == [[True, ["head.weight"], True, True]] * 2
