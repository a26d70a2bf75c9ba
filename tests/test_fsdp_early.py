"""FSDP's faces inside other modules, with optimizers that were built past them: before the model was sharded."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from tests.models import batches, largest_difference, make_model
from tests.ranks import raised
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import zerofold as zf
from zerofold.engine import Engine
from zerofold.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardedGradScaler,
    StateDictType,
    fully_shard,
)
from zerofold.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  # its name in every script


def by_module(model: Any) -> torch.optim.Optimizer:
    """Groups as scripts with two learning rates make them."""
    rest = [*model.tokens.parameters(), *model.positions.parameters(), *model.norm.parameters()]
    groups = [
        {"params": model.blocks.parameters()},
        {"params": [*rest, *model.head.parameters()], "lr": 0.3, "weight_decay": 0.1},
    ]
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    for batch in batches(3):
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()


def contained(model: nn.Module) -> nn.Module:
    around = nn.Module()
    around.net = model
    around.extra = nn.Linear(2, 2)
    return around


def in_either_face() -> dict[str, Any]:
    second = make_model()
    for block in second.blocks:
        fully_shard(block)
    return {"FSDP": FSDP(make_model()), "fully_shard": fully_shard(second)}


def trained_as_ddp() -> dict[str, float]:
    expected, alone = make_model(), make_model()
    train(DistributedDataParallel(expected), by_module(expected))
    train(DistributedDataParallel(alone), torch.optim.SGD(alone.parameters(), lr=0.1))
    found = {}
    for face, model in in_either_face().items():
        train(model, by_module(model))
        found[f"{face} by modules"] = largest_difference(list(expected.parameters()), map(zf.full, model.parameters()))
        zf.close(model)
    for face, model in in_either_face().items():
        train(model, torch.optim.SGD(contained(model).parameters(), lr=0.1))
        found[f"{face} in another"] = largest_difference(list(alone.parameters()), map(zf.full, model.parameters()))
        zf.close(model)
    return found


def test_optimizers_built_before_sharding_train_as_under_ddp(ranks: Any) -> None:
    for found in ranks(2, trained_as_ddp):
        assert found == dict.fromkeys(found, 0.0)
        assert len(found) == 4


def others_are_left_alone() -> dict[str, Any]:
    """What sharding adds to every optimizer's step: nothing for other models, nothing after the first, and it ends."""
    before = len(_global_optimizer_pre_hooks)
    other = nn.Linear(3, 1)
    others = torch.optim.Adam(other.parameters())
    held = list(other.parameters())
    model = FSDP(make_model())
    optimizer = by_module(model)
    hooks = []
    for number, batch in enumerate(batches(3)):
        model(*batch).backward()
        engine: Any = Engine.of(model.module)
        if number:
            engine.faces = None  # whoever asks for them raises
        optimizer.step()
        other(torch.ones(1, 3)).backward()
        others.step()
        vars(engine).pop("faces", None)
        hooks.append(len(_global_optimizer_pre_hooks) - before)
    found = {
        "same": all(a is b for a, b in zip(others.param_groups[0]["params"], held, strict=True)),
        "plain": all(type(value) is torch.Tensor for value in others.state[other.weight].values()),
        "hooks": hooks,
    }
    zf.close(model)
    found["hooks after"] = len(_global_optimizer_pre_hooks) - before
    return found


def test_optimizers_of_other_models_are_left_alone(ranks: Any) -> None:
    expected = {"same": True, "plain": True, "hooks": [1, 1, 1], "hooks after": 0}
    assert ranks(2, others_are_left_alone) == [expected] * 2


def scaled() -> bool:
    """A GradScaler looks at the gradients before the first step."""
    model = FSDP(make_model(), mixed_precision=MixedPrecision(param_dtype=torch.float16))
    optimizer, scaler = by_module(model), ShardedGradScaler(init_scale=4.0)
    before = [p.clone() for p in make_model().parameters()]
    (batch,) = batches(1)
    scaler.scale(model(*batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    after = [zf.full(p) for p in model.parameters()]
    zf.close(model)
    return all(bool((a != b).any()) for a, b in zip(before, after, strict=True))


def states_in_a_container() -> dict[str, Any]:
    around: Any = contained(FSDP(make_model()))
    optimizer = torch.optim.AdamW(around.net.parameters(), lr=1e-2)
    (batch,) = batches(1)
    around.net(*batch).backward()
    optimizer.step()
    state = around.state_dict()
    other: Any = contained(FSDP(make_model(layers=3)))
    with torch.no_grad():
        other.net.head.weight.zero_()
    other.load_state_dict(state)
    found: dict[str, Any] = {
        "names": list(state) == list(contained(make_model()).state_dict()),
        "loaded": largest_difference(list(map(zf.full, around.net.parameters())), map(zf.full, other.net.parameters())),
    }
    missing = dict(state)
    del missing["net.head.weight"]
    found["missing"] = other.load_state_dict(missing, strict=False).missing_keys
    config, optim = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    with FSDP.state_dict_type(around, StateDictType.FULL_STATE_DICT, config, optim):
        found["rank0 only"] = len(around.state_dict())
        given = FSDP.optim_state_dict(around, optimizer)
    second = torch.optim.AdamW(other.net.parameters(), lr=1.0)
    second.load_state_dict(FSDP.scatter_full_optim_state_dict(given or None, other, optim=second))
    sharded = FSDP.sharded_optim_state_dict(around, optimizer)
    third = torch.optim.AdamW(other.net.parameters(), lr=1.0)
    third.load_state_dict(FSDP.flatten_sharded_optim_state_dict(sharded, other, third))
    for name, loaded in {"scattered": second, "flattened": third}.items():
        same = [loaded.param_groups[0]["lr"] == 1e-2]
        for a, b in zip(optimizer.state.values(), loaded.state.values(), strict=True):
            same += [bool((zf.full(a[key]) == zf.full(b[key])).all()) for key in a]
        found[name] = (all(same), len(same))
    found["nothing"] = raised(FSDP.optim_state_dict_to_load, other, second, {})
    part = sharded if dist.get_rank() == 0 else {}
    found["parts"] = raised(FSDP.optim_state_dict_to_load, other, second, part)
    found["rekey"] = raised(FSDP.rekey_optim_state_dict, given, None, around)
    found["hook"] = raised(around.net.register_comm_hook, None, None)
    zf.close(around.net.module)
    zf.close(other.net.module)
    return found


def test_states_of_a_wrapper_in_another_module(ranks: Any) -> None:
    first, second = ranks(2, states_in_a_container)
    names, parameters = len(contained(make_model()).state_dict()), len(list(make_model().parameters()))
    assert (first.pop("rank0 only"), second.pop("rank0 only")) == (names, 2)
    for found in (first, second):
        assert "is empty on every rank" in found.pop("nothing")
        assert "is sharded, and some ranks have none" in found.pop("parts")
        assert "optim_state_dict_to_load" in found.pop("rekey")
        assert "reduce_dtype" in found.pop("hook")
        states = (True, 1 + 3 * parameters)
        assert found == {
            "names": True,
            "loaded": 0.0,
            "missing": ["net.head.weight"],
            "scattered": states,
            "flattened": states,
        }
    assert ranks(2, scaled) == [True, True]
