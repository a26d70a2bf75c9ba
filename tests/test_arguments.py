"""Arguments of the wrong kind: one line that names the argument, its value and the fix, never an error from inside."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models import Block, TinyGPT, batches, make_model
from tests.ranks import raised
from torch import nn

import zerofold as zf
from zerofold.parallel.mesh import Mesh
from zerofold.parallel.pipeline import Pipeline


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def prepared(**options: Any) -> tuple[TinyGPT, torch.optim.Optimizer]:
    model = make_model()
    return zf.prepare(model, adamw(model), **({"stage": 3, "units": Block} | options))


def others_scheduler() -> Any:
    return torch.optim.lr_scheduler.StepLR(adamw(nn.Linear(2, 2)), 1)


def shard_a_part() -> None:
    model, _ = prepared()
    zf.shard(model.head)


def run_step(**values: Any) -> None:
    model, _ = prepared()
    zf.Run(tempfile.mkdtemp(), model).step(**values)


def mean(output: Any, target: Any) -> Any:
    return output.mean()


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "a module as units": (lambda: prepared(units=nn.Linear(2, 2)), "units=Linear("),
    "a predicate of one argument": (lambda: prepared(units=lambda module: True), "called as units(name, module)"),
    "text as a flag": (lambda: prepared(overlap="no"), "overlap='no' must be True or False"),
    "text as another flag": (lambda: prepared(contiguous_gradients="yes"), "contiguous_gradients='yes' must be"),
    "text as one_pass": (lambda: prepared(one_pass="auto"), "one_pass='auto' must be True, False, or None"),
    "text as gather": (lambda: zf.close(prepared()[0], gather="no"), "gather='no' must be True or False"),
    "a device that is none": (lambda: prepared(device="gpu"), "device='gpu' is no device"),
    "another's scheduler": (lambda: prepared(scheduler=others_scheduler()), "build it on the optimizer"),
    "DDP around": (lambda: zf.shard(nn.parallel.DistributedDataParallel(make_model())), "give what it wraps"),
    "a part of a sharded model": (shard_a_part, "holds parameters of a model that is sharded already"),
    "a number as a path": (lambda: zf.save(*prepared(), 3), "path=3 must be a path"),
    "no path": (lambda: zf.load(*prepared(), None), "path=None must be a path"),
    "no path to export to": (lambda: zf.export(prepared()[0], None), "path=None must be a path"),
    "weights from a number": (lambda: prepared(load=3), "path=3 must be a path"),
    "extra that is a list": (lambda: zf.save(*prepared(), "x", extra=[1]), "extra=[1] must be a dict"),
    "a name for a tensor": (lambda: zf.full("head.weight"), "zf.full: a str was given"),
    "a model for a parameter": (lambda: zf.full_grad(make_model()), "zf.full_grad: a TinyGPT was given"),
    "text as a rank": (lambda: zf.full_params(prepared()[0], from_rank="0").__enter__(), "from_rank='0'"),
    "text as a norm": (lambda: zf.clip_grad_norm_(prepared()[0], "1"), "max_norm='1' must be a number"),
    "norm of order 0": (lambda: zf.clip_grad_norm_(prepared()[0], 1.0, 0), "norm_type=0 must be positive"),
    "text as a value": (lambda: zf.clip_grad_value_(prepared()[0], "x"), "value='x' must be a number"),
    "text as lr": (lambda: zf.Lion([nn.Parameter(torch.ones(1))], lr="x"), "lr='x' must be a finite number"),
    "text as every": (lambda: zf.Run("x", prepared()[0], every="1"), "every='1' must be a number of steps"),
    "a vector as loss": (lambda: run_step(loss=torch.ones(3)), "loss= is a tensor of shape (3,)"),
    "text as loss": (lambda: run_step(loss="low"), "loss= is a str"),
    "a rank beyond the others": (lambda: zf.Samples(8, batch=4, rank=5, ranks=2), "rank=5, ranks=2"),
    "a rank of unknown ranks": (lambda: zf.Samples(8, batch=4, rank=0), "give both"),
    "text as a position": (lambda: zf.Samples(8, batch=4).load_state_dict("x"), "a str is no position"),
    "a number for batches": (lambda: zf.join(prepared()[0], 3), "batches is a int"),
    "a number as partition": (lambda: zf.CheckpointStore(partition=3), "partition=3 must be what zf.mesh"),
    "text as expected": (lambda: zf.CheckpointStore(expected="3"), "expected='3' must be a number"),
    "a mesh of nothing": (lambda: Mesh(None), "make it with zf.mesh("),
    "a pipeline by hand": (lambda: Pipeline(make_model(), zf.mesh(), None, "1f1b", 2, None), "made by zf.pipeline"),
    "a parameter by hand": (lambda: zf.ShardedParameter(torch.ones(3), None), "is made by zf.shard"),
    "no model": (lambda: zf.tensor_parallel(None, zf.mesh()), "model must be a torch.nn.Module"),
    "a list as plan": (lambda: zf.tensor_parallel(make_model(), zf.mesh(), ["head"]), "plan=['head'] must be a dict"),
    "a number as example": (
        lambda: zf.pipeline(make_model(), zf.mesh(), microbatches=2, loss_fn=mean, example=3),
        "example=3 must be a tuple or a dict",
    ),
    "a list for a parser": (lambda: zf.add_config_arguments(["--x"]), "takes an argparse.ArgumentParser"),
    "text as world size": (lambda: zf.plan(params=7e9, world_size="8"), "world_size='8' must be a whole number"),
    "text as memory": (lambda: zf.plan(params=7e9, device_memory="80GB"), "device_memory='80GB' must be"),
    "a module to plan for": (lambda: zf.plan(make_model()), "model= is a TinyGPT"),
    "a model to simulate": (lambda: zf.simulate(make_model(), 4), "takes a zerofold.simulation Training"),
}


def messages() -> dict[str, str]:
    return {name: raised(call) for name, (call, _) in CASES.items()}


def test_each_is_refused_in_one_line(ranks: Any) -> None:
    (said,) = ranks(1, messages)
    for name, (_, part) in CASES.items():
        kind, _, message = said[name].partition(": ")
        assert kind in ("TypeError", "ValueError"), said[name]
        assert part in message, said[name]
        assert "\n" not in message, said[name]


def fully_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    fully_shard(model)
    zf.shard(model)


def test_a_model_of_torchs_fsdp_is_refused(ranks: Any) -> None:
    for said in ranks(2, raised, fully_sharded):
        assert "leave fully_shard or the wrapper out" in said


def backward_after_close(stage: int | str, precision: str | None) -> None:
    model, _ = prepared(stage=stage, precision=precision)
    (batch,) = batches(1)
    loss = model(*batch)
    zf.close(model)
    loss.backward()


@pytest.mark.parametrize(("stage", "precision"), [(0, None), (2, "bf16"), (3, None), (3, "fp16")])
def test_a_backward_after_close_is_told_so(ranks: Any, stage: int | str, precision: str | None) -> None:
    for said in ranks(2, raised, backward_after_close, stage, precision):
        assert "call backward before zf.close" in said, said


def logged_by_a_pipeline() -> list[str]:
    class Mean(nn.Module):  # it runs on no words, which are what is tried without example=
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2))
            self.head = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(handler)
    try:
        zf.pipeline(Mean(), zf.mesh(), microbatches=2, loss_fn=mean)
    finally:
        logger.removeHandler(handler)
    return found


def test_what_a_pipeline_tries_is_not_logged_as_an_error(ranks: Any) -> None:
    assert ranks(1, logged_by_a_pipeline) == [[]]
