"""FSDP's faces: the same weights as torch's own DDP, and the calls scripts make around training."""

from __future__ import annotations

import functools
import os
import pickle
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import Block, TinyGPT, batches, largest_difference, make_model, train_ddp
from tests.ranks import raised
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf
import zerofold.fsdp as faces
from zerofold.fsdp import (
    CPUOffloadPolicy,
    CustomPolicy,
    FSDPModule,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    ShardedGradScaler,
    ShardingStrategy,
    StateDictType,
    always_wrap_policy,
    enable_wrap,
    fully_shard,
    register_fsdp_forward_method,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from zerofold.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817  # its name in every script

POLICIES: dict[str, Any] = {
    "transformer": functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=5000),
    "always": always_wrap_policy,
    "classes": ModuleWrapPolicy({Block}),
    "none": None,
}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def whole(model: nn.Module) -> list[torch.Tensor]:
    with FSDP.summon_full_params(model):
        return [p.detach().clone() for p in model.parameters()]


def train(model: Any, steps: int, *, accumulate: int = 1, clip: float | None = None) -> list[torch.Tensor]:
    optimizer = adamw(model.parameters())
    for number, batch in enumerate(batches(steps * accumulate)):
        last = (number + 1) % accumulate == 0
        with nullcontext() if last else model.no_sync():
            model(*batch).backward()
        if last:
            if clip is not None:
                model.clip_grad_norm_(clip)
            optimizer.step()
            optimizer.zero_grad()
    return whole(model)


def equals_ddp(policy: str, strategy: ShardingStrategy, accumulate: int = 1, clip: float | None = None) -> float:
    expected, _ = train_ddp(adamw, 3, accumulate=accumulate, clip=clip)
    groups: dict[str, Any] = {}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        os.environ["LOCAL_WORLD_SIZE"] = "1"  # two machines with a rank each
    elif strategy is ShardingStrategy._HYBRID_SHARD_ZERO2:
        alone = [dist.new_group([rank]) for rank in range(2)]
        groups["process_group"] = (dist.group.WORLD, alone[dist.get_rank()])
    try:
        model = FSDP(make_model(), auto_wrap_policy=POLICIES[policy], sharding_strategy=strategy, **groups)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    found = train(model, 3, accumulate=accumulate, clip=clip)
    zf.close(model)
    return largest_difference(expected, found)


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_equal_ddp_to_the_bit(ranks: Any, policy: str) -> None:
    assert ranks(2, equals_ddp, policy, ShardingStrategy.FULL_SHARD) == [0.0, 0.0]


@pytest.mark.parametrize("strategy", list(ShardingStrategy), ids=lambda each: each.name)
def test_strategies_accumulate_and_clip_as_ddp(ranks: Any, strategy: ShardingStrategy) -> None:
    # Clipping sums squares in another order than DDP does.
    assert max(ranks(2, equals_ddp, "transformer", strategy, 2, 0.5)) <= 1e-6


def gathered_elements(strategy: ShardingStrategy) -> float:
    model = FSDP(make_model(layers=8), auto_wrap_policy=POLICIES["transformer"], sharding_strategy=strategy)
    train(model, 1)
    before = zf.ledger(model).snapshot()
    (batch,) = batches(1)
    model(*batch).backward()
    after = zf.ledger(model).snapshot()
    zf.close(model)
    return (after["comm_elements"] - before["comm_elements"]) / after["psi"]


def test_shard_grad_op_keeps_parameters_between_forward_and_backward(ranks: Any) -> None:
    strategies = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP)
    full, held = (ranks(2, gathered_elements, strategy)[0] for strategy in strategies)
    assert held < 1.02  # half of the model gathered from the other rank, half of the gradients sent to it
    assert full > 1.3  # gathered again for backward, but for the last units


def assert_ordinary(model: nn.Module) -> None:
    """After zf.close nothing of FSDP is left: classes are what they were, so it pickles."""
    assert not any(isinstance(module, (FSDP, FSDPModule)) for module in model.modules())
    again = pickle.loads(pickle.dumps(model))
    assert largest_difference(list(model.parameters()), list(again.parameters())) == 0.0


