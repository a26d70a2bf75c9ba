"""16-bit compute with fp32 masters: against the same thing written by hand with torch, in every row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

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


class TwoParts(nn.Module):
    """A norm, a buffer and an auxiliary loss left on a module."""

    rotation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)
        self.register_buffer("rotation", torch.linspace(0, 1, 8))
        self.seen: dict[str, torch.dtype] = {}
        self.norm.register_forward_hook(lambda module, args, output: self._see(args[0], module.weight, output))

    def _see(self, given: Tensor, weight: Tensor, output: Tensor) -> None:
        self.seen |= {"norm input": given.dtype, "norm weight": weight.dtype}

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.layer(x)
        self.seen |= {"input": x.dtype, "layer": hidden.dtype, "buffer": self.rotation.dtype}
        hidden = self.norm(hidden)
        self.seen["after norm"] = hidden.dtype
        self.layer.auxiliary = hidden.pow(2).mean()
        logits = self.head(hidden)
        return {"loss": logits.float().pow(2).mean(), "logits": logits, "hidden": hidden}


def dtypes_seen(stage: int, keep: Any, buffers: Any) -> tuple[dict[str, Any], Any, Any]:
    policy = zf.Precision(parameters=BF16, keep=keep, buffers=buffers)
    model = zf.shard(TwoParts(), stage=stage, precision=policy)
    out = model(torch.randn(2, 8))
    out["loss"].backward()
    gradient = zf.full_grad(model.norm.weight)
    seen = dict(model.seen)
    with zf.full_params(model):
        shown = model.layer.weight.dtype
    zf.close(model)
    assert gradient is not None
    return {**seen, "logits": out["logits"].dtype}, shown, gradient.dtype


def named_norm(name: str, it: Any) -> bool:
    return name == "norm"


@pytest.mark.parametrize(
    ("stage", "keep"), [(0, [nn.LayerNorm]), (1, [nn.LayerNorm]), (3, [nn.LayerNorm]), (3, ["nor?"]), (3, [named_norm])]
)
def test_modules_kept_in_fp32(ranks: Any, stage: int, keep: Any) -> None:
    for seen, shown, gradient in ranks(2, dtypes_seen, stage, keep, None):
        assert seen == {
            "input": BF16,
            "layer": BF16,
            "buffer": FP32,  # nobody asked
            "norm input": FP32,
            "norm weight": FP32,
            "after norm": BF16,
            "logits": BF16,
        }
        assert shown is gradient is FP32


def test_buffers_are_cast_when_asked(ranks: Any) -> None:
    ((seen, _, _),) = ranks(1, dtypes_seen, 2, [], BF16)
    assert seen["buffer"] is seen["norm weight"] is BF16


def changes_to_masters(stage: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    model = make_model()
    model, optimizer = zf.prepare(model, adamw(model.parameters()), stage=stage, precision="bf16")
    (batch,) = batches(1)
    model(*batch).backward()
    optimizer.step()
    before = zf.full(model.head.weight)
    third = 1 / 3  # not a bf16 number
    with zf.full_params(model), torch.no_grad():
        model.head.weight[0] = third
        found["loss inside"] = model(*batch).dtype
        found["untouched"] = torch.equal(model.head.weight[1:], before[1:])
    with zf.full_params(model):
        found["exact"] = bool((model.head.weight[0] == third).all())
    with zf.full_params(model, masters=False):
        found["compute"] = model.head.weight.dtype
        found["rounded"] = bool((model.head.weight[0] == torch.tensor(third).to(BF16)).all())
        found["loss"] = model(*batch).dtype
    try:
        with zf.full_params(model, masters=False), torch.no_grad():
            model.head.weight[0] = 1.0
    except RuntimeError as error:
        found["refused"] = str(error)
    zf.close(model)
    found["closed"] = model.head.weight.dtype, bool((model.head.weight[0] == third).all())
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_whole_parameters_are_the_masters(ranks: Any, stage: int) -> None:
    for found in ranks(2, changes_to_masters, stage):
        assert found.pop("untouched")
        assert "16-bit" in found.pop("refused")
        assert found == {
            "loss inside": FP32,
            "exact": True,
            "compute": BF16,
            "rounded": True,
            "loss": BF16,
            "closed": (FP32, True),
        }


def frozen_and_thawed(stage: int) -> dict[str, Any]:
    """A frozen half has no master; thawed, it gets one and trains."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].requires_grad_(False)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = zf.prepare(model, optimizer, stage=stage, precision="bf16")
    frozen = zf.ledger(model).snapshot()["state_bytes"]["optimizer"]
    model[0].requires_grad_(True)
    for _ in range(2):
        model(torch.ones(2, 16)).float().pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = {"frozen masters": frozen, "states": len(optimizer.state), "masters": zf.full(model[0].weight).dtype}
    zf.close(model)
    return {**found, "closed": model[0].weight.dtype}


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_have_no_master_until_they_thaw(ranks: Any, stage: int) -> None:
    for found in ranks(2, frozen_and_thawed, stage):
        assert 4 * 272 / 2 <= found.pop("frozen masters") < 4 * 272 / 2 * 1.6  # half of the trained layer, padded
        assert found == {"states": 4, "masters": FP32, "closed": FP32}


