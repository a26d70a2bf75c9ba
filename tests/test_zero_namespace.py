"""DeepSpeed's zero namespace: models cut while they are built, parameters whole for a while, safe_get and safe_set."""

from __future__ import annotations

import contextlib
import copy
import io
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import TinyGPT, batches, largest_difference
from tests.ranks import raised
from torch import Tensor, nn

import zerofold as zf
from zerofold.compat.estimate import estimate_zero2_model_states_mem_needs, estimate_zero3_model_states_mem_needs
from zerofold.compat.external import register_external_parameter, unregister_external_parameter
from zerofold.compat.gathered import GatheredParameters
from zerofold.compat.leaves import leaf_units, set_z3_leaf_modules
from zerofold.compat.param_status import ZeroParamStatus
from zerofold.compat.safe import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
)
from zerofold.compat.zero_init import Init
from zerofold.sharded import ShardedParameter

STAGES = (0, 1, 2, 3)


class Initialised(TinyGPT):
    """As many models do: weights drawn again once all modules are there, one tied, one with an attribute."""

    def __init__(self) -> None:
        super().__init__(width=24, layers=2)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.ones(24))
        self.scale.is_special = True  # type: ignore[attr-defined]
        self.blocks[0].norm1.weight.requires_grad_(False)
        self.apply(self.draw)

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.trunc_normal_(module.weight, std=0.1)
            module.weight.data.normal_(std=0.05)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, indices: Tensor, targets: Tensor) -> Tensor:
        return super().forward(indices, targets) * self.scale.mean()


def weights_after_training(model: nn.Module, steps: int = 2, **settings: Any) -> list[Tensor]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    zf.prepare(model, optimizer, **settings)
    for batch in batches(steps):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [zf.full(p) for p in model.parameters()]
    zf.close(model)
    return weights


