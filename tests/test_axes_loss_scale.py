"""Loss scaling over all axes: what overflows on one rank alone skips the step of all and lowers one scale."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from tests.test_3d import CUBE, Sizes, adamw, batch, loss_fn, made
from torch import Tensor

import zerofold as zf
from ranks import raised

STEPS, BAD = 6, 2
FIRST_SCALE = 2.0**10
PRECISIONS = {
    "fp16": zf.Precision(parameters=torch.float16, loss_scale=zf.LossScale(initial_power=10, hysteresis=1, window=100)),
    "bf16": zf.Precision(parameters=torch.bfloat16),
}
LAYER = "blocks.3.mlp_in.weight"
"""Of the last stage, and cut over the tensor axis."""


class Seen(NamedTuple):
    """By one rank, in each step."""

    losses: list[float]
    skipped: list[bool]
    scales: list[float]
    non_finite: list[str | None]
    changed: list[bool]  # any of its own weights


@cache
def alone() -> list[float]:
    """Losses of one process in fp32 that leaves the step out."""
    model = made("gpt")
    optimizer = adamw(model.parameters())
    losses = []
    for step in range(STEPS):
        tokens, target = batch(step)
        loss = loss_fn(model(tokens), target)
        loss.backward()
        if step != BAD:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def spoil_one_gradient(model: torch.nn.Module, mesh: zf.Mesh) -> list[float]:
    """On one rank of all. What the gradient is multiplied by is returned, to be changed."""
    factor = [1.0]
    is_last = all(mesh.coordinate[axis] == mesh.size(axis) - 1 for axis in ("tensor", "pipeline", "data"))
    if is_last:
        dict(model.named_parameters())[LAYER].register_hook(lambda gradient: gradient * factor[0])
    return factor


def trained(sizes: Sizes, stage: int, precision: str) -> Seen:
    torch.set_num_threads(1)
    mesh, model = zf.mesh(device="cpu", **sizes), made("gpt")
    zf.tensor_parallel(model, mesh)
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn) if mesh.pipeline > 1 else None
    factor = spoil_one_gradient(model, mesh)
    placed: Any = pipe or model
    options = {"mesh": mesh, "stage": stage, "precision": PRECISIONS[precision]}
    _, optimizer = zf.prepare(placed, adamw(placed.parameters()), **options)
    seen = Seen([], [], [], [], [])
    for step in range(STEPS):
        tokens, target = (t.chunk(mesh.data)[mesh.coordinate["data"]] for t in batch(step))
        before = weights(model)
        factor[0] = float("inf") if step == BAD else 1.0
        if pipe is not None:
            loss = pipe.step(tokens, target=target)
        else:
            loss = loss_fn(model(tokens), target)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        info = zf.last_step(model)
        assert info is not None
        seen.losses.append(loss.item())
        seen.skipped.append(info.skipped)
        seen.scales.append(info.loss_scale)
        seen.non_finite.append(info.non_finite)
        seen.changed.append(any(not torch.equal(a, b) for a, b in zip(weights(model), before, strict=True)))
    zf.close(model)
    return seen


def weights(model: torch.nn.Module) -> list[Tensor]:
    with zf.full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def assert_all_skip_one_step(found: list[Seen], data: int, precision: str) -> None:
    bad = [step == BAD for step in range(STEPS)]
    scales = [FIRST_SCALE / 2 if precision == "fp16" and step > BAD else FIRST_SCALE for step in range(STEPS)]
    for seen in found:
        assert seen.skipped == bad
        assert seen.changed == [not is_bad for is_bad in bad]
        assert seen.scales == (scales if precision == "fp16" else [1.0] * STEPS)
        assert seen.non_finite == [LAYER if is_bad else None for is_bad in bad]
    # Ranks with the same samples have the same loss; one of each are the first in the pipeline and tensor axes.
    shares = sorted({tuple(seen.losses) for seen in found})
    assert len(shares) == data
    mean = [sum(losses) / data for losses in zip(*shares, strict=True)]
    assert mean == pytest.approx(alone(), abs=0.03)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stage", [0, 1, 3])
@pytest.mark.parametrize("axis", ["tensor", "pipeline"])
def test_two_ranks(ranks: Any, axis: str, stage: int, precision: str) -> None:
    assert_all_skip_one_step(ranks(2, trained, {axis: 2}, stage, precision), 1, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("axes", [("tensor", "pipeline"), ("data", "tensor")], ids="-".join)
def test_four_ranks(ranks: Any, axes: tuple[str, str], precision: str) -> None:
    sizes = dict.fromkeys(axes, 2)
    assert_all_skip_one_step(ranks(4, trained, sizes, 2, precision), sizes.get("data", 1), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_cube(ranks: Any, precision: str) -> None:
    assert_all_skip_one_step(ranks(8, trained, CUBE, 3, precision), 2, precision)


def with_grad_scaler(stage: int, fused: bool) -> float:
    mesh, model = zf.mesh(tensor=2, device="cpu"), made("gpt")
    zf.tensor_parallel(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    model, optimizer = zf.prepare(model, optimizer, mesh=mesh, stage=stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    tokens, target = batch(0)
    try:
        scaler.scale(loss_fn(model(tokens), target)).backward()
        scaler.step(optimizer)
        scaler.update()
    finally:
        zf.close(model)
        assert getattr(optimizer, "_step_supports_amp_scaling", False) == fused
    return scaler.get_scale()


@pytest.mark.parametrize("fused", [False, True])
def test_a_grad_scaler_that_sees_a_part_of_the_gradients_is_refused(ranks: Any, fused: bool) -> None:
    for message in ranks(2, raised, with_grad_scaler, 0, fused):
        assert message.startswith("RuntimeError: torch.amp.GradScaler: at this stage, over a tensor or pipeline axis")
        assert "precision='fp16'" in message
    assert ranks(2, with_grad_scaler, 1, False) == [1024.0] * 2
