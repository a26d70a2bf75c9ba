"""16-bit compute with fp32 masters: against the same thing written by hand with torch, in every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS: list[Any] = [0, 1, 2, 3, "dp", (1, "whole"), (2, "whole"), (3, "whole"), "hsdp", "hpz"]
STEPS = 4


def settings_of(row: Any) -> dict[str, Any]:
    stage, cut = row if isinstance(row, tuple) else (row, None)
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2)) if stage in ("hsdp", "hpz") else None
    return {"stage": stage, "cut": cut, "mesh": mesh}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4, fused=True)


def data(count: int, device: str) -> list[tuple[Tensor, ...]]:
    return [tuple(tensor.to(device) for tensor in batch) for batch in batches(count)]


def by_hand(
    make: Any,
    dtype: torch.dtype,
    *,
    micro_batches: int = 1,
    clip: float | None = None,
    device: str = "cpu",
    loss_scale: float = 1.0,
) -> list[Tensor]:
    """Masters and a 16-bit copy for compute; gradients added up and averaged over ranks in fp32."""
    masters = [p.detach().clone() for p in make_model().to(device).parameters()]
    model, optimizer = make_model().to(device, dtype), make(masters)
    copies = list(model.parameters())
    for number, batch in enumerate(data(STEPS * micro_batches, device)):
        with torch.no_grad():
            for copy, master in zip(copies, masters, strict=True):
                copy.copy_(master)
        (model(*batch).float() * loss_scale).backward()
        for copy, master in zip(copies, masters, strict=True):
            assert copy.grad is not None
            gradient = copy.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            copy.grad = None
        if (number + 1) % micro_batches == 0:
            for master in masters:
                dist.all_reduce(master.grad)
                master.grad.div_(dist.get_world_size())  # type: ignore[union-attr]
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(masters, clip)
            optimizer.step()
            optimizer.zero_grad()
    return masters


def by_zerofold(
    make: Any,
    row: Any,
    precision: Any,
    *,
    micro_batches: int = 1,
    no_sync: bool = False,
    device: str = "cpu",
    **settings: Any,
) -> list[Tensor]:
    model = make_model().to(device)
    model, optimizer = zf.prepare(model, make(model.parameters()), precision=precision, **settings_of(row), **settings)
    for number, batch in enumerate(data(STEPS * micro_batches, device)):
        is_last = (number + 1) % micro_batches == 0
        if no_sync and not is_last:
            with zf.no_sync(model):
                model(*batch).backward()
        else:
            model(*batch).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
    zf.close(model)
    return [p.detach() for p in model.parameters()]


def fp16_by_hand() -> list[Tensor]:
    """The same with a loss scale of 256, taken out of the gradients in fp32."""

    def scaled(parameters: Any) -> torch.optim.Optimizer:
        def unscale(*_: Any) -> None:
            for parameter in parameters:
                parameter.grad.div_(256.0)

        optimizer = sgd(parameters)
        optimizer.register_step_pre_hook(unscale)
        return optimizer

    return by_hand(scaled, torch.float16, loss_scale=256.0)


def fp16_rows_against_by_hand() -> dict[str, float]:
    expected, found = fp16_by_hand(), {}
    scale = zf.LossScale(static=256.0)
    for row in ROWS:
        policy = zf.Precision(parameters=torch.float16, loss_scale=scale)
        found[f"fp32 wire {row}"] = largest_difference(expected, by_zerofold(sgd, row, policy))
    for stage in (0, 2, 3):
        policy = zf.Precision(parameters=torch.float16, reduction=torch.float16, loss_scale=scale)
        found[f"fp16 wire {stage}"] = largest_difference(expected, by_zerofold(sgd, stage, policy))
    return found


def test_every_row_in_fp16_equals_a_loss_scale_by_hand(ranks: Any) -> None:
    """Weights move by 2e-2; a scale left in, or taken out twice, would show as 256 times as much or as little."""
    for found in ranks(2, fp16_rows_against_by_hand):
        assert all(difference <= (5e-5 if "fp16 wire" in name else 2e-6) for name, difference in found.items()), found


def rows_against_by_hand(device: str = "cpu", rows: Any = tuple(ROWS)) -> dict[str, float]:
    found = {}
    expected_sgd = by_hand(sgd, BF16, device=device)
    expected_adamw = by_hand(adamw, BF16, clip=0.5, device=device)
    for row in rows:
        weights = by_zerofold(sgd, row, "bf16", device=device)
        found[f"sgd {row}"] = largest_difference(expected_sgd, weights)
        weights = by_zerofold(adamw, row, "bf16", clip=0.5, device=device)
        found[f"adamw {row}"] = largest_difference(expected_adamw, weights)
    return found


def test_every_row_equals_masters_by_hand(ranks: Any) -> None:
    for found in ranks(2, rows_against_by_hand):
        assert all(found[f"sgd {row}"] == 0 for row in ROWS), found  # torch's own SGD, so the same bits
        assert all(found[f"adamw {row}"] <= 1e-6 for row in ROWS), found  # another kernel, another sum for the norm


def accumulating() -> dict[str, float]:
    """Against micro-batches added up in fp32 by hand."""
    found = {}
    expected = by_hand(sgd, BF16, micro_batches=3)
    for stage in (0, 1, 2, 3):
        for name, settings in {
            "plain": {},
            "no_sync": {"no_sync": True},
            "accumulate": {"accumulate": 3},
        }.items():
            weights = by_zerofold(sgd, stage, "bf16", micro_batches=3, **settings)
            found[f"{stage} {name}"] = largest_difference(expected, weights)
    return found


def test_micro_batches_add_up_in_fp32(ranks: Any) -> None:
    for found in ranks(2, accumulating):
        assert all(difference <= 1e-7 for difference in found.values()), found


def one_large_batch(precision: str) -> dict[str, float]:
    """The largest difference between four micro-batches of two and one batch of eight, over the size of an update."""

    def train(stage: int, micro_batches: int, no_sync: bool) -> list[Tensor]:
        model = make_model()
        model, optimizer = zf.prepare(model, sgd(model.parameters()), stage=stage, precision=precision)
        tokens, targets = (torch.cat(parts) for parts in zip(*batches(4), strict=True))
        inputs, outputs = tokens.chunk(micro_batches), targets.chunk(micro_batches)
        for number, batch in enumerate(zip(inputs, outputs, strict=True)):
            loss = model(*batch) / micro_batches
            if no_sync and number < micro_batches - 1:
                with zf.no_sync(model):
                    loss.backward()
            else:
                loss.backward()
        optimizer.step()
        zf.close(model)
        return [p.detach() for p in model.parameters()]

    found = {}
    start = [p.detach() for p in make_model().parameters()]
    for stage in (0, 1, 2, 3):
        whole = train(stage, 1, no_sync=False)
        size = largest_difference(start, whole)
        for no_sync in (False, True):
            found[f"{stage} {no_sync}"] = largest_difference(whole, train(stage, 4, no_sync)) / size
    return found


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-5), ("bf16", 0.02)])
def test_micro_batches_equal_one_large_batch(ranks: Any, precision: str, bound: float) -> None:
    """In bf16 forwards themselves round differently by batch; sums that got lost would show as a quarter or more."""
    for found in ranks(2, one_large_batch, precision):
        assert all(difference <= bound for difference in found.values()), found


def same_bits(precision: str) -> dict[str, float]:
    weights = {stage: by_zerofold(adamw, stage, precision, clip=0.5) for stage in (1, 2, 3)}
    return {str(stage): largest_difference(weights[1], weights[stage]) for stage in (2, 3)}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_stages_1_to_3_have_the_same_bits(ranks: Any, precision: str) -> None:
    for found in ranks(3, same_bits, precision):
        assert set(found.values()) == {0.0}, found


def ledgers(world: int) -> dict[str, dict[str, float]]:
    """Bytes by state over Ψ, before the second step, with gradients and moments there."""
    half = zf.Precision(parameters=BF16, reduction=BF16, accumulation=BF16)
    found = {}
    for name, precision in {"fp32 gradients": "bf16", "bf16 gradients": half}.items():
        for stage in (0, 1, 2, 3):
            model = make_model(width=64)
            model, optimizer = zf.prepare(model, adamw(model.parameters()), stage=stage, precision=precision)
            for batch in batches(2):
                optimizer.zero_grad()
                model(*batch).backward()
                state = zf.ledger(model).snapshot()
                optimizer.step()
            psi = state["psi"]
            bytes_by_state = {state_name: nbytes / psi for state_name, nbytes in state["state_bytes"].items()}
            bytes_by_state["reduced"] = sum(
                state["comm_bytes"].get(operation, 0) for operation in ("reduce_scatter", "all_reduce")
            ) / (2 * psi)
            found[f"{name} {stage}"] = bytes_by_state
            zf.close(model)
    return found


def test_the_ledger_shows_what_each_choice_costs(ranks: Any) -> None:
    world = 4
    cut = (world - 1) / world
    for found in ranks(world, ledgers, world):
        for name, gradient in (("fp32 gradients", 4), ("bf16 gradients", 2)):
            for stage, whole in ((0, 1.0), (1, 1 / world), (2, 1 / world), (3, 1 / world)):
                line = found[f"{name} {stage}"]
                expected = {
                    "parameters": 0.0 if stage == 3 else 2.0,  # at stage 3 no 16-bit shard beside the master
                    "gradients": gradient * whole,
                    "optimizer": 12 * whole,
                    "reduced": gradient * cut * (2 if stage == 0 else 1),
                }
                for state, nbytes in expected.items():
                    assert line[state] == pytest.approx(nbytes, rel=0.04, abs=0.01), (name, stage, state, line)


def reduced_states(options: dict[str, Any], stage: int) -> tuple[float, float, int]:
    """Losses at the end of a run with fewer state bytes and of one without, and the bytes of optimizer states."""

    def train(precision: zf.Precision) -> tuple[float, int]:
        model = make_model()
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = zf.prepare(model, optimizer, stage=stage, precision=precision)
        (batch,) = batches(1)
        for _ in range(30):
            loss = model(*batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        states = zf.ledger(model).snapshot()["state_bytes"]["optimizer"]
        zf.close(model)
        return loss.item(), states

    plain, _ = train(zf.Precision(parameters=BF16))
    reduced, states = train(zf.Precision(parameters=BF16, **options))
    return plain, reduced, states


@pytest.mark.parametrize(
    ("options", "nbytes", "stage"),
    [({"moments": BF16}, 8, 3), ({"master": BF16}, 8, 3), ({"moments": BF16, "master": BF16}, 4, 0)],
)
def test_states_in_bf16_train_with_stochastic_rounding(ranks: Any, options: Any, nbytes: int, stage: int) -> None:
    for plain, reduced, states in ranks(2, reduced_states, options, stage):
        assert plain < 3.0  # from ln(96) = 4.6, so something was learned
        assert abs(reduced - plain) < 0.15
        # A bf16 master is the parameter itself, so only the moments count as optimizer states.
        psi = sum(p.numel() for p in make_model().parameters())
        assert states == pytest.approx(nbytes * psi * (1 if stage == 0 else 0.5), rel=0.05)


def norms() -> dict[str, float]:
    """Relative distance of the returned norm, and of clipped gradients, from torch's on one process."""
    found = {}
    world = dist.get_world_size()
    for stage in (0, 1, 2, 3):
        reference, model = make_model(), zf.shard(make_model(), stage=stage)
        for rank in range(world):
            (reference(*next(iter(batches(1, rank=rank)))) / world).backward()
        model(*next(iter(batches(1)))).backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        found[f"norm {stage}"] = abs(zf.clip_grad_norm_(model, 0.1) / expected - 1).item()
        torch.nn.utils.clip_grad_value_(reference.parameters(), 1e-3)
        zf.clip_grad_value_(model, 1e-3)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            whole = zf.full_grad(mine)
            assert whole is not None
            assert theirs.grad is not None
            found[f"value {stage}"] = max(found.get(f"value {stage}", 0.0), (whole - theirs.grad).abs().max().item())
        zf.close(model)
    return found


