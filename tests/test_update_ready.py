"""What an update needs from the host is made ready before the host waits for the norm of the gradients."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import zerofold as zf
from zerofold.optim import adam
from zerofold.optim.clip import Gradients


class Norm:
    """Notes when somebody waits for its value."""

    def __init__(self, value: Tensor, seen: list[str]) -> None:
        self._value, self._seen = value, seen

    def item(self) -> float:
        self._seen.append("read")
        return self._value.item()


def watched(optimizer: torch.optim.Optimizer) -> list[str]:
    """What a step does, in its order."""
    seen: list[str] = []
    prepare, norm = adam.prepare, Gradients.norm

    def preparing(*args: Any, **kwargs: Any) -> Any:
        seen.append("ready")
        launch = prepare(*args, **kwargs)
        return lambda scale: (seen.append("launched"), launch(scale))

    with (
        patch.object(adam, "prepare", preparing),
        patch.object(Gradients, "norm", lambda gradients: Norm(norm(gradients), seen)),
    ):
        optimizer.step()
    return seen


def steps(_: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zf.prepare(model, optimizer, stage=2, precision="bf16", clip=1e-3)
    x, seen, counts = torch.ones(2, 8), [], []
    for step in range(4):
        (model(x).sum() * (float("nan") if step == 2 else 1.0)).backward()
        seen.append(watched(optimizer))
        optimizer.zero_grad()
        counts.append({int(state["step"]) for state in optimizer.state.values()})
        with zf.full_params(model):
            counts.append(float(model[0].weight.sum()))
    return {"seen": seen, "counts": counts}


def test_only_a_launch_is_left_behind_the_norm(ranks: Any) -> None:
    for found in ranks(2, steps, None):
        first, second, broken, after = found["seen"]
        assert first == ["read", "ready", "launched"]  # its states were made by it
        assert second == after == ["ready", "read", "launched"]
        assert broken == ["ready", "read"]
        counts = found["counts"]
        assert counts[0::2] == [{1}, {2}, {2}, {3}]  # a step that was skipped is none
        assert counts[3] == counts[5] != counts[7]
