"""The same parity on a GPU. Two ranks share one GPU through gloo: slow, but real streams and real gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import batches, largest_difference, make_model
from torch.nn.parallel import DistributedDataParallel

import zerofold as zf

STAGES = (0, 1, 2, 3)

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def against_ddp(device: str, settings: dict[str, Any]) -> dict[int, float]:
    data = [tuple(t.to(device) for t in batch) for batch in batches(6)]

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for batch in data:
            model(*batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    reference = make_model().to(device)
    train(DistributedDataParallel(reference), torch.optim.SGD(reference.parameters(), lr=0.1))
    expected = [p.detach() for p in reference.parameters()]
    found = {}
    for stage in STAGES:
        model = make_model().to(device)
        model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=stage, **settings)
        train(model, optimizer)
        zf.close(model)
        found[stage] = largest_difference(expected, [p.detach() for p in model.parameters()])
    return found


@needs_gpu
@pytest.mark.parametrize("settings", [{}, {"overlap": False}, {"buffer_bytes": 8192}])
@pytest.mark.parametrize("world", [1, 2])
def test_stages_equal_ddp_on_a_gpu(ranks: Any, world: int, settings: dict[str, Any]) -> None:
    for per_stage in ranks(world, against_ddp, "cuda", settings):
        assert all(difference <= 1e-6 for difference in per_stage.values()), per_stage
