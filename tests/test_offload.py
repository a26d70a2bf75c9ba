"""States on the host and in a file: every placement trains to the bits of none, on real ranks."""

from __future__ import annotations

import json
import os
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import zerofold as zf
from zerofold import offloading
from zerofold.memory.disk_file import MAGIC
from zerofold.offload.budget import available

PLACES: dict[str, dict[str, Any]] = {
    "optimizer": {"optimizer": "host"},
    "all": {"optimizer": "host", "parameters": "host"},
    "gradients stay": {"optimizer": "host", "gradients": "device"},
    "half": {"optimizer": 0.5},
    "file": {"optimizer": "nvme"},
    "file, gradients too": {"optimizer": "nvme", "gradients": "nvme"},
    "file, parameters on the host": {"optimizer": "nvme", "parameters": "host"},
    "all in the file": {"optimizer": "nvme", "parameters": "nvme"},
    "gradients alone": {"optimizer": "device", "gradients": "host"},
}


class Block(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), Block(), Block(), nn.Linear(32, 16))


def prepared(offload: Any, *, device: str = "cpu", **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return zf.prepare(model, optimizer, units=Block, offload=offload, **options)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    first: int = 0,
    backwards: int = 1,
    device: str = "cpu",
) -> None:
    for step in range(first, first + steps):
        for part in range(backwards):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * step + part)).to(device)
            (model(batch).float() ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    faces = [p for group in optimizer.param_groups for p in group["params"]]
    found = [zf.full(p) for p in faces]
    return found + [zf.full(optimizer.state[p][name]) for p in faces for name in ("exp_avg", "exp_avg_sq")]


def result(offload: Any, *, backwards: int = 1, device: str = "cpu", **options: Any) -> list[Tensor]:
    options = {"clip": 0.5, "one_pass": True} | options
    model, optimizer = prepared(offload, accumulate=backwards, device=device, **options)
    train(model, optimizer, 3, backwards=backwards, device=device)
    found = states(model, optimizer)
    zf.close(model)
    return found


def places_that_differ(folder: str, stages: list[int], precisions: list[Any], backwards: int, few: bool) -> list[str]:
    """Each placement, or a few of them, against none, which must give the same bits."""
    wrong = []
    names = ("optimizer", "all", "file, gradients too", "all in the file") if few else PLACES
    for stage in stages:
        for precision in precisions:
            options: dict[str, Any] = {"stage": stage, "precision": precision, "backwards": backwards}
            if stage == 0 and precision is None:  # nothing is cut there, so the one pass has nothing to work on
                continue
            expected = result(None, **options)
            for name in names:
                place = PLACES[name]
                if "parameters" in place and stage < 3:
                    continue
                offload = place | ({"path": folder} if "nvme" in place.values() else {})
                found = result(offload, **options)
                if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                    wrong.append(f"{name} at stage {stage}, {precision}")
    return wrong


@pytest.mark.parametrize(
    ("world", "stages", "precisions", "backwards", "few"),
    [
        (1, [3], ["bf16", None], 1, False),
        (1, [3], ["bf16"], 3, False),
        (2, [3], ["bf16"], 1, False),
        (2, [1, 2], ["bf16"], 1, True),
        (4, [3], ["bf16"], 1, True),
        (1, [0, 1, 2, 3], ["bf16", "fp32", None], 3, False),
        (2, [0, 1, 2, 3], ["bf16", None], 2, False),
        (4, [2, 3], ["bf16", None], 1, False),
    ],
)
def test_the_same_bits_wherever_the_states_are(
    ranks: Callable[..., list[Any]],
    tmp_path: Any,
    world: int,
    stages: list[int],
    precisions: list[Any],
    backwards: int,
    few: bool,
) -> None:
    assert ranks(world, places_that_differ, str(tmp_path), stages, precisions, backwards, few) == [[]] * world


def test_a_root_without_parameters_of_its_own(ranks: Any) -> None:
    assert ranks(1, trains_without_root) == [True]


def trains_without_root() -> bool:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model, optimizer = zf.prepare(
        model, torch.optim.AdamW(model.parameters()), stage=3, units=nn.Linear, offload={"optimizer": "auto"}
    )
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    found = zf.last_step(model) is not None
    zf.close(model)
    return found


def test_a_killed_runs_file_is_gone_before_room_is_looked_for(ranks: Any, tmp_path: Any) -> None:
    assert ranks(1, files_when_measured, tmp_path) == [[]]


def files_when_measured(folder: Path) -> list[str]:
    tag = "0123456789abcdef"
    about = {"format": MAGIC, "tag": tag, "host": socket.gethostname(), "pid": 1}
    (folder / f"zerofold-rank0-pid1-{tag}.states").write_text(json.dumps(about))
    found = []

    def measured(*args: Any) -> Any:
        found.extend(os.listdir(folder))
        return available(*args)

    with mock.patch.object(offloading, "available", measured), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, _ = prepared({"optimizer": "nvme", "path": folder}, stage=3)
    zf.close(model)
    return found


def checkpoint_across(folder: str) -> list[str]:
    """Saved from each tier, loaded into every other, and trained on: the same as without a break."""
    tiers: list[Any] = [None, {"optimizer": "host", "parameters": "host"}, {"optimizer": "nvme", "path": folder}]
    options: dict[str, Any] = {"stage": 3, "precision": "bf16", "clip": 0.5}
    model, optimizer = prepared(None, **options)
    train(model, optimizer, 4)
    expected = states(model, optimizer)
    zf.close(model)
    for position, tier in enumerate(tiers):
        model, optimizer = prepared(tier, **options)
        train(model, optimizer, 2)
        zf.save(model, optimizer, f"{folder}/{position}")
        zf.close(model)
    wrong = []
    for source in range(len(tiers)):
        for target, tier in enumerate(tiers):
            model, optimizer = prepared(tier, **options)
            zf.load(model, optimizer, f"{folder}/{source}")
            train(model, optimizer, 2, first=2)
            found = states(model, optimizer)
            zf.close(model)
            if not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)):
                wrong.append(f"from {source} to {target}")
    return wrong


def test_checkpoints_do_not_know_of_tiers(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2, checkpoint_across, str(tmp_path)) == [[]] * 2