def train_nested(how: str) -> tuple[float, int, bool]:
    expected, _ = train_ddp(adamw, 2)
    model = make_model()
    if how == "wrapped blocks":
        for index in range(len(model.blocks)):
            model.blocks[index] = FSDP(model.blocks[index])
    else:
        with enable_wrap(wrapper_cls=FSDP, sharding_strategy=ShardingStrategy.FULL_SHARD):
            model.blocks = nn.ModuleList(wrap(block) for block in model.blocks)
    wrapped = FSDP(model)
    found = train(wrapped, 2)
    names = list(wrapped.state_dict()) == list(make_model().state_dict())
    units = len(FSDP.fsdp_modules(wrapped))
    assert all(isinstance(block, FSDP) and isinstance(block, Block) for block in wrapped.blocks)
    assert not isinstance(wrapped.norm, FSDP)
    zf.close(wrapped)
    assert_ordinary(wrapped.module)
    return largest_difference(expected, found), units, names


@pytest.mark.parametrize("how", ["wrapped blocks", "enable_wrap"])
def test_inner_wrappers_become_units_of_the_outer(ranks: Any, how: str) -> None:
    assert ranks(2, train_nested, how) == [(0.0, 4, True)] * 2


def train_fully(held: bool | None, dims: int = 1, policy: Any = None, by_list: bool = False) -> float:
    expected, _ = train_ddp(adamw, 3)
    mesh = {1: None, 2: init_device_mesh("cpu", (2, 1))}[dims]
    model = make_model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=held)
    if by_list:
        fully_shard([model.norm, model.head], offload_policy=CPUOffloadPolicy())  # one is enough
    assert fully_shard(model, mesh=mesh) is model
    assert all(isinstance(each, FSDPModule) for each in (model, *model.blocks))
    assert isinstance(model, TinyGPT)
    optimizer = adamw(model.parameters())
    for batch in batches(3):
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zf.full_params(model):
        found = [p.detach().clone() for p in model.parameters()]
    assert list(model.state_dict()) == list(make_model().state_dict())
    zf.close(model)
    assert_ordinary(model)
    return largest_difference(expected, found)


@pytest.mark.parametrize("options", [(None,), (False,), (True, 2), (None, 1, None, True)])
def test_fully_shard_equals_ddp_to_the_bit(ranks: Any, options: Any) -> None:
    assert ranks(2, train_fully, *options) == [0.0, 0.0]


