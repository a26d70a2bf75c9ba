"""Where tensors go into a model and come out of it: there they are cast, and fp16 gradients get and lose their scale.

           in                                   out
forward    → cast to the compute dtype  … …     cast to the output dtype →
backward   ← divided by the loss scale  … …     multiplied by the loss scale ←

So a plain `loss.backward()` sends scaled gradients through the model and nowhere else. Modules that stay in fp32 have
such a boundary of their own, with casts alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerofold.loss_scale import LossScaler
from zerofold.nested import map_tensors
from zerofold.precision import Precision
from zerofold.sharded import ShardedTensor


class Boundary:
    """The casts and scales of one model."""

    def __init__(self, precision: Precision, scaler: LossScaler) -> None:
        self.precision, self.scaler = precision, scaler
        self.shows_masters = False  # whole masters are in the modules: everything computes in their dtype
        self.scales = precision.parameters is torch.float16
        self._handles: list[RemovableHandle] = []
        self._was_scaled = False  # a gradient came in through the boundary in this backward
        self._kept: set[nn.Module] = set()

    def look(self, model: nn.Module) -> None:
        """Finds modules that are there since the last look.

        After the hooks that gather have been installed: torch.compile loses its way among hooks of which a later one
        was put in front.
        """
        for module in self.precision.kept_modules(model):
            if module not in self._kept:
                self._kept.add(module)
                self._handles.append(module.register_forward_pre_hook(_kept_input, with_kwargs=True))
                self._handles.append(module.register_forward_hook(partial(_kept_output, self)))
        if self.precision.buffers is not None:
            _cast_buffers(model, self.precision.buffers)

    @property
    def compute(self) -> torch.dtype | None:
        """What modules compute in now, where a policy says so."""
        return self.precision.master if self.shows_masters else self.precision.parameters

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an outermost forward."""
        compute = self.compute
        if compute is None:
            return args, kwargs

        def take_in(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or isinstance(tensor, ShardedTensor):
                return tensor
            if self.scales and tensor.requires_grad and torch.is_grad_enabled():
                tensor = _Scaled.apply(tensor, self._out_of)
            return tensor.to(compute)

        return map_tensors(take_in, tuple(args)), map_tensors(take_in, dict(kwargs))

    def leave(self, output: Any, modules: Iterable[nn.Module]) -> Any:
        """What an outermost forward returns. Results left on modules (auxiliary losses) are outputs as well."""
        if self.compute is None:
            return output
        if self.scales and torch.is_grad_enabled():
            for module in modules:
                for name, value in list(vars(module).items()):
                    if isinstance(value, Tensor) and value.grad_fn is not None:
                        setattr(module, name, _Scaled.apply(value, self._into))
        return map_tensors(self._give_out, output)

    def _give_out(self, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or isinstance(tensor, ShardedTensor):
            return tensor
        if self.precision.output_dtype is not None:
            tensor = tensor.to(self.precision.output_dtype)
        if self.scales and tensor.grad_fn is not None and torch.is_grad_enabled():
            tensor = _Scaled.apply(tensor, self._into)
        return tensor

    def _into(self, gradient: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True goes through the model twice, and an fp16 loss scale fits only one of "
                "the two: use precision='bf16' for gradients of gradients"
            )
        self._was_scaled = True
        return gradient * self.scaler.value

    def _out_of(self, gradient: Tensor) -> Tensor:
        return gradient / self.scaler.value

    def check_scaled(self) -> None:
        """A gradient has reached a parameter."""
        if self.scales and not self._was_scaled:
            raise RuntimeError(
                "a gradient came into the model past its outputs, so the fp16 loss scale never met it: call the model "
                "itself and not a module inside it, make the loss from what that returns (or from what its modules "
                "keep as attributes), or use precision='bf16', which needs no scale"
            )

    def end_backward(self) -> None:
        self._was_scaled = False


class _Scaled(torch.autograd.Function):
    """The same tensor, whose gradient is changed on its way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.change(gradient), None


def _kept_input(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Before a module that stays in fp32."""
    return map_tensors(_to_fp32, args), map_tensors(_to_fp32, kwargs)


def _to_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() and not isinstance(tensor, ShardedTensor) else tensor


def _kept_output(boundary: Boundary, module: nn.Module, args: Any, output: Any) -> Any:
    compute = boundary.compute
    return map_tensors(lambda tensor: tensor.to(compute) if tensor.is_floating_point() else tensor, output)


def _cast_buffers(model: nn.Module, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype is not dtype:
                module._buffers[name] = buffer.to(dtype)
