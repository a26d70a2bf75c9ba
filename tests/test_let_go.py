"""What a closed model held is free as soon as the model is: nothing waits for Python's garbage collector."""

from __future__ import annotations

import gc
import os
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerofold as zf
from zerofold.comm import Comm
from zerofold.engine import Engine


class Block(nn.Sequential):
    pass


def left_behind(
    options: dict[str, Any], checkpoints: dict[str, Any] | None, offloads: bool, averages: bool
) -> list[str]:
    """What is still there of a model, its engine and its states once they are closed and dropped."""
    model = nn.Sequential(*(Block(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    if options["stage"] in ("hsdp", "hpz"):
        options = options | {"mesh": init_device_mesh("cpu", (1, dist.get_world_size()))}
    model, optimizer = zf.prepare(model, optimizer, units=Block, **options)
    if checkpoints is not None:
        zf.checkpoint_blocks(model, units=Block, **checkpoints)
    average = zf.EMA(model, decay=0.9) if averages else None
    for _ in range(3):
        with zf.offload_activations(model, above=64) if offloads else nullcontext():
            model(torch.ones(4, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = Engine.of(model)
    held: dict[str, Any] = {"model": model, "engine": engine, "parameter": next(model.parameters())}
    held |= {f"group {name}": each for name, each in vars(engine.groups).items() if isinstance(each, Comm)}
    held |= {f"state {key}": value for key, value in next(iter(optimizer.state.values()), {}).items()}
    found = {name: weakref.ref(each) for name, each in held.items()}
    zf.close(model)
    del model, optimizer, engine, average, held
    return [name for name, each in found.items() if each() is not None]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool, bool]] = {
    **{f"row {row}": ({"stage": row}, None, False, False) for row in ("dp", 0, 1, 2, 3, "hsdp", "hpz")},
    "bf16": ({"stage": 3, "precision": "bf16", "clip": 1.0}, None, False, False),
    "fp16": ({"stage": 2, "precision": "fp16"}, None, False, False),
    "checkpoints": ({"stage": 3, "precision": "bf16"}, {"keep": "host"}, False, False),
    "activations": ({"stage": 3, "precision": "bf16"}, None, True, False),
    "average": ({"stage": 3, "precision": "bf16"}, None, False, True),
    "host": ({"stage": 3, "precision": "bf16", "offload": "host"}, None, False, False),
    "all on the host": (
        {"stage": 3, "precision": "bf16", "offload": {"optimizer": "host", "parameters": "host"}},
        None,
        False,
        False,
    ),
}


def open_files() -> int:
    """Sockets of process groups among them."""
    return len(os.listdir("/proc/self/fd"))


def left_behind_without_collector(case: str) -> list[str]:
    arguments = CASES[case]
    left_behind(*arguments)  # what is imported and compiled at first use goes in cycles
    gc.collect()
    gc.disable()
    try:
        opened = open_files()
        found = left_behind(*arguments)
        # A device mesh and its groups are torch's own, and stay.
        more = 0 if arguments[0]["stage"] in ("hsdp", "hpz") else open_files() - opened
        return found + ([f"{more} open files"] if more else [])
    finally:
        gc.enable()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("case", list(CASES))
def test_a_closed_model_leaves_nothing_to_the_collector(ranks: Any, case: str, world: int) -> None:
    assert ranks(world, left_behind_without_collector, case) == [[]] * world


def go_on_with_a_graph_of_a_closed_model() -> tuple[list[str], str]:
    model = nn.Sequential(*(Block(nn.Linear(32, 32), nn.Tanh()) for _ in range(3)))
    model, _ = zf.prepare(model, torch.optim.AdamW(model.parameters()), units=Block, precision="bf16")
    given = torch.ones(4, 32, requires_grad=True)
    trained, untrained = model(given).square().mean(), model(given).sum()
    trained.backward()
    engine = Engine.of(model)
    held = {"engine": engine, "slab": engine.slabs()[-1], "unit": engine.units[-1]}
    found = {name: weakref.ref(each) for name, each in held.items()}
    zf.close(model)
    del engine, held
    (given * 2).sum().backward()  # a graph beside it
    with pytest.raises(RuntimeError) as raised:
        untrained.backward()
    return [name for name, each in found.items() if each() is not None], str(raised.value)


@pytest.mark.parametrize("world", [1, 2])
def test_a_graph_that_is_left_keeps_nothing_and_says_that_its_model_was_closed(ranks: Any, world: int) -> None:
    for left, message in ranks(world, go_on_with_a_graph_of_a_closed_model):
        assert left == []
        assert "from before zf.close(model)" in message
