"""DeepSpeed's engine in shape: the behaviours that scripts rely on, each against plain torch on the same data."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import TinyGPT, batches, largest_difference, make_model
from tests.ranks import raised
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import zerofold as zf

STAGES = (0, 1, 2, 3)
LR = 1e-2


def config_of(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": LR}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
        **more,
    }


def engine_on(model: nn.Module, stage: int, **more: Any) -> Any:
    return zf.initialize(model=model, config=config_of(stage, **more))[0]


def whole(engine: Any) -> list[Tensor]:
    return [zf.full(p) for p in engine.module.parameters()]


def reference(*sums: list[tuple[Tensor, Tensor]], model: TinyGPT | None = None) -> list[Tensor]:
    """SGD on torch's DDP; each list of batches makes one step, its loss the mean over them."""
    wrapped = DistributedDataParallel(model or make_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LR)
    for batch_list in sums:
        for index, batch in enumerate(batch_list):
            if index < len(batch_list) - 1:
                with wrapped.no_sync():
                    (wrapped(*batch) / len(batch_list)).backward()
            else:
                (wrapped(*batch) / len(batch_list)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in wrapped.module.parameters()]


def pairs(count: int, each: int) -> list[list[tuple[Tensor, Tensor]]]:
    found = list(batches(count * each))
    return [found[index * each : (index + 1) * each] for index in range(count)]


# Accumulation: counted by step(), said by hand, left to the caller, or inside no_sync. All give the same weights.


def accumulate(stage: int, how: str) -> tuple[float, list[Any]]:
    steps = pairs(2, 3)
    options = {"gradient_accumulation_steps": 3}
    if how == "unmanaged":
        options |= {"managed_gradient_accumulation": False}
    engine = engine_on(make_model(), stage, **options)
    seen = []
    for step in steps:
        for index, batch in enumerate(step):
            if how == "by_hand":
                engine.set_gradient_accumulation_boundary(index == 2)
            if how == "no_sync" and index < 2:
                with engine.no_sync():
                    engine.backward(engine(*batch))
            elif how == "plain":
                engine(*batch).backward()  # divided as engine.backward does
            else:
                engine.backward(engine(*batch))
            if how == "counted" and stage:
                seen.append(engine.is_gradient_accumulation_boundary())
            if how in ("counted", "plain", "no_sync") or index == 2:
                engine.step()
                seen.append((engine.was_step_applied(), engine.micro_steps, engine.global_steps))
    difference = largest_difference(whole(engine), reference(*steps))
    assert engine.global_samples == 2 * 3 * 2 * dist.get_world_size()
    engine.destroy()
    return difference, seen


@pytest.mark.parametrize("how", ["counted", "by_hand", "unmanaged", "no_sync", "plain"])
@pytest.mark.parametrize("stage", STAGES)
def test_accumulation(ranks: Any, stage: int, how: str) -> None:
    for difference, seen in ranks(2, accumulate, stage, how):
        assert difference < 1e-6
        applied = [entry for entry in seen if isinstance(entry, tuple) and entry[0]]
        assert [step for _, _, step in applied] == [1, 2]
        if how in ("counted", "plain", "no_sync"):
            assert [micro for _, micro, _ in applied] == [3, 6]
        if how == "counted" and stage:
            assert [entry for entry in seen if isinstance(entry, bool)] == [False, False, True] * 2


def bytes_of_two_micro_batches(stage: int) -> float:
    """Elements sent per parameter by two micro-batches that make one step."""
    engine = engine_on(make_model(), stage, gradient_accumulation_steps=2)
    for batch in batches(4):  # the first step learns the order
        before = zf.ledger(engine.module).snapshot()["comm_elements"]
        engine.backward(engine(*batch))
        engine.step()
        if engine.micro_steps == 3:
            first = zf.ledger(engine.module).snapshot()["comm_elements"] - before
    psi = zf.ledger(engine.module).snapshot()["psi"]
    engine.destroy()
    return first / psi


def test_whole_gradients_are_sent_once_a_step(ranks: Any) -> None:
    """Stage 1 keeps the gradients of the first micro-batch to itself; stage 2 has no room for them."""
    one, two = (ranks(2, bytes_of_two_micro_batches, stage)[0] for stage in (1, 2))
    assert one < 0.1
    assert two > 0.4


# Losses and models of every kind.


def several_backwards(stage: int) -> float:
    """Two backwards before one step, the first keeping its graph: gradients add up."""
    (batch,) = batches(1)
    engine = engine_on(make_model(), stage)
    loss = engine(*batch)
    engine.backward(loss, retain_graph=True)
    engine.backward(0.5 * loss)
    engine.step()
    model = make_model()
    wrapped = DistributedDataParallel(model)
    (1.5 * wrapped(*batch)).backward()
    with torch.no_grad():
        expected = [p - LR * p.grad for p in model.parameters()]
    difference = largest_difference(whole(engine), expected)
    engine.destroy()
    return difference


