"""States of a model on a GPU parked in host memory: its memory is free meanwhile, and training goes on to the bit."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from tests.ranks import raised
from tests.test_park import MORE_ROWS, ROWS, Case, differences
from torch import nn

import zerofold as zf
from zerofold.park import offload_states, reload_states

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@needs_gpu
@pytest.mark.parametrize("case", ROWS + MORE_ROWS, ids=str)
def test_training_goes_on_to_the_bit(ranks: Any, case: Case) -> None:
    assert ranks(2, differences, case, "cuda") == [0, 0]


@needs_gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_alone(ranks: Any, stage: int) -> None:
    assert ranks(1, differences, (stage, None, "bf16", None), "cuda") == [0]


def memory_while_parked(stage: int, precision: str | None, pin: bool) -> dict[str, int]:
    """Bytes on the device; what was freed is filled at once by somebody else, on another stream."""
    batch = torch.ones(8, 1024, device="cuda")
    for dtype in (torch.float32, torch.bfloat16):  # cuBLAS gets its workspaces, which stay
        nn.Linear(1024, 1024, device="cuda", dtype=dtype)(batch.to(dtype)).sum().backward()
    gc.collect()
    torch.cuda.empty_cache()
    other_before, reserved_before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    model: nn.Module = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(32))).cuda()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zf.shard(model, stage=stage, precision=precision, units=nn.Linear)
    zf.attach(model, optimizer)
    for _ in range(2):
        model(batch).float().square().mean().backward()
        optimizer.step()  # the gradients stay
    before = torch.cuda.memory_allocated()
    expected = [zf.full(p).cpu() for p in model.parameters()]
    moments = [zf.full(s["exp_avg_sq"]).cpu() for s in optimizer.state.values()]
    parked = offload_states(model, pin=pin)
    while_parked, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with torch.cuda.stream(torch.cuda.Stream()):
        scribble = [torch.full((2**18,), float("nan"), device="cuda") for _ in range(256)]
    torch.cuda.synchronize()
    del scribble
    reload_states(model)
    same = all(torch.equal(a, zf.full(b).cpu()) for a, b in zip(expected, model.parameters(), strict=True))
    states = list(optimizer.state.values())
    same &= all(torch.equal(a, zf.full(s["exp_avg_sq"]).cpu()) for a, s in zip(moments, states, strict=True))
    after = torch.cuda.memory_allocated()
    zf.close(model)
    return {
        "before": before - other_before,
        "parked": while_parked - other_before,
        "reserved": reserved - reserved_before,
        "after": after - other_before,
        "moved": parked.total_nbytes,
        "same": same,
    }


@needs_gpu
@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize(("stage", "precision"), [(0, None), (2, "bf16"), (3, "bf16")])
def test_the_memory_is_free_while_parked(ranks: Any, stage: int, precision: str | None, pin: bool) -> None:
    (found,) = ranks(1, memory_while_parked, stage, precision, pin)
    assert found["same"]
    assert found["moved"] > 400 * 2**20  # 33.6M parameters of at least 14 bytes
    assert found["before"] > 400 * 2**20
    assert found["parked"] < 20 * 2**20, found
    assert found["reserved"] < 60 * 2**20, found
    assert abs(found["after"] - found["before"]) < 20 * 2**20, found


def reload_without_memory() -> tuple[str, bool]:
    model = zf.shard(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(8))).cuda(), stage=0)
    expected = [p.detach().cpu() for p in model.parameters()]
    offload_states(model)
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 64 * 2**20) / total)
        error = raised(reload_states, model)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    touched = raised(model, torch.ones(1, 2048, device="cuda"))
    assert "call zf.reload_states(model) first" in touched, touched
    reload_states(model)
    same = all(torch.equal(a, b.detach().cpu()) for a, b in zip(expected, model.parameters(), strict=True))
    zf.close(model)
    return error, same


@needs_gpu
def test_a_reload_without_enough_memory_loses_nothing(ranks: Any) -> None:
    ((error, same),) = ranks(1, reload_without_memory)
    assert error.startswith("OutOfMemoryError")
    assert same
