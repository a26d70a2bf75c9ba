"""DeepSpeed's engine in shape: a model, its optimizer and scheduler, micro-batches counted up to a step.

    for batch in loader:
        loss = engine(batch)
        engine.backward(loss)     or loss.backward(): divided by gradient_accumulation_steps
        engine.step()             counts; at the boundary: update, clear, advance the schedule

Everything below is zf.shard and zf.attach. The model in `engine.module` is the user's own object, so plain
`loss.backward()`, `zf.full`, `zf.ledger(engine.module)` and the rest work beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.access import last_step, no_sync
from zerofold.compat.computed_weights import show_computed_weights
from zerofold.compat.engine_checkpoints import Checkpoints
from zerofold.compat.engine_parking import ParksStates
from zerofold.compat.engine_queries import Queries
from zerofold.compat.param_status import show_status
from zerofold.compat.reporting import Reporter
from zerofold.config import Settings
from zerofold.engine import Engine
from zerofold.prepare import close


class DeepSpeedEngine(Queries, Checkpoints, ParksStates, nn.Module):
    """What `zf.initialize` returns first; see there."""

    # Under way in this process. A loss may go through several engines, and the one that runs its backward has divided
    # it for all of them. The backward itself runs in threads of torch's, which have no other place in common.
    backwards: ClassVar[int] = 0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        lr_scheduler: Any,
        settings: Settings,
        *,
        loader: Any = None,
        frozen: list[nn.Parameter] | None = None,
    ) -> None:
        super().__init__()
        self.module = model
        self.optimizer, self.lr_scheduler, self.training_dataloader = optimizer, lr_scheduler, loader
        self.settings = settings
        self.config = settings.resolved
        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.is_compiled = False
        self._compiled: list[nn.Module] = []
        self._batch = (settings.train_batch, settings.micro_batch, settings.accumulate)
        self._boundary: bool | None = None  # set by hand
        self._was_applied = self._is_stepping = False
        self._norm: float | None = None
        self._loss: Tensor | None = None
        self._frozen = frozen or []  # by initialize, since the optimizer has them not
        self._reporter = Reporter(settings, model, rank=self.global_rank, world=self.world_size, device=self.device)
        show_computed_weights(model)
        show_status(self._core)
        self._count_to_boundary()

    @property
    def device(self) -> torch.device:
        return self._core.groups.gather.device

    @property
    def _core(self) -> Engine:
        return Engine.of(self.module)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self._reporter.before_forward()
        with self._autocast():
            outputs = self.module(*inputs, **kwargs)
        self._reporter.after_forward()
        return outputs

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = self.settings.autocast
        return nullcontext() if dtype is None else torch.autocast(self.settings.device_type, dtype)

    def scale(self, loss: Tensor) -> Tensor:
        """For `engine.scale(loss).backward()`. Gradients are scaled where they enter the model, so the loss stays as it
        is, and plain `loss.backward()` is the same.
        """
        self._check_trains("scale")
        _check_loss(loss)
        return loss

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Backward of a scalar loss, divided by gradient_accumulation_steps; returns the loss so divided.

        Plain `loss.backward()` does the same: gradients are divided where they enter the model.
        """
        self._check_trains("backward")
        _check_loss(loss)
        self._loss = loss.detach()
        divided = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        self._reporter.before_backward()
        DeepSpeedEngine.backwards += 1
        try:
            divided.backward(retain_graph=retain_graph)
        finally:
            DeepSpeedEngine.backwards -= 1
        self._reporter.after_backward()
        return divided

    def _micro_batches(self) -> int:
        """By what a gradient that enters the model is to be divided: nothing, where a loss was divided already."""
        return 1 if DeepSpeedEngine.backwards else self.gradient_accumulation_steps()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Counts a micro-batch; at the boundary it updates, clears the gradients and advances the schedule."""
        self._check_trains("step")
        if self._core.reductions.suspended:
            raise RuntimeError(
                "engine.step() inside engine.no_sync(): gradients are sums of this rank alone there; call it after"
            )
        self._was_applied, self._is_stepping = False, True
        try:
            if self.is_gradient_accumulation_boundary():
                self._take_step(lr_kwargs or {})
        finally:
            self._is_stepping = False
        self.micro_steps += 1
        self._count_to_boundary()

    def _take_step(self, lr_kwargs: Mapping[str, Any]) -> None:
        optimizer = self.optimizer
        assert optimizer is not None
        self._reporter.before_step()
        optimizer.step()
        info = last_step(self.module)
        assert info is not None
        optimizer.zero_grad()
        self._norm, self._was_applied = info.norm, not info.skipped
        optimizer.overflow = info.skipped  # type: ignore[attr-defined]  # where Accelerate looks for it
        if info.skipped:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self.lr_scheduler.step(**lr_kwargs)
        self.global_steps += 1
        self.global_samples += self.train_batch_size()
        self._reporter.after_step(
            self.global_steps,
            samples=self.global_samples,
            lr=self.get_lr(),
            loss=self._loss,
            loss_scale=info.loss_scale,
            skipped=self.skipped_steps,
        )

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the micro-batch under way is the last one of a step."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed_accumulation:
            return self._is_stepping
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says so by hand, from now on: before the forward and backward of each micro-batch."""
        if not self.settings.managed_accumulation:
            raise RuntimeError(
                "set_gradient_accumulation_boundary(): managed_gradient_accumulation is false in the config, so every "
                "step() is a boundary already"
            )
        self._boundary = bool(is_boundary)
        self._count_to_boundary()

    def _count_to_boundary(self) -> None:
        """Gradients that stay whole are reduced by the last backward of a step alone."""
        self._core.boundary.micro_batches = self._micro_batches if self.gradient_accumulation_steps() > 1 else None
        self._core.reductions.ends_step = self.is_gradient_accumulation_boundary()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds up gradients on this rank; at every stage."""
        with no_sync(self.module):
            yield

    def was_step_applied(self) -> bool:
        """Whether the last `step()` changed the model: it was at the boundary, and all gradients were finite."""
        return self._was_applied

    def get_global_grad_norm(self) -> float | None:
        """Of all gradients of the last step over all ranks, before clipping; None before the first."""
        return self._norm

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=set_to_none)
        super().zero_grad(set_to_none=set_to_none)

    def get_lr(self) -> list[float]:
        return [float(lr) for lr in self._of_groups("lr")]

    def set_lr(self, lr: float) -> None:
        """The learning rate of every parameter group. A scheduler sets its own at its next step."""
        self._check_trains("set_lr")
        assert self.optimizer is not None
        for group in self.optimizer.param_groups:
            held = group["lr"]
            if isinstance(held, Tensor):
                held.fill_(lr)
            else:
                group["lr"] = lr

    def get_mom(self) -> list[Any]:
        groups = self.optimizer.param_groups if self.optimizer is not None else []
        return [group.get("betas", group.get("momentum", 0.0)) for group in groups]

    def _of_groups(self, name: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(name, 0.0) for group in self.optimizer.param_groups]

    def compile(self, backend: str = "inductor", compile_kwargs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Compiles the forward of every unit; gathering and reducing stay outside of the graphs."""
        for unit in self._core.units:
            if not self.is_compiled and (unit.module is not self.module or len(self._core.units) == 1):
                self._compiled.append(unit.module)
                unit.module.forward = torch.compile(unit.module.forward, backend=backend, **(compile_kwargs or {}))
        self.is_compiled = True

    def destroy(self) -> None:
        """Lets go of all that was sharded, without gathering it; parameters that were cut are left as shapes."""
        self._reporter.close()
        if Engine.is_on(self.module):
            close(self.module, gather=False)
        for module in self._compiled:
            vars(module).pop("forward", None)  # the class has its own
        for parameter in self._frozen:
            parameter.requires_grad_(True)

    def _check_trains(self, what: str) -> None:
        if self.optimizer is None:
            raise RuntimeError(
                f'engine.{what}() needs an optimizer: give one to initialize(optimizer=...), or an "optimizer" '
                "section in the config"
            )

    def __getattr__(self, name: str) -> Any:
        """What the engine does not have is the model's."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("module")
            if model is None or name == "module":
                raise
            return getattr(model, name)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        what = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"of type {type(loss).__name__}"
        raise ValueError(
            f"engine.backward() wants a loss of one element, not one {what}: reduce it first (loss.mean()), or give "
            "gradients to outputs.backward(gradient=...), which works beside it"
        )
    if not loss.requires_grad:
        raise ValueError(
            "this loss has no graph to run backward through: it was computed under torch.no_grad, or detached, or no "
            "parameter it depends on is trained"
        )
