"""What a stage waits for other stages is no computing of its own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tests.test_3d import adamw, batch, loss_fn, made
from torch import Tensor, nn

import zerofold as zf

SLOW = 0.05


class Slow(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(SLOW)
        return self.inner(x)


def times(schedule: str) -> tuple[dict[str, float], list[str]]:
    """Of a step whose second stage takes long: by category, and what a timeline shows of its waits."""
    torch.set_num_threads(1)
    mesh, model = zf.mesh(device="cpu", pipeline=2), made("gpt")
    last = model.blocks[-1]
    last.mlp_norm = Slow(last.mlp_norm)
    pipe = zf.pipeline(model, mesh, microbatches=4, loss_fn=loss_fn, schedule=schedule)
    pipe, optimizer = zf.prepare(pipe, adamw(pipe.parameters()), mesh=mesh, stage=1)
    for step in range(2):
        with zf.ledger(model).record() as recording:  # the first step finds shapes out
            tokens, target = batch(step)
            pipe.step(tokens, target=target)
            optimizer.step()
            optimizer.zero_grad()
    found: dict[str, Any] = zf.ledger(model).snapshot()["time"]
    names = [span.name for span in recording.tape.last_steps[-1].spans if span.category == "wait"]
    zf.close(model)
    return found, names


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_waiting_for_another_stage_counts_as_waiting(ranks: Any, schedule: str) -> None:
    (first, waits), (second, _) = ranks(2, times, schedule)
    assert first["other"] > 2 * SLOW  # four slow micro-batches, of which it computes beside one or two
    assert second["compute"] > 3.5 * SLOW
    assert "wait for other pipeline" in waits
