"""The gradient norm over all ranks, and clipping by it."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.engine import Engine
from zerofold.sharded import ShardedTensor


def clip_grad_norm(engine: Engine, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients so that their total norm is at most `max_norm`; returns the norm before."""
    if not engine.row.optimizer.is_cut:  # every rank has everything: torch's own arithmetic and order, to the bit
        return torch.nn.utils.clip_grad_norm_(engine.model.parameters(), max_norm, norm_type)
    faces = [face for _, face in engine.trainable_faces() if face.grad is not None]
    gradients = [face.grad.local for face in faces if isinstance(face.grad, ShardedTensor)]
    local = [gradient for gradient in gradients if gradient.numel()]
    total = _sum_of_powers(local, norm_type, engine.groups.gather.device)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    engine.groups.reduce.all_reduce(total, unit="gradient norm", op=op).wait()
    norm = (total if math.isinf(norm_type) else total.pow(1 / norm_type)).float()
    if local:
        torch._foreach_mul_(local, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm


def _sum_of_powers(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Σ|x|^p over all tensors, or max|x| for p = inf; in double, so that how it is cut does not show."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(tensors, norm_type)])
    return norms.max() if math.isinf(norm_type) else norms.pow(norm_type).sum()