def built_inside(settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    expected = weights_after_training(Initialised(), **settings)
    torch.manual_seed(3 + dist.get_rank())  # rank 0's values count
    with Init(config_dict_or_path={"zero_optimization": {"stage": 3}}), Init():
        model = Initialised()
    cut = [p for p in model.parameters() if isinstance(p, ShardedParameter)]
    shapes_are_true = [p.shape for p in model.parameters()] == [p.shape for p in Initialised().parameters()]
    found = {
        "all": len(cut) == len(list(model.parameters())) and shapes_are_true,
        "held": sum(p.local.numel() for p in cut) / sum(p.numel() for p in cut),
        "tied": model.head.weight is model.tokens.weight,
        "attribute": model.scale.is_special,
        "frozen": [name for name, p in model.named_parameters() if not p.requires_grad],
    }
    found["difference"] = largest_difference(expected, weights_after_training(model, **settings))
    return found


@pytest.mark.parametrize("settings", [{"stage": 1}, {"stage": 3}, {"stage": 3, "precision": "bf16"}], ids=str)
def test_a_model_cut_while_it_is_built_trains_to_the_same_bits(ranks: Any, settings: dict[str, Any]) -> None:
    for found in ranks(2, built_inside, settings):
        assert found["all"]
        assert found["tied"]
        assert found["attribute"]
        assert found["frozen"] == ["blocks.0.norm1.weight"]
        assert found["held"] == pytest.approx(0.5, abs=0.01)
        assert found["difference"] == 0.0


def largest_while_building() -> float:
    """The most whole elements at any time, over all of them: seen after each module, from the outside."""
    most = 0

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(64, 64)
            nonlocal most
            layers.append(self)
            whole = [p for layer in layers for p in layer.parameters() if not isinstance(p, ShardedParameter)]
            most = max(most, sum(p.numel() for p in whole))

    layers: list[nn.Module] = []
    with Init():
        model = nn.Sequential()
        for index in range(8):
            model.add_module(str(index), Layer())
    return most / sum(p.numel() for p in model.parameters())


def test_one_module_at_a_time_is_whole(ranks: Any) -> None:
    assert ranks(2, largest_while_building) == [0.125, 0.125]


def other_ways_in() -> dict[str, Any]:
    torch.manual_seed(0)
    plain = nn.Linear(7, 5)
    expected = plain.weight.detach().clone()
    Init(module=plain, dtype=torch.bfloat16)
    with Init(enabled=False):
        untouched = type(nn.Linear(4, 4).weight)
    after = type(nn.Linear(4, 4).weight)  # the hooks are gone
    with pytest.raises(KeyError), Init():
        raise KeyError("in a constructor")
    return {
        "cast": torch.equal(zf.full(plain.weight), expected.bfloat16()),
        "plain": [untouched, after, type(nn.Linear(4, 4).weight)],
        "forward": raised(plain, torch.ones(2, 7, dtype=torch.bfloat16)),
        "moved": raised(plain.float),
        "same": plain.to("cpu") is plain,
        "view": raised(lambda: plain.weight.data[0].zero_()),
        "config": raised(Init, config_dict_or_path="nowhere.json"),
        "quantised": raised(Init, zero_quantized_weights=True),
    }


def test_other_ways_into_init(ranks: Any) -> None:
    found = ranks(2, other_ways_in)[0]
    assert found["cast"]
    assert found["same"]
    assert found["plain"] == [nn.Parameter] * 3
    for case in ("forward", "view"):
        assert "'Linear.weight'" in found[case]
        assert "GatheredParameters" in found[case]
    assert "dtype= to zero.Init" in found["moved"]
    assert "nowhere.json" in found["config"]
    assert "zero_quantized_weights=True" in found["quantised"]


def change_before_an_engine(modifier: int | None) -> dict[str, Any]:
    with Init():
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    held, before = model[0].weight, zf.full(model[0].weight)
    twin = copy.deepcopy(model[0])  # cut in the same way, with values of its own
    order = [*model.parameters(), *twin.parameters()]
    found: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with GatheredParameters(order if dist.get_rank() == 0 else order[::-1], modifier_rank=modifier):
            found["whole"] = torch.equal(held.data, before) and held.view(-1).shape == (36,)
            found["copied"] = torch.equal(copy.deepcopy(model[0]).weight, before)
            stream = io.BytesIO()
            torch.save(held, stream)
            found["saved"] = torch.equal(torch.load(io.BytesIO(stream.getvalue())), before)
            if dist.get_rank() == 1:
                nn.init.constant_(held, 2.0)
                nn.init.constant_(twin.weight, 3.0)
                model[1].weight.data[1:3] = 7.0
                model[1].bias.data = torch.full((5,), 4.0)
                state = {"bias": torch.full((6,), 9.0)}
                model[0]._load_from_state_dict(state, "", {}, False, [], [], [])
    found["warned"] = [str(each.message) for each in caught]
    found["kept"] = torch.equal(zf.full(held), before)
    changed = (model[0].weight, twin.weight, model[0].bias, model[1].bias)
    found["sums"] = [zf.full(p).sum().item() for p in changed]
    found["rows"] = zf.full(model[1].weight)[1:3].unique().tolist()
    return found


def test_gathered_before_there_is_an_engine(ranks: Any) -> None:
    one, two = ranks(2, change_before_an_engine, 1)
    assert one["whole"]
    assert one["copied"]
    assert one["saved"]
    for found in (one, two):
        assert found["sums"] == [72.0, 108.0, 54.0, 20.0]
        assert found["rows"] == [7.0]
        assert found["warned"] == []
    one, two = ranks(2, change_before_an_engine, None)
    assert one["kept"]
    assert two["kept"]
    assert one["warned"] == []
    (warning,) = two["warned"]
    assert "'Linear.weight'" in warning
    assert "modifier_rank=0" in warning


def change_in_training(settings: dict[str, Any], modifier: int | None) -> dict[str, Any]:
    torch.manual_seed(0)
    model = TinyGPT(width=24, layers=2)
    model.blocks[0].norm1.weight.requires_grad_(False)
    early = model.norm.bias  # held from before
    trained = [p for p in model.parameters() if p.requires_grad]
    zf.prepare(model, torch.optim.SGD(trained, lr=0.1), **settings)
    others = zf.full(model.head.weight)
    (batch,) = batches(1, rank=0)
    before = model(*batch).item()
    changed = [early, model.norm.weight, model.blocks[0].norm1.weight, model.head.weight]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with GatheredParameters(changed, modifier_rank=modifier):
            whole = [tuple(p.data.shape) for p in changed]
            if dist.get_rank() == 0:
                nn.init.constant_(changed[1], 0.5)
                for parameter in (early, changed[2]):
                    parameter.data.fill_(0.5)
                changed[3].data[0].fill_(0.25)
    now = [zf.full(p) for p in model.parameters() if p.shape == (24,) and zf.full(p).eq(0.5).all()]
    head = zf.full(model.head.weight)
    found = {
        "whole": whole,
        "halves": len(now),
        "row": head[0].unique().tolist() == [0.25],
        "rest": torch.equal(head[1:], others[1:]),
        "moved": model(*batch).item() - before,
        "warned": [str(each.message) for each in caught],
    }
    with pytest.raises(KeyError), GatheredParameters(model.norm.weight, modifier_rank=0), torch.no_grad():
        model.norm.weight.data.add_(1.0)
        raise KeyError("inside")
    found["after_error"] = torch.equal(zf.full(model.norm.weight), now[-1] if now else torch.ones(24))
    zf.close(model)
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", STAGES)
def test_changes_reach_masters_and_ranks(ranks: Any, stage: int, precision: str) -> None:
    one, two = ranks(2, change_in_training, {"stage": stage, "precision": precision}, 0)
    for found in (one, two):
        assert found["whole"] == [(24,), (24,), (24,), (96, 24)]
        assert found["halves"] == 3
        assert found["row"]
        assert found["rest"]  # to the bit, though a 16-bit parameter was shown where parameters are whole
        assert found["warned"] == []
        assert found["after_error"]
    assert abs(one["moved"]) > 1e-3
    assert one["moved"] == two["moved"]


@pytest.mark.parametrize("stage", [2, 3])
def test_changes_of_a_rank_alone(ranks: Any, stage: int) -> None:
    """Which has no 16-bit parameters between uses."""
    (found,) = ranks(1, change_in_training, {"stage": stage, "precision": "bf16"}, 0)
    assert found["halves"] == 3
    assert found["row"]
    assert found["rest"]
    assert found["after_error"]


@pytest.mark.parametrize("settings", [{"stage": 1, "precision": "bf16"}, {"stage": 2}, {"stage": 3}], ids=str)
def test_changes_without_a_modifier_are_dropped_and_named(ranks: Any, settings: dict[str, Any]) -> None:
    one, two = ranks(2, change_in_training, settings, None)
    for found in (one, two):
        assert found["halves"] == 0
        assert found["moved"] == 0.0
        assert found["after_error"]
    assert "was changed inside GatheredParameters without modifier_rank (4 such" in one["warned"][0]
    assert two["warned"] == []


class Borrower(nn.Module):
    """Uses a weight of one of its units in its own forward, as DeepSpeed's page shows."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.gathers = not registers
        if registers:
            register_external_parameter(self, self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        with GatheredParameters(self.first.weight, fwd_module=self, enabled=self.gathers):
            return (x @ self.first.weight).square().mean()


def borrow(registers: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    plain = Borrower(registers)
    sharded = Borrower(registers)
    sharded.load_state_dict(plain.state_dict())
    plain(x).backward()
    zf.shard(sharded, stage=3, units=nn.Linear, live_bytes=256)  # one unit: nothing stays gathered by chance
    with GatheredParameters(sharded.second.weight):
        outside = sharded.second.weight.square().sum()
    sharded(x).backward()
    assert plain.first.weight.grad is not None
    difference = (zf.full_grad(sharded.first.weight) - plain.first.weight.grad).abs().max().item()
    with torch.no_grad():
        sharded(x)
    shown = type(sharded.first.weight)
    with zf.full_params(sharded), GatheredParameters(sharded.first.weight, modifier_rank=1), torch.no_grad():
        sharded.first.weight.fill_(float(dist.get_rank()))
    found = {"difference": difference, "shown": shown, "sum": zf.full(sharded.first.weight).sum().item()}
    found["outside"] = raised(outside.backward)
    if registers:
        unregister_external_parameter(sharded, sharded.first.weight)
        found["unregistered"] = raised(sharded.forward, x)
    zf.close(sharded)
    return found


class Fused(nn.Module):
    """Computes its loss from the head's weight without calling the head, and asks whether it is there, as TRL does."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.body(x), self.head.weight
        is_away = getattr(weight, "ds_status", ZeroParamStatus.AVAILABLE) is not ZeroParamStatus.AVAILABLE
        with GatheredParameters(weight, enabled=is_away):
            return (x @ self.head.weight.T).square().mean()


def asked_whether_it_is_there(stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    x, model = torch.randn(4, 8), Fused()
    plain = copy.deepcopy(model)
    loss = plain(x)
    loss.backward()
    with contextlib.redirect_stdout(io.StringIO()):
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}}
        engine, *_ = zf.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
    outside = getattr(model.head.weight, "ds_status", None)
    engine.backward(engine(x))
    difference = (zf.full_grad(model.head.weight) - plain.head.weight.grad).abs().max().item()
    engine.destroy()
    return {"outside": outside, "difference": difference, "after": hasattr(model.head.weight, "ds_status")}


