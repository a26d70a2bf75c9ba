"""Where tensors go into a model and come out of it: there they are cast, and fp16 gradients get and lose their scale.

           in                                   out
forward    → cast to the compute dtype  … …     cast to the output dtype →
backward   ← divided by the loss scale  … …     multiplied by the loss scale ←
           ← times micro-batches        … …     divided by the micro-batches of a step ←     where somebody counts them

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

_SMALL = 2**12  # elements


class Boundary:
    """The casts and scales of one model."""

    def __init__(self, precision: Precision, scaler: LossScaler) -> None:
        self.precision, self.scaler = precision, scaler
        self.shows_masters = False  # whole masters are in the modules: everything computes in their dtype
        self.scales = precision.parameters is torch.float16
        self.micro_batches: Callable[[], int] | None = None  # of a step, by which gradients that come in are divided
        self.has_frozen = False  # 16-bit parameters without a master
        self._handles: list[RemovableHandle] = []
        self._was_scaled = False  # a gradient came in through the boundary in this backward
        self._left: list[tuple[nn.Module, str, Any, Any]] = []  # on modules: what is there, and what was left there
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
            _cast_buffers(model, self.precision.buffers, {inner for module in self._kept for inner in module.modules()})

    @property
    def compute(self) -> torch.dtype | None:
        """What modules compute in now, where a policy says so."""
        return self.precision.master if self.shows_masters and self.precision.is_mixed else self.precision.parameters

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments of an outermost forward."""
        compute, changes = self.compute, self._changes
        if compute is None and not changes:
            return args, kwargs
        if self.shows_masters and self.has_frozen:
            raise RuntimeError(
                "inside full_params the trained parameters are fp32 masters and the frozen ones 16-bit, so a forward "
                "cannot compute with both: run it inside `with zf.full_params(model, masters=False)`"
            )
        for module, name, shown, original in self._left:  # a memory of the model goes on as it was
            if vars(module).get(name) is shown:
                setattr(module, name, original)
        self._left.clear()

        def take_in(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or isinstance(tensor, ShardedTensor):
                return tensor
            if changes and tensor.requires_grad and torch.is_grad_enabled():
                tensor = _Scaled.apply(tensor, self._out_of)
            return tensor if compute is None else tensor.to(compute)

        return map_tensors(take_in, tuple(args)), map_tensors(take_in, dict(kwargs))

    def leave(self, output: Any, modules: Iterable[nn.Module], *, is_recomputed: bool) -> Any:
        """What an outermost forward returns. Results left on modules (auxiliary losses) are outputs as well.

        A forward that is recomputed in backward gives its gradient to the graph of the first one.
        """
        if self.compute is None and not self._changes:
            return output
        scales = self._changes and torch.is_grad_enabled() and not is_recomputed
        for module in modules if scales else ():
            for name, value in list(vars(module).items()):
                if isinstance(value, (Tensor, list, tuple, dict)) and not name.startswith("_"):
                    scaled = map_tensors(self._scaled, value)
                    if scaled is not value:
                        self._left.append((module, name, scaled, value))
                        setattr(module, name, scaled)

        def give_out(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point() or isinstance(tensor, ShardedTensor):
                return tensor
            if self.compute is not None and self.precision.output_dtype is not None:
                tensor = tensor.to(self.precision.output_dtype)
            return self._scaled(tensor) if scales else tensor

        return map_tensors(give_out, output)

    def _scaled(self, tensor: Tensor) -> Tensor:
        return (
            _Scaled.apply(tensor, self._into) if tensor.is_floating_point() and tensor.grad_fn is not None else tensor
        )

    @property
    def _changes(self) -> bool:
        """Whether gradients are changed on their way in and out."""
        return self.scales or self.micro_batches is not None

    @property
    def _factor(self) -> float:
        return self.scaler.value / (1 if self.micro_batches is None else self.micro_batches())

    def _into(self, gradient: Tensor) -> Tensor:
        if self.scales and torch.is_grad_enabled():
            raise RuntimeError(
                "backward with create_graph=True goes through the model twice, and an fp16 loss scale fits only one of "
                "the two: use precision='bf16' for gradients of gradients"
            )
        self._was_scaled = True
        return gradient * self._factor

    def _out_of(self, gradient: Tensor) -> Tensor:
        return gradient / self._factor

    def check_scaled(self) -> None:
        """A gradient has reached a parameter."""
        if self.scales and not self._was_scaled:
            raise RuntimeError(
                "a gradient came into the model past its outputs, so the fp16 loss scale never met it: call the model "
                "itself and not a module inside it, make the loss from what that returns (or from what its modules "
                "keep as attributes), or use precision='bf16', which needs no scale"
            )

    def expect_scaled(self) -> None:
        """Gradients come in that met the scale elsewhere: at the outputs of a later stage of a pipeline."""
        self._was_scaled = True

    def end_backward(self) -> None:
        self._was_scaled = False


class _Scaled(torch.autograd.Function):
    """The same tensor, whose gradient is changed on its way back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        # A view could not be changed in place (loss /= n); a copy of a large tensor would cost memory.
        return tensor.clone() if tensor.numel() <= _SMALL else tensor.view_as(tensor)

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


def _cast_buffers(model: nn.Module, dtype: torch.dtype, kept: set[nn.Module]) -> None:
    """A buffer that several modules share stays shared."""
    cast: dict[int, Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items() if module not in kept else ():
            if buffer is not None and buffer.is_floating_point() and buffer.dtype is not dtype:
                module._buffers[name] = cast.setdefault(id(buffer), buffer.to(dtype))
