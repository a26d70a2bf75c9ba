"""What checkpoints, offloaded activations and zf.cross_entropy cannot take is said in one line, with the fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import zerofold as zf

NO_MODULE: Any = "gpt"


def blocks() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))


def inputs() -> Tensor:
    return torch.ones(2, 8, requires_grad=True)


def checkpointed(**how: Any) -> Callable[[], Any]:
    return lambda: zf.checkpoint_blocks(blocks(), **how)


def called(**how: Any) -> Callable[[], Any]:
    return lambda: zf.checkpoint(torch.exp, inputs(), **how)


def offloaded(model: Any = None, **how: Any) -> Callable[[], Any]:
    return lambda: zf.offload_activations(model, **how).__enter__()


def loss(**given: Any) -> Callable[[], Any]:
    usual = {"hidden": inputs(), "weight": torch.ones(4, 8), "targets": torch.zeros(2, dtype=torch.int64)}
    return lambda: zf.cross_entropy(**{**usual, **given})


SAID: list[tuple[Callable[[], Any], str]] = [
    (lambda: zf.checkpoint_blocks(NO_MODULE), r"checkpoint_blocks: the model is a str: give a torch.nn.Module"),
    (checkpointed(keep="host", path="/tmp"), r"path='/tmp' is for keep=\"nvme\", not for keep='host': leave it out"),
    (checkpointed(path="/tmp"), r"path='/tmp' is for keep=\"nvme\", not for keep='device': leave it out"),
    (checkpointed(keep="auto", budget=-1), r"budget=-1 is no size; give bytes"),
    (checkpointed(keep="auto", budget="much"), r"budget='much' is no size; give bytes"),
    (checkpointed(keep="auto", budget=0), r"budget=0 allows nothing: give more than 0"),
    (checkpointed(keep="host", budget="4GiB"), r"budget='4GiB' is for keep=\"auto\", not for keep='host'"),
    (checkpointed(policy=[torch.sin]), r"policy: 'sin' is not an operator .*give one like torch.ops.aten.sin.default"),
    (called(policy=[torch.sin]), r"policy: 'sin' is not an operator .*give one like torch.ops.aten.sin.default"),
    (called(policy=[torch.ops.aten.mm]), r"policy: 'mm' is not an operator .*give one like torch.ops.aten.mm.default"),
    (called(policy=["matmuls"]), r"policy: 'matmuls' is not an operator .*give one like torch.ops.aten.mm.default"),
    (called(policy="mm"), r"policy='mm': give a list of operators"),
    (called(store="host"), r"store='host': give a store .*store = zf.CheckpointStore\(\"host\"\)"),
    (offloaded(NO_MODULE), r"offload_activations: the model is a str: give a torch.nn.Module"),
    (offloaded(keep="disk"), r"offload_activations: keep='disk': use \"host\" or \"nvme\"$"),
    (offloaded(keep="auto"), r"offload_activations: keep='auto': use \"host\" or \"nvme\"$"),
    (offloaded(path="/tmp"), r"path='/tmp' is for keep=\"nvme\", not for keep='host': leave it out"),
    (loss(weight=torch.ones(4, 8).bfloat16()), r"hidden is torch.float32, and weight is torch.bfloat16: give both in"),
    (loss(bias=torch.ones(4).double()), r"hidden is torch.float32, and bias is torch.float64: give both in one dtype"),
    (loss(hidden=numpy.ones((2, 8))), r"cross_entropy: hidden is a ndarray: give a torch.Tensor"),
    (loss(targets=[0, 1]), r"cross_entropy: targets is a list: give a torch.Tensor"),
    (loss(hidden=torch.ones(2, 8).long()), r"hidden is torch.int64: give what the last block made"),
    (loss(chunk="2"), r"chunk='2', vocabulary_chunk=16384: give whole numbers, at least 1"),
    (loss(label_smoothing="some"), r"label_smoothing='some': give a number from 0 to 1"),
]


@pytest.mark.parametrize(("call", "says"), SAID)
def test_what_cannot_be_is_said_in_one_line(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_budget_may_be_written_as_people_write_it(capsys: pytest.CaptureFixture[str]) -> None:
    for budget, said in (("3GiB", "of 3.0 GiB"), (2 * 2**30, "of 2.0 GiB")):
        model = blocks()
        zf.checkpoint_blocks(model, keep="auto", budget=budget)
        model(inputs()).sum().backward()
        assert said in capsys.readouterr().out


def test_autocast_gives_the_head_one_dtype() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert loss(weight=torch.ones(4, 8).bfloat16())().isfinite()