@pytest.mark.parametrize("stage", STAGES)
def test_several_backwards_make_one_step(ranks: Any, stage: int) -> None:
    assert max(ranks(2, several_backwards, stage)) < 1e-6


class Pair(nn.Module):
    """Gives logits of one of two heads; the other head has no gradient then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor, head: str = "first") -> Tensor:
        return getattr(self, head)(self.body(x).tanh()) * self.scale


def inputs(seed: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * seed + dist.get_rank()))


def averaged(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)


def non_scalar(stage: int) -> tuple[float, str]:
    engine, plain = engine_on(Pair(), stage), Pair()
    weights = torch.arange(12.0).view(4, 3)
    outputs = engine(inputs(1))
    message = raised(engine.backward, outputs)
    outputs.backward(gradient=weights)
    engine.step()
    plain(inputs(1)).backward(gradient=weights)
    averaged(plain)
    torch.optim.SGD(plain.parameters(), lr=LR).step()
    difference = largest_difference(whole(engine), list(plain.parameters()))
    engine.destroy()
    return difference, message


def autocast_of_the_config(stage: int) -> tuple[float, str]:
    engine = engine_on(make_model(), stage, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    wrapped = DistributedDataParallel(make_model())
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=LR)
    kinds: list[torch.dtype] = []
    hook = engine.module.head.register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
    for batch in batches(3):
        engine.backward(engine(*batch))
        engine.step()
        with torch.autocast("cpu", torch.bfloat16):
            loss = wrapped(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    hook.remove()
    difference = largest_difference(whole(engine), [p.detach() for p in wrapped.module.parameters()])
    engine.destroy()
    return difference, str(kinds[-1])


@pytest.mark.parametrize("stage", [0, 3])
def test_autocast_of_the_config(ranks: Any, stage: int) -> None:
    assert ranks(2, autocast_of_the_config, stage) == [(0.0, "torch.bfloat16")] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_outputs_of_any_shape_can_be_given_gradients(ranks: Any, stage: int) -> None:
    for difference, message in ranks(2, non_scalar, stage):
        assert difference < 1e-6
        assert "one element" in message
        assert "(4, 3)" in message
        assert "gradient=" in message


def combined(stage: int) -> float:
    """A student and a teacher of its own engine, trained by one loss over both."""
    options = {"gradient_accumulation_steps": 2}
    one, other = engine_on(Pair(), stage, **options), engine_on(make_pair(3), stage, **options)
    plain = [Pair(), make_pair(3)]
    for seed in (1, 2, 3, 4):
        loss = (one(inputs(seed)) - other(inputs(seed))).pow(2).mean()
        if seed < 3:
            one.backward(loss)
        else:
            loss.backward()
        one.step()
        other.step()
        ((plain[0](inputs(seed)) - plain[1](inputs(seed))).pow(2).mean() / 2).backward()
        for model in plain if seed % 2 == 0 else ():
            averaged(model)
            torch.optim.SGD(model.parameters(), lr=LR).step()
            model.zero_grad()
    difference = max(
        largest_difference(whole(e), list(p.parameters())) for e, p in zip((one, other), plain, strict=True)
    )
    one.destroy()
    other.destroy()
    return difference


def make_pair(seed: int) -> Pair:
    model = Pair()
    torch.manual_seed(seed)
    for layer in (model.body, model.first, model.second):
        layer.reset_parameters()
    return model


@pytest.mark.parametrize("stage", STAGES)
def test_several_engines_and_one_loss(ranks: Any, stage: int) -> None:
    assert max(ranks(2, combined, stage)) < 1e-6


def partly_used(stage: int) -> dict[str, Any]:
    """An unused head, a frozen parameter, an empty parameter group, and one that the optimizer was not given."""
    model = Pair()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    groups = [
        {"params": [*model.body.parameters(), model.first.weight, *model.second.parameters()]},
        {"params": [], "lr": 0.5},
    ]
    config = config_of(stage)
    engine, optimizer, _, _ = zf.initialize(model=model, model_parameters=groups, config=config)
    for seed in (1, 2):
        engine.backward(engine(inputs(seed)).pow(2).mean())
        engine.step()
    after = {name: zf.full(p) for name, p in model.named_parameters()}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    groups_left = [len(group["params"]) for group in optimizer.param_groups]
    engine.destroy()
    return {"moved": moved, "groups": groups_left, "trained again": model.first.bias.requires_grad}


@pytest.mark.parametrize("stage", STAGES)
def test_unused_frozen_and_forgotten_parameters_stay(ranks: Any, stage: int) -> None:
    for found in ranks(2, partly_used, stage):
        assert found["moved"] == {"body.weight", "body.bias", "first.weight"}
        assert found["groups"] == [5, 0]


# Settings that the engine answers for and changes.


def settings() -> dict[str, Any]:
    engine = engine_on(
        make_model(),
        2,
        gradient_accumulation_steps=2,
        gradient_clipping=0.5,
        scheduler=SCHEDULER,
        bf16={"enabled": True},
    )
    found: dict[str, Any] = {"info": engine.get_batch_info(), "clip": engine.gradient_clipping()}
    found["first lr"] = engine.get_lr()
    for batch in batches(4):
        engine.backward(engine(*batch))
        engine.step()
    found["lr"] = engine.get_lr()
    found["norm"] = engine.get_global_grad_norm()
    engine.set_train_batch_size(16)
    found["larger"] = engine.get_batch_info()
    engine.set_train_micro_batch_size(3)
    found["micro"] = engine.get_batch_info()
    found["wrong"] = raised(engine.set_train_batch_size, 13)
    engine.set_lr(0.125)
    found["set lr"] = engine.get_lr()
    found["asked"] = (engine.zero_optimization_stage(), engine.bfloat16_enabled(), engine.fp16_enabled())
    found["of the model"] = engine.checkpoint
    with engine.no_sync():
        found["step inside"] = raised(engine.step)
    found["no graph"] = raised(engine.backward, torch.tensor(1.0))
    engine.destroy()
    return found


SCHEDULER = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1, "warmup_num_steps": 4, "warmup_type": "linear"}}


def test_settings_can_be_asked_and_changed(ranks: Any) -> None:
    found = ranks(2, settings)[0]
    assert found["info"] == (8, 2, 2)
    assert found["larger"] == (16, 2, 4)
    assert found["micro"] == (24, 3, 4)
    assert found["clip"] == 0.5
    assert found["norm"] > 0.5
    assert found["lr"] == [pytest.approx(0.025)]
    assert found["set lr"] == [0.125]
    assert found["asked"] == (2, True, False)
    assert found["of the model"] == "none"
    assert "13" in found["wrong"]
    assert "6 = 3 per rank x 2 ranks" in found["wrong"]
    assert "no_sync" in found["step inside"]
    assert "no graph" in found["no graph"]


def test_calls_that_cannot_be(ranks: Any) -> None:
    for messages in ranks(1, misuses):
        assert "model=" in messages[0]
        assert "needs a config" in messages[1]
        assert "2 configs" in messages[2]
        assert "needs an optimizer" in messages[3]
        assert "give zf.mesh(tensor=...)" in messages[4]


def misuses() -> list[str]:
    config = config_of(1)
    del config["optimizer"]
    without = zf.initialize(model=Pair(), config=config)[0]
    found = [
        raised(zf.initialize, config=config_of(1)),
        raised(zf.initialize, model=Pair()),
        raised(zf.initialize, model=Pair(), config=config_of(1), config_params=config_of(1)),
        raised(without.step),
        raised(zf.initialize, model=Pair(), config=config_of(1), mpu=object()),
    ]
    without(inputs(1))
    without.destroy()
    return found


# Data and checkpoints.


def load_data() -> list[list[int]]:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    config = config_of(1, dataloader_drop_last=True)
    engine, _, loader, _ = zf.initialize(model=Pair(), training_data=data, config=config)
    epochs = [[int(i) for (batch,) in loader for i in batch] for _ in range(2)]
    engine.destroy()
    return epochs


def test_training_data_is_shared_out(ranks: Any) -> None:
    first, second = ranks(2, load_data)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other) == 4
        assert not set(one) & set(other)
    assert first[0] != first[1]  # another order in the next epoch


def go_on(folder: str, stage: int, load_stage: int) -> dict[str, Any]:
    data = list(batches(6))
    options: dict[str, Any] = {"scheduler": SCHEDULER}
    options["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    engine = engine_on(make_model(), stage, **options)
    losses = []
    for index, batch in enumerate(data):
        if index == 3:
            engine.save_checkpoint(folder, client_state={"epoch": 2, "best": [0.5, (1, 2)]})
        losses.append(engine(*batch))
        engine.backward(losses[-1])
        engine.step()
    engine.save_checkpoint(folder, tag="other", save_latest=False)
    engine.destroy()
    again = engine_on(make_model(key_bias=True), load_stage, **options)
    path, client_state = again.load_checkpoint(folder)
    found: dict[str, Any] = {"path": Path(path or "").name, "client": client_state, "step": again.global_steps}
    resumed = []
    for batch in data[3:]:
        resumed.append(again(*batch))
        again.backward(resumed[-1])
        again.step()
    found["difference"] = max(abs(a.item() - b.item()) for a, b in zip(losses[3:], resumed, strict=True))
    found["steps"], found["lr"] = again.global_steps, again.get_lr()
    # The weights alone: counters, schedule and moments stay.
    again.load_checkpoint(folder, load_module_only=True)
    found["module only"] = again.global_steps, again.get_lr()
    again.load_checkpoint(folder, load_lr_scheduler_states=False)
    found["without schedule"] = again.global_steps, again.get_lr()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["nothing"] = again.load_checkpoint(f"{folder}/none")
    found["warned"] = [str(each.message) for each in caught]
    found["no such tag"] = raised(again.load_checkpoint, folder, tag="best")
    del options["scheduler"]
    without = engine_on(make_model(), load_stage, **options, gradient_accumulation_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        without.load_checkpoint(folder)
        found["differs"] = [str(each.message) for each in caught]
        without.load_checkpoint(folder, load_lr_scheduler_states=False)
        without.backward(without(*data[0]))
        without.step()
        without.save_checkpoint(folder, tag="begun")
        found["begun"] = [str(each.message) for each in caught if "into a step" in str(each.message)]
    found["another accumulation"] = without.global_steps, without.micro_steps
    without.destroy()
    again.destroy()
    return found


@pytest.mark.parametrize(("stage", "load_stage"), [(2, 2), (3, 1)])
def test_a_run_goes_on_from_its_checkpoint(ranks: Any, tmp_path: Path, stage: int, load_stage: int) -> None:
    found = ranks(2, go_on, str(tmp_path / "run"), stage, load_stage)
    for each in found:
        assert each["path"] == "global_step3"
        assert each["client"] == {"epoch": 2, "best": [0.5, (1, 2)]}
        assert each["step"] == 3
        assert each["steps"] == 6
        assert each["difference"] < 1e-5
        assert each["module only"] == (6, each["lr"])
        assert each["without schedule"][0] == 3
        assert each["nothing"] == (None, None)
        assert "best" in each["no such tag"]
        assert each["another accumulation"] == (3, 7)  # three steps of two, and one micro-batch
    assert len(found[0]["differs"]) == 1
    assert "1 scheduler(s), and there are 0" in found[0]["differs"][0]
    assert "1 micro-batch(es) into a step of 2" in found[0]["begun"][0]
    assert "holds no checkpoint" in found[0]["warned"][0]
    kept = json.loads((tmp_path / "run" / "ds_config.resolved.json").read_text())
    assert kept["train_batch_size"] == 8  # of the last engine that saved


def save_under_two_names(folder: str, rule: str) -> tuple[str | None, list[str]]:
    engine = engine_on(Pair(), 1, checkpoint={"tag_validation": rule})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tag = f"rank{dist.get_rank()}"
        message = raised(engine.save_checkpoint, folder, tag) if rule == "Fail" else None
        if rule != "Fail":
            engine.save_checkpoint(folder, tag)
    engine.destroy()
    return message, [str(each.message) for each in caught if "different" in str(each.message)]


@pytest.mark.parametrize("rule", ["Warn", "Fail", "Ignore"])
def test_tags_that_differ_between_ranks(ranks: Any, tmp_path: Path, rule: str) -> None:
    first, second = ranks(2, save_under_two_names, str(tmp_path), rule)
    if rule == "Fail":
        assert all("'rank0'" in str(each[0]) and "'rank1'" in str(each[0]) for each in (first, second))
        assert not (tmp_path / "rank0").exists()
    else:
        assert (tmp_path / "rank0").is_dir()
        assert not (tmp_path / "rank1").exists()
        assert bool(first[1]) is (rule == "Warn")


def weights_for_others(folder: str, stage: int) -> dict[str, Any]:
    model = make_model()
    model.head.weight = model.tokens.weight  # tied
    expected = {name: p.detach().to(torch.bfloat16) for name, p in model.state_dict().items()}
    gather = {"stage3_gather_16bit_weights_on_model_save": True}
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": stage, **gather}}
    engine = engine_on(model, stage, **config)
    found: dict[str, Any] = {"written": engine.save_16bit_model(folder)}
    engine.save_16bit_model(folder, "model.safetensors")
    state = engine.module_state_dict()
    found["held"] = state is not None
    engine.destroy()
    if dist.get_rank() == 0:
        loaded = torch.load(Path(folder) / "pytorch_model.bin")
        found["same"] = loaded.keys() == expected.keys() and all(
            torch.equal(loaded[name], expected[name]) for name in expected
        )
    found["left"] = {p.device.type for p in model.parameters()}
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_whole_weights_in_one_file(ranks: Any, tmp_path: Path, stage: int) -> None:
    first, second = ranks(2, weights_for_others, str(tmp_path), stage)
    assert first["written"]
    assert first["same"]
    assert first["held"]
    assert second["held"] is (stage == 1)
    assert first["left"] == ({"cpu"} if stage == 1 else {"meta"})
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", "pytorch_model.bin"]
