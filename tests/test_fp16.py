"""fp16 under a plain loss.backward(): the loss scale, steps that are skipped, and torch's own GradScaler."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model
from torch import Tensor, nn

import zerofold as zf

FP16 = torch.float16


class TinyGradients(nn.Module):
    """Its gradients are near 1e-9: zero in fp16, whose smallest number is 6e-8."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def tiny_gradients(stage: int) -> dict[str, float]:
    """How far the weights got."""
    found = {}
    for name, scale in {
        "none": zf.LossScale(static=1.0),
        "static": zf.LossScale(static=2.0**14),
        "dynamic": zf.LossScale(),
    }.items():
        model = TinyGradients()
        policy = zf.Precision(parameters=FP16, loss_scale=scale)
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-16, weight_decay=0)
        model, optimizer = zf.prepare(model, optimizer, stage=stage, precision=policy)
        for _ in range(5):
            (1e-9 * model(torch.ones(1, 8))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        zf.close(model)
        found[name] = model.layer.weight.abs().max().item()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_gradients_too_small_for_fp16_train_with_a_scale(ranks: Any, stage: int) -> None:
    for found in ranks(2, tiny_gradients, stage):
        assert found["none"] == 0
        assert found["static"] == pytest.approx(0.5, rel=0.01)  # five steps of AdamW
        assert found["dynamic"] == pytest.approx(0.5, rel=0.01)


def scripted(stage: Any, script: str, options: dict[str, Any]) -> dict[str, Any]:
    """A run in which a gradient overflows on rank 1 where the script says 'x'; a mark for anything that changed."""
    model = make_model()
    policy = zf.Precision(parameters=FP16, loss_scale=zf.LossScale(**options))
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision=policy, scheduler=scheduler)
    average = zf.EMA(model, decay=0.5)
    scales, skips, changed = [], [], []

    def everything() -> list[Any]:
        states = [v for state in optimizer.state.values() for v in state.values()]
        tensors = [*zf_states(states), *(t.clone() for t in zf_states(list(average.state_dict().values())))]
        with zf.full_params(model):
            tensors += [p.detach().clone() for p in model.parameters()]
        return [*tensors, torch.tensor(optimizer.param_groups[0]["lr"])]

    for step, batch in zip(script, batches(len(script)), strict=True):
        before = everything()
        loss = model(*batch)
        if step == "x" and dist.get_rank() == 1:
            loss = loss * float("inf")
        loss.backward()
        optimizer.step()
        info = zf.last_step(model)
        assert info is not None
        optimizer.zero_grad()
        after = everything()
        same = len(before) == len(after) and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        scales.append(info.loss_scale)
        skips.append("x" if info.skipped else ".")
        changed.append("." if same else "c")
    zf.close(model)
    return {
        "scales": scales,
        "skips": "".join(skips),
        "changed": "".join(changed),
        "total": info.skipped_total,
        "name": info.non_finite,
    }


def zf_states(states: list[Any]) -> list[Tensor]:
    return [(s.local if hasattr(s, "local") else s).detach().clone() for s in states if isinstance(s, Tensor)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_skipped_step_changes_nothing_on_any_rank(ranks: Any, stage: int) -> None:
    script = "..x.xx...x"
    options = {"initial_power": 8, "window": 2, "hysteresis": 2}
    results = ranks(2, scripted, stage, script, options)
    for found in results:
        assert found["skips"] == script
        assert found["changed"] == script.replace(".", "c").replace("x", ".")
        # DeepSpeed's rules: the first overflow is borne, later ones halve; the third clean step in a row doubles.
        assert found["scales"] == [256, 256, 256, 256, 256, 128, 64, 64, 64, 128]
        assert found["total"] == 4
        assert found["name"] is not None
    assert results[0] == results[1]


def at_the_minimum(precision: Any) -> tuple[str, str]:
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=2, precision=precision)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in batches(30):
                (model(*batch) * float("nan")).backward()
                optimizer.step()
                optimizer.zero_grad()
    except zf.LossScaleError as error:
        zf.close(model)
        return str(error), str(caught[0].message) if caught else ""
    return "went on", ""


@pytest.mark.parametrize(
    ("precision", "skipped"),
    [
        (zf.Precision(parameters=FP16, loss_scale=zf.LossScale(initial_power=2, hysteresis=1, patience=3)), 3),
        ("bf16", 20),
        ("fp32", 20),
        (None, 20),
    ],
)
def test_training_stops_when_no_scale_helps(ranks: Any, precision: Any, skipped: int) -> None:
    (first, warned), (second, silent) = ranks(2, at_the_minimum, precision)
    assert first == second
    assert f"{skipped} steps in a row had infinite or NaN gradients" in first
    assert "learning rate" in first
    assert "tokens.weight" in first
    assert "step skipped: the gradient of 'tokens.weight' is infinite or NaN" in warned
    assert silent == ""  # one rank speaks for all


class WithAuxiliary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.memory: Tensor | None = None
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x)
        if self.memory is not None:
            hidden = hidden + self.memory
        self.memory = hidden
        self.first.auxiliary = hidden.float().pow(2).mean()
        self.kept = [hidden.float().pow(4).mean()]
        out = self.second(hidden)
        return out.float().pow(2).mean(), out


