"""Groups in which zf.offload_activations brings tensors back: what is in them after backward is gone."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor, nn

import zerofold as zf

LAYERS, WIDTH, ROWS = 4, 32, 32
ACTIVATION = ROWS * WIDTH * 4  # a page


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)))


def step_by_step() -> None:
    model = zf.shard(layers(), stage=0)
    forward = (LAYERS + 1) * ACTIVATION  # x, and what each tanh makes
    with zf.offload_activations(model, above=ACTIVATION) as store:
        for step in range(4):
            loss = model(torch.ones(ROWS, WIDTH) * step).sum()
            assert store.nbytes["host"] == forward
            loss.backward()  # whose loss is still held
            assert store.nbytes["host"] == 0
    assert zf.ledger(model).snapshot()["peak_activation_bytes"]["host"] == forward
    zf.close(model)


def test_nothing_stays_on_the_host_after_backward(ranks: Any) -> None:
    """A step is far below the size of a group, which would take those of the next steps too."""
    ranks(1, step_by_step)


def test_a_forward_between_adds_nothing_to_a_group_that_backward_has_come_to() -> None:
    """As in a pipeline: at any time the graphs of two micro-batches are there, and no more than these are kept."""
    model, forward = layers(), (LAYERS + 1) * ACTIVATION
    waiting: deque[Tensor] = deque()
    with zf.offload_activations(model, above=ACTIVATION) as store:
        most = 0
        for step in range(8):
            waiting.append(model(torch.ones(ROWS, WIDTH) * step).sum())
            most = max(most, store.nbytes["host"])
            if step:
                waiting.popleft().backward()
    assert most <= 3 * forward, most / forward  # the two, and one that shares a group with the second
    waiting.popleft().backward()
    assert store.nbytes["host"] == 0


def test_what_was_saved_last_stays_on_the_device_until_backward() -> None:
    """Two groups of it, as documented: those before have left in forward. What a tanh makes is saved twice, so with
    groups of one tensor the last two have the same."""
    wishes: list[tuple[dict[str, Any], int]] = [({}, LAYERS + 1), ({"together": ACTIVATION}, 1)]
    for together, there in wishes:
        with zf.offload_activations(layers(), above=ACTIVATION, **together) as store:
            loss = layers()(torch.ones(ROWS, WIDTH)).sum()
            assert store.nbytes["device"] == there * ACTIVATION
            assert store.nbytes["host"] == (LAYERS + 1) * ACTIVATION
            loss.backward()