def test_norm_and_clipping_equal_torch_on_one_process(ranks: Any) -> None:
    for found in ranks(3, norms):
        assert all(distance <= 1e-6 for distance in found.values()), found


def clipped_by_value(precision: Any) -> float:
    """A step with clip_value= against a clamp by hand."""
    model, twin = make_model(), zf.shard(make_model(), stage=2, precision=precision)
    model, optimizer = zf.prepare(model, sgd(model.parameters()), stage=2, precision=precision, clip_value=1e-3)
    other = zf.attach(twin, sgd(twin.parameters()))
    (batch,) = batches(1)
    for run, stepped in ((model, optimizer), (twin, other)):
        run(*batch).backward()
        if run is twin:
            zf.clip_grad_value_(twin, 1e-3)
        stepped.step()
    zf.close(model)
    zf.close(twin)
    return largest_difference(list(model.parameters()), list(twin.parameters()))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_a_step_clips_by_value(ranks: Any, precision: Any) -> None:
    assert ranks(2, clipped_by_value, precision) == [0.0, 0.0]


def clipped_once(precision: Any) -> float:
    """Two optimizers, of which both clip: against one call of clip_grad_norm_ before both steps."""

    def train(clip: float | None) -> list[Tensor]:
        model = zf.shard(make_model(), stage=2, precision=precision)
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        first = torch.optim.SGD(others, lr=0.1)
        second = torch.optim.AdamW(matrices, lr=1e-3, eps=1e-2)
        zf.attach(model, first, second, clip=clip)
        for batch in batches(3):
            model(*batch).backward()
            if clip is None:
                zf.clip_grad_norm_(model, 0.1)
            for optimizer in (first, second):
                optimizer.step()
            model.zero_grad()
        zf.close(model)
        return [p.detach() for p in model.parameters()]

    return largest_difference(train(None), train(0.1))


@pytest.mark.parametrize("precision", [None, "bf16"])
def test_two_optimizers_clip_once(ranks: Any, precision: Any) -> None:
    assert max(ranks(2, clipped_once, precision)) <= 1e-6