def fully_shard_as_torch_does() -> float:
    """The same script with torch's own fully_shard, in bf16 with fp32 reductions, accumulated and clipped."""
    from torch.distributed.fsdp import fully_shard as torch_fully_shard

    finals = []
    for shards in (torch_fully_shard, fully_shard):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = make_model(key_bias=False)
        for block in model.blocks:
            shards(block, mp_policy=policy)
        shards(model, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number, batch in enumerate(batches(4)):
            model.set_requires_gradient_sync(number % 2 == 1)
            model(*batch).backward()
            if number % 2 == 1:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        finals.append([tensor.full_tensor() for tensor in model.state_dict().values()])
    zf.close(model)
    return largest_difference(*finals)


def test_fully_shard_trains_as_torchs_own(ranks: Any) -> None:
    assert max(ranks(2, fully_shard_as_torch_does)) <= 1e-6


def checkpointed() -> list[Any]:
    """torch's own wrappers for activation checkpointing, put in after FSDP1 and before FSDP2."""
    wrap_blocks = functools.partial(apply_activation_checkpointing, check_fn=lambda module: isinstance(module, Block))
    expected, _ = train_ddp(adamw, 2)
    first: Any = FSDP(make_model(), auto_wrap_policy=POLICIES["transformer"])
    wrap_blocks(first)
    found = [largest_difference(expected, train(first, 2)), list(first.state_dict()) == list(make_model().state_dict())]
    second: Any = make_model()
    wrap_blocks(second)
    for block in second.blocks:
        fully_shard(block)
    fully_shard(second)
    optimizer = adamw(second.parameters())
    for batch in batches(2):
        second(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    found.append(largest_difference(expected, [tensor.full_tensor() for tensor in second.state_dict().values()]))
    zf.close(first)
    zf.close(second)
    return found


def test_activation_checkpointing_as_fsdp_scripts_do(ranks: Any) -> None:
    assert ranks(2, checkpointed) == [[0.0, True, 0.0]] * 2


class Scale(nn.Module):
    """Uses its weight outside forward too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.t()

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.weight).sum(1)


def methods_of_a_sharded_module() -> list[float]:
    model = fully_shard(nn.Sequential(fully_shard(Scale())))
    register_fsdp_forward_method(model[0], "scaled")
    model[0].scaled(torch.full((1, 4), 2.0)).sum().backward()
    found = [zf.full_grad(model[0].weight).mean().item()]
    with torch.no_grad():
        found.append(model[0].scaled(torch.ones(1, 4)).sum().item())
    model[0].unshard()
    found.append(float(type(model[0].weight) is nn.Parameter))
    model[0].reshard()
    found.append(float(type(model[0].weight) is nn.Parameter))
    zf.close(model)
    return found


def test_methods_and_unsharding(ranks: Any) -> None:
    assert ranks(2, methods_of_a_sharded_module) == [[2.0, 256.0, 1.0, 0.0]] * 2


def states_travel(folder: str) -> dict[str, Any]:
    """A model and its optimizer, saved as FSDP saves them, loaded into another strategy, go on alike."""
    data = list(batches(4))
    policy = POLICIES["transformer"]
    model = FSDP(make_model(), auto_wrap_policy=policy)
    optimizer = adamw(model.parameters())

    def step(model: Any, optimizer: Any, batch: Any) -> float:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    for batch in data[:2]:
        step(model, optimizer, batch)
    found: dict[str, Any] = {}
    config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
        found["on ranks"] = len(model.state_dict())
    found["type after"] = FSDP.get_state_dict_type(model).state_dict_config.rank0_only
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        found["sharded"] = all(isinstance(tensor, zf.sharded.ShardedTensor) for tensor in model.state_dict().values())
    weights = model.state_dict()
    states = FSDP.optim_state_dict(model, optimizer)
    found["first state"] = {key: tuple(value.shape) for key, value in states["state"]["tokens.weight"].items()}
    found["groups"] = states["param_groups"][0]["params"][:2]
    found["rank0 only"] = bool(FSDP.full_optim_state_dict(model, optimizer))
    other = FSDP(make_model(), auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.NO_SHARD)
    other.load_state_dict({f"_fsdp_wrapped_module.{name}": value for name, value in weights.items()})
    others = adamw(other.parameters())
    others.load_state_dict(FSDP.optim_state_dict_to_load(other, others, states))
    back = FSDP(make_model(), auto_wrap_policy=policy)
    back.load_state_dict(other.state_dict())
    last = adamw(back.parameters())
    last.load_state_dict(FSDP.optim_state_dict_to_load(back, last, FSDP.optim_state_dict(other, others)))
    zf.save(back, last, folder)
    native = FSDP(make_model(), auto_wrap_policy=POLICIES["none"])
    natives = adamw(native.parameters())
    zf.load(native, natives, folder)
    runs = [(model, optimizer), (other, others), (back, last), (native, natives)]
    losses = [[step(*run, batch) for batch in data[2:]] for run in runs]
    found["same"] = all(each == losses[0] for each in losses)
    for each, _ in runs:
        zf.close(each)
    return found


def test_states_are_saved_and_loaded_as_with_fsdp(ranks: Any, tmp_path: Path) -> None:
    first, second = ranks(2, states_travel, str(tmp_path))
    assert (first.pop("on ranks"), second.pop("on ranks")) == (len(make_model().state_dict()), 0)
    assert (first.pop("rank0 only"), second.pop("rank0 only")) == (True, False)
    assert first == second
    assert first == {
        "type after": False,
        "sharded": True,
        "first state": {"step": (), "exp_avg": (96, 40), "exp_avg_sq": (96, 40)},
        "groups": ["tokens.weight", "positions.weight"],
        "same": True,
    }


def summon_and_apply(strategy: ShardingStrategy) -> list[float]:
    model = FSDP(make_model(), auto_wrap_policy=POLICIES["transformer"], sharding_strategy=strategy)
    with FSDP.summon_full_params(model, writeback=False), torch.no_grad():
        model.head.weight.fill_(7.0)
    first = model.state_dict()["head.weight"].max().item()
    with FSDP.summon_full_params(model.blocks[0]), torch.no_grad():
        model.head.weight.fill_(3.0)
    second = model.state_dict()["head.weight"].mean().item()
    model.apply(lambda module: nn.init.constant_(module.weight, 2.0) if isinstance(module, nn.Linear) else None)
    third = model.state_dict()["blocks.1.up.weight"].mean().item()
    zf.close(model)
    return [first, second, third]


@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD])
def test_whole_parameters_are_read_and_written(ranks: Any, strategy: ShardingStrategy) -> None:
    for first, second, third in ranks(2, summon_and_apply, strategy):
        assert (first < 1.0, second, third) == (True, 3.0, 2.0)


def mixed(dtype: torch.dtype, strategy: ShardingStrategy, scaled: bool) -> tuple[list[float], set[torch.dtype]]:
    policy = MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    model = FSDP(
        make_model(), auto_wrap_policy=POLICIES["transformer"], mixed_precision=policy, sharding_strategy=strategy
    )
    optimizer = adamw(model.parameters())
    scaler = ShardedGradScaler(init_scale=2.0**30, enabled=scaled)  # too large: some steps are skipped first
    losses = []
    for batch in [next(iter(batches(1)))] * (30 if scaled else 4):
        loss = model(*batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    dtypes = {tensor.dtype for tensor in model.state_dict().values()}
    zf.close(model)
    return losses, dtypes


@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.SHARD_GRAD_OP])
@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float16, True)])
def test_mixed_precision_trains_fp32_masters(
    ranks: Any, dtype: torch.dtype, scaled: bool, strategy: ShardingStrategy
) -> None:
    for losses, dtypes in ranks(2, mixed, dtype, strategy, scaled):
        assert losses[-1] < losses[0] - 1.0
        assert (losses[1] == losses[0]) == scaled
        assert dtypes == {torch.float32}


def blocks_in_fp32() -> list[Any]:
    """A policy may leave some modules in fp32, in either shape."""
    half = MixedPrecision(param_dtype=torch.bfloat16)
    policy = CustomPolicy(lambda module: {"mixed_precision": None} if isinstance(module, nn.LayerNorm) else False)
    first = FSDP(make_model(), auto_wrap_policy=policy, mixed_precision=half)
    second = make_model()
    fully_shard(second.norm)
    fully_shard(second, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32))
    found = []
    for model in (first, second):
        seen: dict[str, torch.dtype] = {}
        for name in ("norm", "head"):
            module = model.get_submodule(name)
            module.register_forward_hook(lambda m, args, out, name=name, seen=seen: seen.update({name: m.weight.dtype}))
        (batch,) = batches(1)
        out = model(*batch)
        out.backward()
        found.append((seen["norm"], seen["head"], out.dtype))
        zf.close(model)
        assert model(*batch).dtype is torch.float32
    return found


def test_some_modules_stay_in_fp32(ranks: Any) -> None:
    half, single = torch.bfloat16, torch.float32
    assert ranks(2, blocks_in_fp32) == [[(single, half, half), (single, half, single)]] * 2


def filled_later() -> list[float]:
    """A model on the meta device: filled unit by unit at its first use, or by the user after to_empty."""
    with torch.device("meta"):
        models = [TinyGPT(), TinyGPT(), TinyGPT()]
    for block in models[0].blocks:
        fully_shard(block)
    fully_shard(models[0])
    fully_shard(models[1])
    models[1].to_empty(device="cpu")
    for parameter in nn.Module.parameters(models[1]):
        nn.init.constant_(parameter, 0.5)

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    wrapped: list[Any] = [models[0], models[1], FSDP(models[2], param_init_fn=fill)]
    (batch,) = batches(1)
    found = []
    for model in wrapped:
        model(*batch).backward()
        found.append(zf.full(next(model.parameters())).abs().mean().item())
        zf.close(model)
    return found


def test_models_on_the_meta_device(ranks: Any) -> None:
    for own, emptied, wrapped in ranks(2, filled_later):
        assert (0.5 < own < 1.0, emptied, wrapped) == (True, 0.5, 0.25)


def misuse(case: str) -> None:
    model = make_model()
    if case == "device":
        FSDP(model, device_id=0)
    elif case == "group":
        FSDP(model, process_group=dist.new_group([0, 1]))
    elif case == "ignored":
        FSDP(model, ignored_modules=[model.head])
    elif case == "ignored parameters":
        fully_shard(model, ignored_params={model.head.weight})
    elif case == "hybrid":
        FSDP(model, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    elif case == "used before":
        model.blocks[0] = FSDP(model.blocks[0])
        list(model.blocks[0].parameters())
        FSDP(model)
    elif case == "used before, fully":
        fully_shard(model.blocks[0]).parameters().__next__()
        fully_shard(model)
    elif case == "not the model":
        for block in model.blocks:
            fully_shard(block)
        (batch,) = batches(1)
        model(*batch)
    elif case == "not the model, wrapped":
        model.blocks[0] = FSDP(model.blocks[0])
        (batch,) = batches(1)
        model(*batch)
    elif case == "twice":
        fully_shard(fully_shard(model))
    elif case == "list":
        fully_shard(model.blocks)
    elif case == "local":
        FSDP.set_state_dict_type(FSDP(model), StateDictType.LOCAL_STATE_DICT)
    elif case == "plain":
        FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
    elif case == "reshard":
        fully_shard(model, reshard_after_forward=4)
    elif case == "block's setting":
        fully_shard(model.blocks[0])
        fully_shard(model)
        model.blocks[0].set_requires_gradient_sync(False)
    elif case == "block in bf16":
        fully_shard(model.blocks[0], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        list(fully_shard(model).parameters())


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("device", "device_id=0, but this machine has no accelerator: leave it out"),
        ("group", "process_group: pass device_mesh="),
        ("ignored", "ignored_modules: every parameter of the module is sharded"),
        ("ignored parameters", "ignored_params: every parameter of the module is sharded"),
        ("hybrid", "LOCAL_WORLD_SIZE='' does not say how the 2 ranks lie on machines"),
        ("used before", "sharded already: wrap blocks first and the model last"),
        ("used before, fully", "was used before: call fully_shard on all blocks and then on the model"),
        ("not the model", "this Block is called by a TinyGPT that was not wrapped itself: call fully_shard on the"),
        ("not the model, wrapped", "is called by a TinyGPT that was not wrapped itself: call FSDP on the whole"),
        ("twice", "fully_shard was called on this TinyGPT already"),
        ("list", "a ModuleList is never called, so nothing would gather it"),
        ("local", "choose StateDictType.FULL_STATE_DICT, or SHARDED_STATE_DICT"),
        ("plain", "this TinyGPT is not wrapped by FSDP, and nothing in it is"),
        ("reshard", "reshard_after_forward=4: True releases parameters after forward, False keeps them"),
        ("block's setting", "set_requires_gradient_sync: call it on the model, not on a Block inside it"),
        ("block in bf16", "give the model the policy of its blocks"),
    ],
)
def test_misuse_is_told(ranks: Any, case: str, words: str) -> None:
    for error in ranks(2, raised, misuse, case):
        assert words in error
        assert "\n" not in error


def alone_in_bf16(strategy: ShardingStrategy) -> list[float]:
    """AdamW, which wants gradients of its masters' dtype, accumulating two backwards in every second step."""
    model = make_model()
    wrapped = FSDP(model, sharding_strategy=strategy, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    (batch,) = batches(1)
    losses = []
    for step in range(6):
        for _ in range(1 + step % 2):
            loss = wrapped(*batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zf.close(model)
    return losses


@pytest.mark.parametrize("strategy", [ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD])
def test_a_single_rank_trains_in_16_bits(ranks: Any, strategy: ShardingStrategy) -> None:
    (losses,) = ranks(1, alone_in_bf16, strategy)
    assert losses[-1] < losses[0] - 0.3


def whole_states_of(script: Any, gets: Any) -> dict[str, Any]:
    """What a script of FSDP2 saves as one file, and a further step after loading it into another model."""
    model = make_model()
    for block in model.blocks:
        script(block)
    script(model)
    optimizer = adamw(model.parameters())
    first, second = batches(2)
    model(*first).backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = gets.get_model_state_dict(model, options=options)
    states = weights, gets.get_optimizer_state_dict(model, optimizer, options=options)
    both = gets.get_state_dict(model, optimizer, options=options)
    assert [list(state) for state in both] == [list(state) for state in states]
    assert bool(states[0]) == (dist.get_rank() == 0)
    again = TinyGPT()
    for block in again.blocks:
        script(block)
    script(again)
    optimizer = adamw(again.parameters())
    loads = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, dict(states[0]), options=loads)  # which puts others into what it is given
    set_optimizer_state_dict(again, optimizer, states[1], options=loads)
    again(*second).backward()
    optimizer.step()
    trained = {name: parameter.full_tensor().detach() for name, parameter in again.named_parameters()}
    pickle.dumps(states)
    return {"saved": states, "trained": trained}


def whole_states() -> float:
    theirs = whole_states_of(torch.distributed.fsdp.fully_shard, torch.distributed.checkpoint.state_dict)
    found = whole_states_of(fully_shard, faces)
    flat = [list(torch.utils._pytree.tree_leaves(held)) for held in (theirs, found)]
    assert len(flat[0]) == len(flat[1])
    tensors = [(a, b) for a, b in zip(*flat, strict=True) if isinstance(a, torch.Tensor)]
    return max((a - b).abs().max().item() for a, b in tensors)


def test_states_are_whole_on_rank_0_as_torchs_are(ranks: Any) -> None:
    assert max(ranks(2, whole_states)) < 1e-6
