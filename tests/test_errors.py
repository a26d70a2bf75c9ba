"""Bad input: one line, the thing and the fix, on every rank, at once."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import Block, TinyGPT, batches, make_model
from tests.ranks import raised
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import zerofold as zf
from zerofold.engine import Engine


def prepare_badly(case: str) -> None:
    model = make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    settings: dict[str, Any] = {}
    rank = dist.get_rank()
    if case == "stage 7":
        settings["stage"] = 7
    elif case == "negative bound":
        settings["live_bytes"] = -1
    elif case == "tiny bound":
        settings["live_bytes"] = 1000
    elif case == "tiny buffer":
        settings["buffer_bytes"] = 1
    elif case == "no parameters":
        model = nn.ReLU()
    elif case == "missing":
        optimizer = torch.optim.AdamW(list(model.parameters())[:-1])
    elif case == "missing on rank 1":
        optimizer = torch.optim.AdamW(list(model.parameters())[: -1 if rank == 1 else None])
    elif case == "foreign":
        optimizer = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(3, 5))])
    elif case == "twice":
        zf.prepare(model, optimizer)
    elif case == "different models":
        model = TinyGPT(layers=3 + rank)
        optimizer = torch.optim.AdamW(model.parameters())
    elif case == "different settings":
        settings["stage"] = 2 + rank
    elif case == "different clip":
        settings["clip"] = 1.0 + rank
    elif case == "different rates":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 / (1 + rank))
    elif case == "clip":
        settings["clip"] = -1.0
    elif case == "cut":
        settings["cut"] = "diagonal"
    elif case == "unit class":
        settings["units"] = nn.Conv2d
    elif case == "unit type":
        settings["units"] = "Block"
    elif case == "no optimizer":
        optimizer = "adamw"
    elif case == "muon":
        model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(2)))
        optimizer = torch.optim.Muon(model.parameters())
    elif case == "adafactor":
        optimizer = torch.optim.Adafactor(model.parameters())
    elif case == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters())
    elif case == "meta without init":
        model.positions.extra = nn.Parameter(torch.empty(3, device="meta"))
        optimizer = torch.optim.AdamW(model.parameters())
    elif case == "device":
        settings["device"] = "meta"
    elif case == "whole cut of nothing":
        settings |= {"stage": 0, "cut": "whole"}
    elif case == "no groups":
        settings["stage"] = "hsdp"
    elif case == "flat groups":
        settings |= {"stage": "hpz", "mesh": init_device_mesh("cpu", (2,))}
    elif case == "even dp":
        settings |= {"stage": "dp", "cut": "even"}
    elif case == "cost":
        settings |= {"cut": "whole", "cost": lambda p: -1.0}
    elif case == "no model":
        model = 5
    elif case == "no mesh":
        settings["mesh"] = 5
    elif case == "no function":
        settings["init"] = 5
    elif case == "half a backward":
        settings["accumulate"] = 1.5
    elif case == "clip text":
        settings["clip"] = "1"
    elif case == "no cost":
        settings |= {"cut": "whole", "cost": lambda p: None}
    elif case == "twisted mesh":
        settings |= {"stage": "hsdp", "mesh": DeviceMesh("cpu", [[1], [0]])}
    elif case == "impatient":
        settings["patience"] = 1
    elif case == "replicas":
        settings["check_replicas"] = 0
    elif case == "failed before":
        model.positions.extra = nn.Parameter(torch.empty(3, device="meta"))
        with contextlib.suppress(ValueError):
            zf.shard(model)
    elif case == "init fails on rank 1":
        model.positions.extra = nn.Parameter(torch.empty(3, device="meta"))
        optimizer = torch.optim.AdamW(model.parameters())
        settings["init"] = fails_on_rank_1
    elif case == "moments of amsgrad":
        optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    elif case == "lbfgs by owner":
        optimizer = torch.optim.LBFGS(model.parameters())
        settings["cut"] = "whole"
    settings |= PRECISION_CASES.get(case, {})
    zf.prepare(model, optimizer, **settings)


PRECISION_CASES: dict[str, dict[str, Any]] = {
    "precision": {"precision": "bf17"},
    "dtype": {"precision": torch.bfloat16},
    "kept nothing": {"precision": zf.Precision(parameters=torch.bfloat16, keep=["nrom*"])},
    "moments of amsgrad": {"precision": zf.Precision(parameters=torch.bfloat16, moments=torch.bfloat16)},
    "two clips": {"clip": 1.0, "clip_value": 1.0},
    "scheduler": {"scheduler": "cosine"},
}


def fails_on_rank_1(module: nn.Module) -> None:
    if dist.get_rank() == 1:
        raise FileNotFoundError("no weights here")
    if hasattr(module, "extra"):
        nn.init.zeros_(module.extra)


CASES = {
    "stage 7": ("stage=7 does not exist", "choose one of dp, 0, 1, 2, 3, hsdp, hpz"),
    "negative bound": ("live_bytes=-1 must be a positive number", "None for the default"),
    "tiny bound": ("live_bytes=1000 is too small", "raise the bound"),
    "tiny buffer": ("buffer_bytes=1 is too small", "at least 1024"),
    "no parameters": ("this ReLU has no parameters", "nothing to shard"),
    "missing": ("misses 1 trainable parameter(s), first 'head.weight'", "add them to a parameter group"),
    "missing on rank 1": ("misses 1 trainable parameter(s), first 'head.weight'", "add them to a parameter group"),
    "foreign": ("of shape (3, 5) is not one of the model's", "build the optimizer from this model's parameters"),
    "twice": ("already sharded", "zf.close(model)"),
    "different models": ("different models", "build the same model"),
    "different settings": ("rank 0 has 'stage=2' where rank 1 has 'stage=3'",),
    "different clip": ("rank 0 has 'clip=1.0' where rank 1 has 'clip=2.0'",),
    "different rates": ("rank 0 has 'lr=0.1' where rank 1 has 'lr=0.05'",),
    "clip": ("clip=-1.0 must be a positive norm", "leave it out"),
    "cut": ("cut='diagonal'", "use cut='even' or cut='whole'"),
    "unit class": ("no module of the model is of that class", "Block"),
    "unit type": ("units='Block' must be a module class", "a predicate"),
    "no optimizer": ("must be a torch.optim.Optimizer, not str", ""),
    "muon": ("Muon does not work element by element", "whole-parameter cut"),
    "adafactor": ("Adafactor does not work element by element", "whole-parameter cut"),
    "lbfgs": ("LBFGS does not work element by element", "whole-parameter cut"),
    "meta without init": ("'positions.extra' was on the meta device and got no values", "pass init="),
    "device": ("device='meta', but the model is on cpu", "move it there first"),
    "whole cut of nothing": ("stage='0' has no cut='whole'", "choose one of stages 1, 2, 3"),
    "no groups": ("stage='hsdp' needs groups of ranks", "mesh=init_device_mesh"),
    "flat groups": ("stage='hpz' needs groups of ranks", "mesh of two dimensions"),
    "even dp": ("stage='dp' has no cut='even'", "leave cut out"),
    "cost": ("cost: -1.0 for 'tokens.weight' is no cost", "at least 0"),
    "no model": ("model must be a torch.nn.Module, not int", ""),
    "no mesh": ("mesh must be a zf.mesh(...) or a torch DeviceMesh, not int", ""),
    "no function": ("init=5 must be a function", "or None"),
    "half a backward": ("accumulate=1.5 must be a whole number", ""),
    "clip text": ("clip='1' must be a number", ""),
    "no cost": ("cost: None for 'tokens.weight' is no cost", "return a finite number"),
    "twisted mesh": ("ranks must ascend along both dimensions", "not [[1], [0]]"),
    "failed before": ("an earlier attempt to shard this model failed half way", "build it again"),
    "init fails on rank 1": ("FileNotFoundError: no weights here", ""),
    "precision": ("precision='bf17' does not exist", "choose one of fp32, tf32, bf16, fp16"),
    "dtype": ("precision=torch.bfloat16 does not exist", "zf.Precision"),
    "kept nothing": ("keep='nrom*' matches no module and no parameter", ""),
    "moments of amsgrad": ("bf16 moments or masters", "it has no amsgrad=True"),
    "impatient": ("patience=1 must be a number of seconds, at least 5", "leave it out"),
    "replicas": ("check_replicas=0 must be a number of steps", "or None for never"),
    "two clips": ("clip= and clip_value= are two ways to clip", "give one of them"),
    "scheduler": ("scheduler must be a learning-rate scheduler, not str", ""),
    "lbfgs by owner": ("LBFGS does not work parameter by parameter", "use stage 0"),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_refused_on_every_rank(ranks: Any, case: str) -> None:
    ranks(2, dist.get_rank)  # the processes exist before the clock starts
    start = time.monotonic()
    errors = ranks(2, raised, prepare_badly, case)
    assert time.monotonic() - start < 10
    for error in errors:
        assert all(part in error for part in CASES[case]), error
        assert "\n" not in error


def without_a_process_group() -> str:
    dist.destroy_process_group()
    model = make_model()
    try:
        zf.prepare(model, torch.optim.AdamW(model.parameters()))
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_use_before_the_process_group_exists(ranks: Any) -> None:
    (message,) = ranks(1, without_a_process_group)
    assert "no process group yet" in message
    assert "init_process_group" in message


def refused_preparation_leaves_the_model_usable() -> bool:
    model = make_model()
    with contextlib.suppress(ValueError):
        zf.prepare(model, torch.optim.Adafactor(model.parameters()), stage=3)
    (batch,) = batches(1)
    model(*batch).backward()
    return all(type(p) is nn.Parameter and p.grad is not None for p in model.parameters())


def test_a_refused_preparation_leaves_the_model_usable(ranks: Any) -> None:
    assert ranks(2, refused_preparation_leaves_the_model_usable) == [True, True]


def touch(what: str) -> None:
    held = make_model()
    before = held.head.weight
    model = zf.shard(held, stage=3, units=Block)
    if what == "sharded parameter":
        model.head.weight @ torch.ones(40)
    elif what == "norm":
        model.head.weight.norm()
    elif what == "reference from before":
        before.sum()
    elif what == "torch clipping":
        (batch,) = batches(1)
        model(*batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.parametrize(
    ("what", "fix"),
    [
        ("sharded parameter", "zf.full(p)"),
        ("norm", "zf.clip_grad_norm_"),
        ("reference from before", "zf.full(p)"),
        ("torch clipping", "zf.clip_grad_norm_"),
    ],
)
def test_touching_what_is_not_here_raises(ranks: Any, what: str, fix: str) -> None:
    for error in ranks(2, raised, touch, what):
        assert "RuntimeError" in error
        assert "head.weight" in error or "tokens.weight" in error
        assert fix in error


def unattached(stage: int) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    zf.shard(model, stage=stage)
    (batch,) = batches(1)
    model(*batch).backward()
    optimizer.step()


@pytest.mark.parametrize("stage", [1, 2])
def test_an_optimizer_on_whole_parameters_must_be_attached(ranks: Any, stage: int) -> None:
    for error in ranks(2, raised, unattached, stage):
        assert "zf.attach(model, optimizer)" in error


def gathers_that_differ() -> None:
    model = zf.shard(make_model(), stage=3)
    (batch,) = batches(1)
    loss = model(*batch)
    engine = Engine.of(model)
    engine.reductions.note_gather(engine.units[dist.get_rank()])  # as if each rank had gathered another unit
    loss.backward()


def test_ranks_on_different_units_are_noticed(ranks: Any) -> None:
    for error in ranks(2, gathers_that_differ, expect_error=True):
        assert "gathered different units" in error
        assert "all_gather" in error


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"parameters": "bf16"}, "parameters='bf16' is not possible; choose one of"),
        ({"parameters": torch.bfloat16, "accumulation": torch.float16}, "accumulation=torch.float16 is not possible"),
        ({"parameters": torch.bfloat16, "keep": "norm"}, "must be a list"),
        ({"keep": [nn.LayerNorm]}, "parameters= must be a 16-bit dtype"),
        ({"parameters": torch.bfloat16, "loss_scale": zf.LossScale()}, "loss_scale is for parameters=torch.float16"),
        ({"parameters": torch.float16, "master": torch.bfloat16}, "needs parameters=torch.bfloat16"),
        ({"parameters": torch.bfloat16, "reduction": torch.float16}, "needs parameters=torch.float16"),
        ({"outputs": torch.int64}, "must be a floating-point dtype"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        zf.Precision(**fields)
