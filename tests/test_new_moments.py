"""An optimizer's states thrown away in the midst of training begin anew, wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models import largest_difference
from tests.test_unusual import Net, plain_step

import zerofold as zf

PLACES: list[Any] = [None, "host", {"optimizer": "host", "parameters": "host"}, {"optimizer": "nvme"}]


def trained(offload: Any, way: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    fresh = optimizer.state_dict()
    zf.prepare(model, optimizer, stage=2 if offload == "host" else 3, offload=offload, one_pass=True)
    for step in range(4):
        if step == 2 and way == "cleared":
            optimizer.state.clear()
        if step == 2 and way == "loaded":
            optimizer.load_state_dict(fresh)
        plain_step(model, optimizer, step)
    zf.close(model)
    return [p.detach() for p in model.parameters()]


def differences(folder: str, way: str) -> list[float]:
    places = [place | {"path": folder} if place == {"optimizer": "nvme"} else place for place in PLACES]
    expected, *others = [trained(place, way) for place in places]
    assert largest_difference(expected, trained(None, "kept")) > 1e-3
    return [largest_difference(expected, each) for each in others]


@pytest.mark.parametrize("way", ["cleared", "loaded"])
def test_thrown_away_states_begin_anew(ranks: Any, tmp_path: Any, way: str) -> None:
    for found in ranks(2, differences, str(tmp_path), way):
        assert found == [0.0] * 3
