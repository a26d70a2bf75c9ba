"""What a step costs for each parameter, to balance owners by where it is not in proportion to bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from zerofold.dealing import Cost

# Multiplications and additions in the time that an elementwise update takes for one byte of a parameter: about ten
# passes over memory. An H200 could make 1600 of them, but matrices of this kind do not reach its peak; two CPU cores
# make some hundred. It only weighs what is no matrix work (embeddings, norms) against what is.
FLOPS_PER_BYTE = 500


def update_cost(optimizer: Any) -> Cost | None:
    """The cost by which this optimizer's owners are balanced: its own, or Muon's; None where bytes will do.

    `zf.prepare` asks for it by itself. Where Muon shares the model with another optimizer, whose parameters cost their
    bytes here: `zf.shard(model, stage=2, cut="whole", cost=update_cost(muon))`.

    >>> small, wide = torch.nn.Parameter(torch.ones(64, 64)), torch.nn.Parameter(torch.ones(16, 256))  # as many bytes
    >>> cost = update_cost(torch.optim.Muon([small, wide]))
    >>> round(cost(small) / cost(wide), 2)
    1.68
    >>> update_cost(torch.optim.AdamW([small])) is None
    True
    """
    own: Cost | None = getattr(optimizer, "update_cost", None)
    if own is not None:
        return own
    return _of_muon(optimizer) if isinstance(optimizer, torch.optim.Muon) else None


def _of_muon(optimizer: torch.optim.Muon) -> Cost:
    iterations = {id(p): group["ns_steps"] for group in optimizer.param_groups for p in group["params"]}

    def cost(parameter: Tensor) -> float:
        elementwise = float(FLOPS_PER_BYTE * parameter.nbytes)
        if id(parameter) not in iterations:
            return elementwise
        return elementwise + newton_schulz_flops(parameter.shape, iterations[id(parameter)])

    return cost


def newton_schulz_flops(shape: torch.Size | tuple[int, ...], iterations: int) -> float:
    """Of orthogonalising a matrix, transposed where needed so that X is s × l with s ≤ l. Each iteration makes

        A = X Xᵀ          s × s    2 s² l
        B = b A + c A²    s × s    2 s³
        X = a X + B X     s × l    2 s² l

    >>> newton_schulz_flops((2, 3), 1)
    64.0
    """
    short, long = sorted(shape)
    return float(iterations * (4 * short**2 * long + 2 * short**3))