@pytest.mark.parametrize("stage", [2, 3])
def test_a_parameter_says_whether_it_is_there(ranks: Any, stage: int) -> None:
    for found in ranks(2, asked_whether_it_is_there, stage):
        assert found["outside"] is (ZeroParamStatus.NOT_AVAILABLE if stage == 3 else None)
        assert found["difference"] < 1e-6
        assert not found["after"]


@pytest.mark.parametrize("registers", [False, True])
def test_in_a_forward_gradients_arrive(ranks: Any, registers: bool) -> None:
    for found in ranks(2, borrow, registers):
        assert found["difference"] < 1e-6
        assert found["shown"] is ShardedParameter
        assert found["sum"] == 64.0
        assert "'second.weight'" in found["outside"]
        assert not registers or "'first.weight'" in found["unregistered"]


def read_and_write(settings: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = TinyGPT(width=24, layers=1)
    model.norm.bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    early = model.head.weight
    zf.prepare(model, optimizer, **settings)
    held, p = optimizer.param_groups[0]["params"][-1], model.head.weight
    batch, again = batches(2)
    for rank in range(dist.get_world_size()):
        (plain(*next(batches(1, rank=rank))) / dist.get_world_size()).backward()
    found: dict[str, Any] = {"none": [safe_get_full_optimizer_state(p, "exp_avg"), safe_get_full_grad(p)]}
    found["frozen"] = safe_get_full_fp32_param(model.norm.bias)
    found["unknown"] = safe_get_full_fp32_param(plain.head.weight)
    model(*batch).backward()
    gradient = safe_get_full_grad(p)
    assert gradient is not None
    assert plain.head.weight.grad is not None
    found["gradient"] = (gradient - plain.head.weight.grad).abs().max().item()
    safe_set_full_grad(p, torch.ones_like(gradient))
    found["local"] = [safe_get_local_fp32_param(p), safe_get_local_grad(p)]
    optimizer.step()
    found["moment"] = safe_get_full_optimizer_state(p, "exp_avg")
    optimizer.zero_grad()
    safe_set_full_optimizer_state(p, torch.full((96, 24), 3.0), "exp_avg")
    found["set_moment"] = safe_get_full_optimizer_state(held, "exp_avg")
    found["local_moment"] = safe_get_local_optimizer_state(p, "exp_avg")
    before = model(*again).item()
    safe_set_full_fp32_param(p, torch.zeros(96, 24))
    found["uniform"] = model(*again).item()  # every token is as likely as any other
    found["before"] = before
    found["same"] = all(torch.equal(x, torch.zeros(96, 24)) for x in map(safe_get_full_fp32_param, (p, held, early)))
    piece = safe_get_local_fp32_param(p)
    assert piece is not None
    safe_set_local_fp32_param(p, torch.full_like(piece, 0.5))
    found["pieces"] = safe_get_full_fp32_param(p)
    found["key"] = raised(safe_get_full_optimizer_state, p, "exp_average")
    found["shape"] = raised(safe_set_full_fp32_param, p, torch.zeros(3))
    found["no_gradient"] = raised(safe_set_full_grad, p, torch.zeros(96, 24))
    zf.close(model)
    found["closed"] = safe_get_full_fp32_param(model.head.weight)
    return found


SETTINGS = [{"stage": stage} for stage in STAGES]
SETTINGS += [{"stage": stage, "precision": "bf16"} for stage in STAGES]
SETTINGS += [{"stage": 2, "cut": "whole"}]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_safe_get_and_set(ranks: Any, settings: dict[str, Any]) -> None:
    results = ranks(2, read_and_write, settings)
    for found in results:
        assert found["none"] == [None, None]
        assert found["frozen"] is None
        assert found["unknown"] is None
        assert found["closed"] is None
        assert found["gradient"] < (0.02 if "precision" in settings else 1e-6)
        assert torch.allclose(found["moment"], torch.full((96, 24), 0.1))
        assert found["set_moment"].eq(3.0).all()
        assert found["before"] != found["uniform"]
        assert found["uniform"] == pytest.approx(torch.tensor(96.0).log().item(), abs=0.05)
        assert found["same"]
        assert found["pieces"].eq(0.5).all()
        assert "exp_avg_sq" in found["key"]
        assert "(96, 24)" in found["shape"]
        assert "'head.weight' has no gradient" in found["no_gradient"]
        parameter, gradient = found["local"]
        assert gradient.eq(1.0).all()
        assert gradient.dtype is torch.float32
        assert parameter.numel() == gradient.numel()
    held = sum(found["local"][0].numel() for found in results)
    assert held == 96 * 24 * (2 if settings["stage"] == 0 else 1)


def test_estimates_are_what_the_ledger_shows(ranks: Any) -> None:
    size = 64 * 64
    for stage in (2, 3):
        for held in ranks(2, bytes_held, stage):
            device = (
                estimate_zero2_model_states_mem_needs(size, 2, cpu_offload=False)[1]
                if stage == 2
                else estimate_zero3_model_states_mem_needs(size, 0, 2, cpu_offload=False)[1]
            )
            assert held == pytest.approx(device, rel=0.01)


def bytes_held(stage: int) -> int:
    model = nn.Linear(64, 64, bias=False)
    model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=stage, precision="bf16")
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    held = sum(zf.ledger(model).snapshot()["state_bytes"].values())
    zf.close(model)
    return held


