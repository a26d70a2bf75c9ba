"""An error in one stage of a pipeline ends the step on all ranks, and training can go on after it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tests.test_3d import Sizes, adamw, alone, batch, loss_fn, made
from torch import Tensor, nn

import zerofold as zf

BAD, STEPS, SOON = 1, 4, 20.0


class Refusal(nn.Module):
    """In the place of a block: raises for the second micro-batch of a step, once it is told to."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.mlp_norm, self.calls, self.is_on = block.mlp_norm, 0, False
        block.mlp_norm = self

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.is_on and self.calls % 4 == 2:
            raise KeyError("no such word")
        return self.mlp_norm(x)


def trained(sizes: Sizes, schedule: str, where: int, **kept: Any) -> tuple[list[float], str, float]:
    """Losses of the steps that were made, what the one in between raised, and how long that took. `kept`: how inputs of
    checkpointed blocks are."""
    torch.set_num_threads(1)
    mesh, model = zf.mesh(device="cpu", **sizes), made("gpt")
    refusal = Refusal(model.blocks[where])
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn, schedule=schedule)
    pipe, optimizer = zf.prepare(pipe, adamw(pipe.parameters()), mesh=mesh, stage=1, clip=0.5)
    if kept:
        zf.checkpoint_blocks(model, **kept)
    losses, said, took = [], "", 0.0
    raised: list[Exception] = []  # a script may hold them, and with them the graphs of the step
    for step in range(STEPS):
        refusal.calls = 0
        # Of two pipelines over other samples one alone fails.
        refusal.is_on = step == BAD and mesh.coordinate["data"] == 0
        tokens, target = (t.chunk(mesh.data)[mesh.coordinate["data"]] for t in batch(step if step < BAD else step - 1))
        start = time.monotonic()
        try:
            loss = pipe.step(tokens, target=target)
        except (KeyError, RuntimeError) as error:
            said, took = f"{type(error).__name__}: {error}", time.monotonic() - start
            raised.append(error)
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zf.close(model)
    return losses, said, took


@pytest.mark.parametrize(
    ("sizes", "schedule", "where"),
    [
        ({"pipeline": 2}, "1f1b", 0),
        ({"pipeline": 2}, "gpipe", 3),
        ({"pipeline": 2}, "zero_bubble", 3),
        ({"pipeline": 2}, "zbv", 1),
        ({"data": 2, "pipeline": 2}, "1f1b", 3),
        ({"tensor": 2, "pipeline": 2}, "1f1b", 0),
    ],
    ids=str,
)
def test_all_ranks_stop_and_go_on(ranks: Any, sizes: Sizes, schedule: str, where: int) -> None:
    world = 2 if len(sizes) == 1 else 4
    found = ranks(world, trained, sizes, schedule, where)
    own = [said for _, said, _ in found if said.startswith("KeyError")]
    assert own == ["KeyError: 'no such word'"] * sizes.get("tensor", 1)
    for losses, said, took in found:
        assert took < SOON
        if not said.startswith("KeyError"):
            assert said.startswith("RuntimeError: pipe.step: rank ")
            assert said.endswith(": KeyError: 'no such word'")
            assert " has failed in stage " in said
        if "data" not in sizes:  # the step that failed has left nothing behind
            assert losses == pytest.approx(alone("gpt")[0][: STEPS - 1], abs=1e-5)


def test_inputs_kept_in_a_step_that_failed_are_not_those_of_the_next(ranks: Any) -> None:
    """Torch receives into the same tensors again, and a graph of the failed step is still held."""
    for losses, _, _ in ranks(2, trained, {"pipeline": 2}, "gpipe", 3, keep="host"):
        assert losses == pytest.approx(alone("gpt")[0][: STEPS - 1], abs=1e-5)