def gradients_of(kind: str, precision: Any, stage: int) -> list[Tensor]:
    torch.manual_seed(0)
    model = zf.shard(WithAuxiliary(), stage=stage, precision=precision)
    x = torch.ones(2, 8, requires_grad=True)
    before = x * 3.0  # the model is not the first thing that autograd knows
    loss, out = model(before)
    if kind == "both outputs":  # one was made from the other: each gradient is scaled once
        loss = loss + out.float().sum()
    if kind == "auxiliary":
        loss = loss + model.first.auxiliary + model.kept[0]
    if kind == "memory":  # of a first forward, used inside a second
        loss, _ = model(before)
    loss /= 2
    loss.backward()
    assert x.grad is not None
    found = [zf.full_grad(p) for p in model.parameters()]
    zf.close(model)
    return [x.grad, *(gradient.float() for gradient in found if gradient is not None)]


def scaled_once(kind: str, stage: int) -> float:
    plain = gradients_of(kind, "fp32", stage)
    scaled = gradients_of(kind, zf.Precision(parameters=FP16, loss_scale=zf.LossScale(static=1024.0)), stage)
    return max(((a - b).norm() / a.norm()).item() for a, b in zip(plain, scaled, strict=True))


@pytest.mark.parametrize("kind", ["loss", "both outputs", "auxiliary", "memory"])
@pytest.mark.parametrize("stage", [1, 3])
def test_gradients_are_scaled_on_their_way_in_and_nowhere_else(ranks: Any, stage: int, kind: str) -> None:
    assert max(ranks(1, scaled_once, kind, stage)) < 5e-3


def misuses(stage: int) -> dict[str, str]:
    found = {}

    def note(name: str, run: Any) -> None:
        model = zf.shard(WithAuxiliary(), stage=stage, precision="fp16")
        try:
            run(model)
        except RuntimeError as error:
            found[name] = str(error)
        zf.close(model)

    def past_the_outputs(model: Any) -> None:
        kept = []
        handle = model.second.register_forward_hook(lambda module, args, output: kept.append(output.float().sum()))
        model(torch.ones(1, 8))
        handle.remove()
        kept[0].backward()

    def twice(model: Any) -> None:
        loss, _ = model(torch.ones(1, 8, requires_grad=True))
        loss.backward(create_graph=True)

    note("past", past_the_outputs)
    note("create_graph", twice)
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_what_a_scale_cannot_see_is_said(ranks: Any, stage: int) -> None:
    (found,) = ranks(1, misuses, stage)
    assert "past its outputs" in found["past"]
    assert "create_graph" in found["create_graph"]


def grad_scaler(stage: Any, fused: bool, clip: float | None) -> tuple[list[bool], float, list[float]]:
    """autocast and torch.amp.GradScaler around a prepared model: which steps changed weights; the distance from DDP."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, run: Any) -> tuple[list[bool], list[float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        moved, scales = [], []
        for step, (tokens, targets) in enumerate(batches(4)):
            before = weights_of(model)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = run(tokens, targets)
            if step == 2 and dist.get_rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clip is not None and run is not model:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            moved.append(largest_difference(before, weights_of(model)) > 0)
            scales.append(scaler.get_scale())
        return moved, scales

    reference = make_model()
    sgd = torch.optim.AdamW(reference.parameters(), lr=1e-3, eps=1e-4, fused=fused)
    train(reference, sgd, nn.parallel.DistributedDataParallel(reference))
    model = make_model()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=fused)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, clip=clip if fused else None)
    moved, scales = train(model, optimizer, model)
    zf.close(model)
    return moved, largest_difference(list(reference.parameters()), list(model.parameters())), scales


def weights_of(model: nn.Module) -> list[Tensor]:
    if any(isinstance(p, zf.ShardedParameter) for p in model.parameters()):
        return [zf.full(p) for p in model.parameters()]
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("fused", "clip"), [(False, None), (True, None), (True, 0.1)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_autocast_with_grad_scaler(ranks: Any, stage: int, fused: bool, clip: float | None) -> None:
    for moved, difference, scales in ranks(2, grad_scaler, stage, fused, clip):
        assert moved == [True, True, False, True]
        assert scales == [1024.0, 1024.0, 512.0, 512.0]
        assert difference <= 1e-6


def one_infinite_row(stage: int, kind: str) -> tuple[bool, bool]:
    """An overflow that only the last rank's piece has: whether weights moved here, and whether all ranks agree."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision=None if kind == "scaler" else kind)
    before = zf.full(model.weight)
    out = model(torch.ones(2, 64)).float()
    loss = out[:, :-1].sum() + out[:, -1].sum() * float("inf")
    if kind == "scaler":
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
    else:
        loss.backward()
        optimizer.step()
    after = zf.full(model.weight)
    everyone = [torch.empty_like(after) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, after)
    zf.close(model)
    return not torch.equal(before, after), all(torch.equal(other, after) for other in everyone)


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("kind", ["scaler", "bf16"])
@pytest.mark.parametrize("stage", [1, 3])
def test_one_rank_sees_the_overflow_and_all_skip(ranks: Any, stage: int, kind: str) -> None:
    assert ranks(2, one_infinite_row, stage, kind) == [(False, True)] * 2