def from_meta(stage: int) -> tuple[bool, torch.dtype]:
    torch.manual_seed(3)
    with torch.device("meta"):
        model = make_model()
    model = zf.shard(model, stage=stage, precision="bf16", init=fill)
    zf.close(model)
    third = torch.full_like(model.head.weight, 1 / 3)
    return torch.equal(model.head.weight.detach(), third), model.head.weight.dtype


def fill(module: nn.Module) -> None:
    for parameter in module.parameters(recurse=False):
        nn.init.constant_(parameter, 1 / 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_on_the_meta_device_starts_from_fp32_values(ranks: Any, stage: int) -> None:
    assert ranks(2, from_meta, stage) == [(True, FP32)] * 2


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


class Mixture(nn.Module):
    """Tensors in all kinds of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> tuple[Any, ...]:
        y = self.layer(x) * scale
        return y, {"inner": [y + 1]}, "text", torch.arange(3)


def outputs() -> tuple[Any, ...]:
    policy = zf.Precision(parameters=BF16, outputs=FP32)
    model = zf.shard(Mixture(), stage=3, precision=policy)
    first, second, text, numbers = model(torch.ones(1, 4), scale=torch.ones(1, dtype=torch.float64))
    F.mse_loss(first, torch.zeros(1, 4)).backward()
    zf.close(model)
    return first.dtype, second["inner"][0].dtype, text, numbers.dtype


def test_outputs_are_cast_wherever_they_are(ranks: Any) -> None:
    assert ranks(1, outputs) == [(FP32, FP32, "text", torch.int64)]


def hugging_face(name: str, keep: Any) -> tuple[list[float], list[float]]:
    """Losses in fp32 and in bf16."""
    from tests.zoo import ZOO, build
    from tests.zoo import batches as batches_of

    def train(precision: Any) -> list[float]:
        model = build(ZOO[name])
        trained = [p for p in model.parameters() if p.requires_grad]
        model, optimizer = zf.prepare(model, torch.optim.AdamW(trained, lr=1e-3), stage=3, precision=precision)
        losses = []
        for batch in batches_of(ZOO[name], 3):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        zf.close(model)
        return losses

    return train(None), train(zf.Precision(parameters=BF16, keep=keep))


@pytest.mark.parametrize(
    ("name", "keep"),
    [("llama_lora", None), ("mixtral", ["*.gate"]), ("switch", ["*.router"]), ("conv_net", None)],
)
def test_models_of_others_train_in_bf16(ranks: Any, name: str, keep: Any) -> None:
    for plain, half in ranks(2, hugging_face, name, keep):
        assert half == pytest.approx(plain, rel=0.03), (plain, half)


def alone(stage: int) -> dict[str, Any]:
    """One rank: parameters are released at every stage, and what is used outside its unit must live on."""
    found: dict[str, Any] = {}
    (batch,) = batches(1)

    def prepared() -> Any:
        model = make_model()
        return zf.prepare(model, sgd(model.parameters()), stage=stage, precision="bf16")

    def norm(model: Any) -> float:
        return sum(zf.full(p.grad).float().pow(2).sum().item() for p in model.parameters()) ** 0.5

    model, optimizer = prepared()
    for _ in range(3):
        model(*batch).backward()
    three = norm(model)
    model.zero_grad()
    model(*batch).backward()
    found["cleared"] = three / norm(model)
    zf.close(model)

    model, optimizer = prepared()
    if stage < 3:
        penalty = sum(p.float().pow(2).sum() for p in model.parameters())
        (model(*batch) + penalty).backward()
        state = model.state_dict()
        model(*batch)
        optimizer.step()
        found["alias"] = all(torch.equal(state[name], p) for name, p in model.named_parameters())
        with torch.no_grad():
            model.head.weight.zero_()
        try:
            model(*batch)
        except RuntimeError as error:
            found["changed"] = str(error)
    zf.close(model)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_one_rank_alone(ranks: Any, stage: int) -> None:
    (found,) = ranks(1, alone, stage)
    assert found["cleared"] == pytest.approx(3, rel=0.01)
    if stage < 3:
        assert found["alias"]
        assert "'head.weight' was changed in place" in found["changed"]


def averaged(row: Any) -> tuple[float, float, float]:
    """Of an average: the distance from one by hand, from what a model shows with it, and after it is back."""
    model = make_model()
    model, optimizer = zf.prepare(model, sgd(model.parameters()), precision="bf16", **settings_of(row))
    average = zf.EMA(model, decay=0.75)

    def weights() -> list[Tensor]:
        with zf.full_params(model):
            return [p.detach().clone() for p in model.parameters()]

    expected = weights()
    for number, batch in enumerate(batches(4)):
        loss = model(*batch)
        (loss * (float("nan") if number == 2 else 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if number != 2:  # skipped
            expected = [torch.lerp(mean, weight, 0.25) for mean, weight in zip(expected, weights(), strict=True)]
    names = [name for name, _ in model.named_parameters()]
    state = average.state_dict()
    found = [zf.full(state[name]) for name in names]
    before = weights()
    with average.swapped():
        shown = weights()
        model(*batch)
    after = weights()
    assert average.updates == 3
    average.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in zip(names, found, strict=True)})
    with average.swapped():
        assert all(not weight.any() for weight in weights())
    zf.close(model)
    return (
        largest_difference(expected, found),
        largest_difference(found, shown),
        largest_difference(before, after),
    )


@pytest.mark.filterwarnings("ignore:step skipped")
@pytest.mark.parametrize("row", [0, 2, (3, "whole"), "hsdp"])
def test_an_average_of_the_weights(ranks: Any, row: Any) -> None:
    for by_hand_off, shown_off, after_off in ranks(2, averaged, row):
        assert by_hand_off <= 1e-7
        assert shown_off == after_off == 0


def closures() -> list[float]:
    """LBFGS calls its closure several times in a step; the losses, with masters."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer: torch.optim.Optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    model, optimizer = zf.prepare(model, optimizer, stage=0, precision="bf16")
    losses: list[float] = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(3, 8)).float() - 1).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(3):
        optimizer.step(closure)
    zf.close(model)
    return losses


def test_a_closure_that_runs_several_times(ranks: Any) -> None:
    first, second = ranks(2, closures)
    assert first == second
    assert first[-1] < 0.5 * first[0]


def recomputed(reentrant: bool) -> float:
    """A checkpoint around the whole model: the distance of its gradients from those without."""

    def gradients(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = zf.shard(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), stage=3, precision="bf16")
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        if checkpointed:
            out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=reentrant)
        else:
            out = model(x)
        out.float().pow(2).mean().backward()
        found = [zf.full_grad(p) for p in model.parameters()]
        zf.close(model)
        return [gradient for gradient in found if gradient is not None]

    return largest_difference(gradients(False), gradients(True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_around_the_model(ranks: Any, reentrant: bool) -> None:
    assert ranks(2, recomputed, reentrant) == [0.0, 0.0]


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