def kept_on(sizes: Sizes, what: str, bad: int) -> tuple[list[float], str, float]:
    """As `trained`, where the step of number `bad` fails before any micro-batch has gone through."""
    torch.set_num_threads(1)
    mesh, model = zf.mesh(device="cpu", **sizes), made("gpt")
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn)
    pipe, optimizer = zf.prepare(pipe, adamw(pipe.parameters()), mesh=mesh, stage=1, clip=0.5)
    is_last = mesh.coordinate["pipeline"] == mesh.pipeline - 1
    losses, said, took = [], "", 0.0
    for step in range(STEPS):
        tokens, target = (t.chunk(mesh.data)[mesh.coordinate["data"]] for t in batch(step if step < bad else step - 1))
        start, run = time.monotonic(), pipe.step
        if step == bad and mesh.coordinate["data"] == 0:
            if what == "no such word":
                tokens = tokens + 1000
            elif what == "too long":
                tokens, target = tokens.repeat(1, 9), target.repeat(1, 9)
            elif what == "shorter on the last stage" and is_last:
                tokens, target = tokens[:, :4], target[:, :4]
            elif what == "no whole micro-batches on the last stage" and is_last:
                tokens, target = tokens[:3], target[:3]
            elif what == "another call on the last stage" and is_last:
                run = pipe.evaluate
        try:
            loss = run(tokens, target=target)
        except (IndexError, ValueError, RuntimeError) as error:
            said, took = f"{type(error).__name__}: {error}", time.monotonic() - start
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    zf.close(model)
    return losses, said, took


BEFORE = {
    "no such word": "index out of range",
    "too long": "",  # the model's own words
    "shorter on the last stage": "are not at the same batch: rank 0 is at step of (8, 8) torch.int64",
    "no whole micro-batches on the last stage": "a batch of 3 does not make 4 equal micro-batches",
    "another call on the last stage": "at evaluate of (8, 8) torch.int64",
}


@pytest.mark.parametrize(
    ("sizes", "what", "bad"),
    [
        ({"pipeline": 2}, "no such word", 0),
        ({"pipeline": 2}, "too long", 0),
        ({"pipeline": 2}, "too long", BAD),  # a shape that is new, when others are known
        ({"pipeline": 2}, "shorter on the last stage", BAD),
        ({"pipeline": 2}, "no whole micro-batches on the last stage", 0),
        ({"pipeline": 2}, "another call on the last stage", BAD),
        ({"data": 2, "pipeline": 2}, "too long", BAD),
        ({"tensor": 2, "pipeline": 2}, "too long", 0),
    ],
    ids=str,
)
def test_what_fails_before_the_first_micro_batch_stops_all(ranks: Any, sizes: Sizes, what: str, bad: int) -> None:
    world = 2 if len(sizes) == 1 else 4
    found = ranks(world, kept_on, sizes, what, bad)
    for losses, said, took in found:
        assert said
        assert BEFORE[what] in said
        assert took < SOON
        if "data" not in sizes:
            assert losses == pytest.approx(alone("gpt")[0][: STEPS - 1], abs=1e-5)


def gone_with_a_failure(stage: int) -> tuple[list[list[float]], list[str]]:
    """Losses of steps that begin anew behind one that fails, when sums of an earlier one wait, and without all that."""
    torch.set_num_threads(1)
    found, notes = [], []
    for fails in (False, True):
        mesh, model = zf.mesh(device="cpu", pipeline=2), made("gpt2")
        pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn)
        pipe, optimizer = zf.prepare(pipe, adamw(pipe.parameters()), mesh=mesh, stage=stage, clip=0.5)
        losses = []
        for step in range(3):
            tokens, target = batch(step)
            if fails and step == BAD:
                with zf.no_sync(model):
                    pipe.step(tokens, target=target)
                    with pytest.raises((IndexError, RuntimeError), match="index out of range") as raised:
                        pipe.step(tokens + 1000, target=target)
                    notes += raised.value.__notes__
            losses.append(pipe.step(tokens, target=target).item())
            optimizer.step()
            optimizer.zero_grad()
        zf.close(model)
        found.append(losses)
    return found, notes


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_step_that_fails_takes_all_gradients_with_it(ranks: Any, stage: int) -> None:
    """Stages behind it go on with whatever came, so sums that waited are no longer what they were."""
    for (whole, anew), (note,) in ranks(2, gone_with_a_failure, stage):
        assert whole == anew
        assert "cleared all gradients" in note
