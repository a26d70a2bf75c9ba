"""Ground truth: the same weights as DistributedDataParallel with the plain torch optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import largest_difference, train_ddp, train_zerofold

import zerofold as zf

STAGES = (0, 1, 2, 3)

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-3),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-3),
    "lion": lambda p: zf.Lion(p, lr=1e-3, weight_decay=0.1),
    "lion_foreach": lambda p: zf.Lion(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "adamw_eps": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-4),
}


def against_ddp(name: str, steps: int, **settings: Any) -> dict[int, tuple[float, float]]:
    """Per stage: the largest difference of a weight and of a loss from DDP's."""
    shared = {k: settings[k] for k in ("accumulate", "clip", "model_options") if k in settings}
    weights, losses = train_ddp(OPTIMIZERS[name], steps, **shared)
    found = {}
    for stage in STAGES:
        ours, our_losses = train_zerofold(OPTIMIZERS[name], steps, stage=stage, **settings)
        loss_difference = max(abs(a - b) for a, b in zip(losses, our_losses, strict=True))
        found[stage] = (largest_difference(weights, ours), loss_difference)
    return found


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if "fused" not in name and "eps" not in name])
def test_two_ranks_equal_ddp_to_the_bit(ranks: Any, name: str) -> None:
    for per_stage in ranks(2, against_ddp, name, 10):
        assert per_stage == dict.fromkeys(STAGES, (0.0, 0.0))


@pytest.mark.parametrize(
    ("name", "clip"), [("adamw_fused", None), ("adamw_fused", 0.05), ("adamw", 0.05), ("sgd", 0.05)]
)
def test_fused_kernels_and_a_binding_clip_stay_within_1e6(ranks: Any, name: str, clip: float | None) -> None:
    for per_stage in ranks(2, against_ddp, name, 10, clip=clip, model_options={"key_bias": False}):
        assert all(weights <= 1e-6 for weights, _ in per_stage.values()), per_stage


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("name", ["sgd", "adamw_eps"])
def test_more_ranks_stay_within_1e6_of_ddp(ranks: Any, world: int, name: str) -> None:
    for per_stage in ranks(world, against_ddp, name, 10):
        assert all(weights <= 1e-6 for weights, _ in per_stage.values()), per_stage


@pytest.mark.parametrize("world", [3, 4])
def test_losses_stay_within_1e5_at_the_usual_epsilon(ranks: Any, world: int) -> None:
    for per_stage in ranks(world, against_ddp, "adamw", 10):
        assert all(losses <= 1e-5 for _, losses in per_stage.values()), per_stage


def stages_among_each_other(name: str) -> list[float]:
    reference, _ = train_zerofold(OPTIMIZERS[name], 10, stage=1)
    return [largest_difference(reference, train_zerofold(OPTIMIZERS[name], 10, stage=s)[0]) for s in (2, 3)]


@pytest.mark.parametrize("world", [3, 4])
def test_stages_1_2_3_give_the_same_bits(ranks: Any, world: int) -> None:
    for differences in ranks(world, stages_among_each_other, "adamw"):
        assert differences == [0.0, 0.0]


def with_and_without_overlap(stage: int, settings: dict[str, Any]) -> float:
    first, _ = train_zerofold(OPTIMIZERS["adamw"], 6, stage=stage, **settings)
    second, _ = train_zerofold(OPTIMIZERS["adamw"], 6, stage=stage, overlap=False, **settings)
    return largest_difference(first, second)


@pytest.mark.parametrize(
    "settings", [{}, {"buffer_bytes": 4096}, {"model_options": {"layers": 6, "checkpoint": "non_reentrant"}}]
)
@pytest.mark.parametrize("stage", STAGES)
def test_overlap_changes_no_bit(ranks: Any, stage: int, settings: dict[str, Any]) -> None:
    assert ranks(3, with_and_without_overlap, stage, settings) == [0.0] * 3


@pytest.mark.parametrize("checkpoint", ["reentrant", "non_reentrant"])
def test_activation_checkpointing_equals_ddp(ranks: Any, checkpoint: str) -> None:
    for per_stage in ranks(2, against_ddp, "adamw", 4, model_options={"checkpoint": checkpoint}):
        assert per_stage == dict.fromkeys(STAGES, (0.0, 0.0))


def test_accumulation_under_no_sync_equals_ddp(ranks: Any) -> None:
    for per_stage in ranks(2, against_ddp, "adamw", 4, accumulate=3):
        assert per_stage == dict.fromkeys(STAGES, (0.0, 0.0))


def test_accumulation_without_no_sync_stays_within_1e6(ranks: Any) -> None:
    for per_stage in ranks(2, against_ddp, "adamw_eps", 4, accumulate=3, use_no_sync=False):
        assert all(weights <= 1e-6 for weights, _ in per_stage.values()), per_stage


def test_one_rank_runs_the_same_code(ranks: Any) -> None:
    for per_stage in ranks(1, against_ddp, "adamw", 4):
        assert per_stage == dict.fromkeys(STAGES, (0.0, 0.0))