def train_with_a_leaf() -> tuple[list[str], Any]:
    model = TinyGPT(width=24, layers=2)
    set_z3_leaf_modules(model.blocks[1], ["Block"])
    model, optimizer = zf.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), stage=3, units=leaf_units(model, nn.Linear)
    )
    (batch,) = batches(1)
    model(*batch).backward()
    optimizer.step()
    units = {face.spec.unit for face in model.blocks.parameters()}  # type: ignore[union-attr]
    zf.close(model)
    return sorted(units), raised(set_z3_leaf_modules, model, [nn.LSTM])


def test_a_leaf_is_gathered_as_one(ranks: Any) -> None:
    for units, error in ranks(2, train_with_a_leaf):
        assert units == ["", *(f"blocks.0.{name}" for name in ("down", "project", "qkv", "up")), "blocks.1"]
        assert "LSTM" in error
        assert "TinyGPT" in error


def gathered_by_one_rank() -> None:
    model = zf.shard(nn.Linear(8, 8), stage=3)
    if dist.get_rank() == 0:
        with GatheredParameters(model.weight):
            pass
    else:
        model(torch.ones(2, 8))


def test_one_rank_alone_is_named(ranks: Any) -> None:
    for error in ranks(2, gathered_by_one_rank, expect_error=True):
        assert "DivergenceError" in error
        assert "weight" in error
