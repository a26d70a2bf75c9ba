"""All gradients of a model: their norm over all ranks, and clipping by it or by value."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.engine import Engine
from zerofold.sharded import ShardedTensor


class Gradients:
    """The gradients of one model as they are now: whole on every rank, or this rank's pieces."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._fill([(name, face) for name, face in engine.faces_in_order() if face.grad is not None])

    def _fill(self, named: list[tuple[str, Tensor]]) -> None:
        self._named = named
        self.names = [name for name, _ in named]
        gradients = [face.grad for _, face in named if face.grad is not None]
        self._are_plain = not any(isinstance(gradient, ShardedTensor) for gradient in gradients)
        self.local = [grad.local if isinstance(grad, ShardedTensor) else grad for grad in gradients]

    def of(self, parameters: list[Tensor]) -> Gradients:
        """Those of some of the parameters, as an optimizer holds them."""
        wanted = {id(parameter) for parameter in parameters}
        some = copy.copy(self)
        some._fill([(name, face) for name, face in self._named if id(face) in wanted])
        return some

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The same number on every rank."""
        is_cut = self._engine.row.optimizer.is_cut
        if self._are_plain and not is_cut:  # torch's own arithmetic and order, to the bit
            return torch.nn.utils.get_total_norm(self.local, norm_type)
        total = _sum_of_powers([t for t in self.local if t.numel()], norm_type, self._engine.groups.gather.device)
        if is_cut:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            self._engine.groups.reduce.all_reduce(total, unit="gradient norm", op=op).wait()
        return (total if math.isinf(norm_type) else total.pow(1 / norm_type)).float()

    def coefficient(self, max_norm: float, norm: Tensor) -> Tensor:
        """What to multiply by so that the norm is at most `max_norm`, as torch has it."""
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def multiply(self, scale: Tensor) -> None:
        filled = [tensor for tensor in self.local if tensor.numel()]
        if filled:
            torch._foreach_mul_(filled, scale)

    def clamp(self, value: float) -> None:
        filled = [tensor for tensor in self.local if tensor.numel()]
        if filled:
            torch._foreach_clamp_min_(filled, -value)
            torch._foreach_clamp_max_(filled, value)

    def first_non_finite(self) -> str | None:
        """The first parameter with an infinite or NaN gradient on any rank; all ranks must ask."""
        bad = (i for i, tensor in enumerate(self.local) if tensor.numel() and not tensor.isfinite().all())
        first = torch.tensor(float(next(bad, len(self.names))), dtype=torch.float64)
        self._engine.groups.control.all_reduce(first, unit="non-finite", op=dist.ReduceOp.MIN).wait()
        return None if int(first) == len(self.names) else self.names[int(first)]


def clip_grad_norm(engine: Engine, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients so that their total norm is at most `max_norm`; returns the norm before."""
    gradients = Gradients(engine)
    norm = gradients.norm(norm_type)
    gradients.multiply(gradients.coefficient(max_norm, norm))
    return norm


def _sum_of_powers(tensors: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Σ|x|^p over all tensors, or max|x| for p = inf; in double, so that how it is cut does not show."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # lists of one dtype take the fast kernels
        some = [tensor for tensor in tensors if tensor.dtype is dtype]
        norms += torch._foreach_norm(some, norm_type, dtype=torch.promote_types(dtype, torch.float32))
    stacked = torch.stack([norm.double() for norm in norms])
    return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()
