"""All gradients of a model: their norm over all ranks, and clipping by it or by value."""

from __future__ import annotations

import copy
import math

import torch
import torch.distributed as dist
from torch import Tensor

from zerofold.engine import Engine
from zerofold.refusals import used_up
from zerofold.sharded import ShardedTensor


class Gradients:
    """The gradients of one model as they are now: whole on every rank, or this rank's pieces."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.transfers.join()  # norms that are known were taken on the way down
        self._fill([(name, face) for name, face in engine.faces_in_order() if face.grad is not None])

    def _fill(self, named: list[tuple[str, Tensor]]) -> None:
        self._named = named
        self.names = [name for name, _ in named]
        self._all = [face.grad for _, face in named if face.grad is not None]
        self._are_plain = not any(isinstance(gradient, ShardedTensor) for gradient in self._all)

    @property
    def local(self) -> list[Tensor]:
        return [grad.local if isinstance(grad, ShardedTensor) else grad for grad in self._all]

    def of(self, parameters: list[Tensor]) -> Gradients:
        """Those of some of the parameters, as an optimizer holds them."""
        wanted = {id(parameter) for parameter in parameters}
        some = copy.copy(self)
        some._fill([(name, face) for name, face in self._named if id(face) in wanted])
        return some

    def refuse_used_up(self, *, unless_known: bool = False) -> None:
        """On every rank, also one that has no piece of it: it would wait in the norm for those that raise.

        `unless_known`: a norm that is known needs no values.
        """
        for gradient in self._all:
            if isinstance(gradient, ShardedTensor) and gradient.is_used_up:
                if unless_known and gradient.known_norm is not None:
                    continue
                raise RuntimeError(used_up(gradient.spec))

    def _counted(self) -> Gradients:
        """Without those that another rank of this copy of the model holds as well, and counts."""
        copies = self._engine.uncounted
        if not copies:
            return self
        some = copy.copy(self)
        some._fill([(name, face) for name, face in self._named if name not in copies])
        return some

    def norm(self, norm_type: float = 2.0) -> Tensor:
        """The same number on every rank."""
        is_cut, model = self._engine.row.optimizer.is_cut, self._engine.groups.model
        self.refuse_used_up(unless_known=norm_type == 2.0)
        if self._are_plain and not is_cut and model is None:  # torch's own arithmetic and order, to the bit
            return torch.nn.utils.get_total_norm(self.local, norm_type)
        total = self._counted()._sum_of_powers(norm_type)
        op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
        if is_cut:
            self._engine.groups.reduce.all_reduce(total, unit="gradient norm", op=op).wait()
        if model is not None:
            told = total.cpu()
            model.all_reduce(told, unit="gradient norm", op=op).wait()
            total = told.to(total.device)
        return (total if math.isinf(norm_type) else total.pow(1 / norm_type)).float()

    def coefficient(self, max_norm: float, norm: Tensor) -> Tensor:
        """What to multiply by so that the norm is at most `max_norm`, as torch has it."""
        return torch.clamp(max_norm / (norm + 1e-6), max=1.0)

    def multiply(self, scale: Tensor) -> None:
        for some in self._to_change():
            torch._foreach_mul_(some, scale.to(some[0].device))

    def clamp(self, value: float) -> None:
        for some in self._to_change():
            torch._foreach_clamp_min_(some, -value)
            torch._foreach_clamp_max_(some, value)

    def _to_change(self) -> list[list[Tensor]]:
        """What this rank has of them, by device."""
        for gradient in self._all:
            if isinstance(gradient, ShardedTensor):
                gradient.known_norm = None
        filled = [tensor for tensor in self.local if tensor.numel()]
        devices = dict.fromkeys(tensor.device for tensor in filled)
        return [[tensor for tensor in filled if tensor.device == device] for device in devices]

    def _sum_of_powers(self, norm_type: float) -> Tensor:
        """Σ|x|^p over all of them, or max|x| for p = inf; in double, so that how they are cut does not show."""
        device = self._engine.groups.gather.device
        norms = []
        for dtype in dict.fromkeys(_raw(each).dtype for each in self._all):  # lists of one dtype take fast kernels
            some = [each for each in self._all if _raw(each).dtype is dtype and _raw(each).numel()]
            known = {id(each): norm for each in some if norm_type == 2.0 and (norm := _known_norm(each)) is not None}
            rest = [each for each in some if id(each) not in known]
            if rest:
                wide = torch.promote_types(dtype, torch.float32)
                locals_ = [_values(each, device) for each in rest]
                taken = torch._foreach_norm(locals_, norm_type, dtype=wide)
                known |= {id(each): norm for each, norm in zip(rest, taken, strict=True)}
            if some:
                norms.append(torch.stack([known[id(each)].to(device) for each in some]).double())
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=device)
        stacked = torch.cat(norms)
        return stacked.max() if math.isinf(norm_type) else stacked.pow(norm_type).sum()

    def first_non_finite(self) -> str | None:
        """The first parameter with an infinite or NaN gradient on any rank; all ranks must ask."""
        bad = (i for i, tensor in enumerate(self.local) if tensor.numel() and not tensor.isfinite().all())
        first = torch.tensor(float(next(bad, len(self.names))), dtype=torch.float64)
        self._engine.groups.control.all_reduce(first, unit="non-finite", op=dist.ReduceOp.MIN).wait()
        name = None if int(first) == len(self.names) else self.names[int(first)]
        if self._engine.groups.model is None:
            return name
        told = self._engine.groups.model.all_gather_objects(name, unit="non-finite")
        return next((each for each in told if each is not None), None)


def clip_grad_norm(engine: Engine, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Scales all gradients so that their total norm is at most `max_norm`; returns the norm before."""
    gradients = Gradients(engine)
    norm = gradients.norm(norm_type)
    gradients.multiply(gradients.coefficient(max_norm, norm))
    return norm


def _raw(gradient: Tensor) -> Tensor:
    """To ask for its size or its kind: nobody waits for its values."""
    return gradient.raw_local if isinstance(gradient, ShardedTensor) else gradient


def _values(gradient: Tensor, device: torch.device) -> Tensor:
    """On the device, streams see to it that they are there; in host memory somebody has to wait for them."""
    if not isinstance(gradient, ShardedTensor):
        return gradient
    on_device = device.type != "cpu" and gradient.raw_local.device == device and not gradient.is_used_up
    return gradient.raw_local if on_device else gradient.local


def _known_norm(gradient: Tensor) -> Tensor | None:
    return gradient.known_norm if isinstance(gradient, ShardedTensor) else None
