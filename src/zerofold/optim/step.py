"""Between backward and update: are all gradients finite, how large are they, and what does the optimizer get to see."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zerofold.attachments import StepInfo, Verdict
from zerofold.engine import Engine
from zerofold.optim.adam import Update, why_not_one_pass
from zerofold.optim.clip import Gradients
from zerofold.sharded import ShardedParameter, ShardedTensor


@dataclass(frozen=True)
class StepOptions:
    """What `attach` was told about the steps of an optimizer."""

    clip: float | None = None
    clip_value: float | None = None
    one_pass: bool | None = None
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None


class Step:
    """The sharded part of every step of one optimizer."""

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
        self._engine, self._optimizer, self._options = engine, optimizer, options
        self._was_applied = False

    def begin(self) -> None:
        """Gradients are all there: the optimizer's own code runs next, unless the one pass has done its work."""
        engine, options = self._engine, self._options
        if engine.clock.tape is not None:
            engine.clock.tape.begin_update()
        if engine.is_swapped:
            raise RuntimeError(
                "optimizer.step() inside `with average.swapped()` would train the averaged weights: leave it"
            )
        engine.reductions.steps += 1
        engine.changes.check()
        engine.settle()
        engine.reductions.flush()
        if engine.replicas is not None and self._optimizer is engine.optimizers[0]:
            engine.replicas.before_step()
        if engine.updates is not None:
            engine.updates.get_ready()  # while the device is still in backward: below, it would wait for this
        gradients = Gradients(engine)
        gradients.of(self._parameters()).refuse_used_up()
        update = Update(engine, self._optimizer, options.clip_value) if self._uses_one_pass() else None
        verdict = self._judge(gradients, meanwhile=_nothing if update is None else update.prepare)
        self._was_applied = not verdict.info.skipped
        if verdict.info.skipped:
            engine.reductions.expect_no_update()
            self._hide()
            return
        scale = self._clip_scale(gradients, verdict)
        if update is not None:
            update.run(scale)
            self._hide()
            return
        if scale is not None:
            gradients.multiply(scale)
            verdict.is_clipped = True
        if options.clip_value is not None:
            gradients.clamp(options.clip_value)
        engine.begin_step(self._optimizer)
        for face in self._faces():
            gradient = face.grad
            if not isinstance(gradient, ShardedTensor):
                continue
            device = face.local.device
            if gradient.dtype is not face.dtype or gradient.local.device != device:
                # torch's optimizers want one dtype, in one memory. The accumulators stay as they are.
                engine.step.show(face, ShardedTensor(gradient.local.to(device, face.dtype), gradient.spec))

    def end(self) -> None:
        tape = self._engine.clock.tape
        self._end()
        if tape is not None and self._optimizer is self._engine.optimizers[-1]:
            tape.end_update()

    def _end(self) -> None:
        engine = self._engine
        engine.end_step()
        if not self._was_applied:
            return
        engine.schedule.stepped(self._optimizer)
        for follow in engine.after_step if self._optimizer is engine.optimizers[-1] else ():
            follow()
        if self._options.scheduler is not None:
            self._options.scheduler.step()

    def _uses_one_pass(self) -> bool:
        wanted, engine = self._options.one_pass, self._engine
        if wanted is None:
            wanted = engine.precision.parameters is not None or engine.is_offloaded
        return (
            wanted
            and why_not_one_pass(self._optimizer) is None
            and all(isinstance(p, ShardedParameter) or not _has_work(p) for p in self._parameters())
        )

    def _parameters(self) -> list[Tensor]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _faces(self) -> list[ShardedParameter]:
        return [p for p in self._parameters() if isinstance(p, ShardedParameter)]

    def _hide(self) -> None:
        """The optimizer's own code finds no gradient and leaves everything as it is, its counters too."""
        self._engine.step.is_open = True
        for parameter in self._parameters():
            self._engine.step.show(parameter, None)

    def _take_over_grad_scaler(self, gradients: Gradients) -> bool:
        """torch.amp.GradScaler hands scale and verdict of a step to optimizers that are fused; else it acts itself."""
        found_inf, scale = (getattr(self._optimizer, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is not None and self._scaler_sees_a_part():
            raise RuntimeError(
                "torch.amp.GradScaler: at this stage, over a tensor or pipeline axis, each rank would see a part of "
                "the gradients, so that some skip a step and others do not: use zf.prepare(precision='fp16'), which "
                "scales by itself, or stage 1, 2 or 3"
            )
        if scale is not None:
            if self._options.clip is not None and len(self._engine.optimizers) > 1:
                raise RuntimeError(
                    "clip= needs the norm of all gradients, and GradScaler unscales those of one optimizer at a time: "
                    "call scaler.unscale_(optimizer) for each of them before the first step"
                )
            gradients.of(self._parameters()).multiply(scale.reciprocal())
            self._optimizer.grad_scale = None  # type: ignore[attr-defined]
        return found_inf is not None and bool(found_inf.item())

    def _scaler_sees_a_part(self) -> bool:
        """Whole gradients are plain tensors, of which a GradScaler asks nobody else. Sharded ones ask all ranks."""
        return self._engine.groups.model is not None and any(
            parameter.grad is not None and not isinstance(parameter.grad, ShardedTensor)
            for parameter in self._parameters()
        )

    def _clip_scale(self, gradients: Gradients, verdict: Verdict) -> Tensor | None:
        """What the gradients are to be multiplied by; None for nothing, or when an optimizer before has done it."""
        clip, norm = self._options.clip, verdict.info.norm
        if clip is None or norm + 1e-6 <= clip or verdict.is_clipped:
            return None
        # Filled where it is: a copy from ordinary host memory would wait for the device.
        return gradients.coefficient(clip, torch.full((), norm, device=self._engine.groups.gather.device))

    def _judge(self, gradients: Gradients, *, meanwhile: Callable[[], None]) -> Verdict:
        """One verdict for all ranks, from a number that all of them have. Taken once for one set of gradients.

        `meanwhile` is called while a device may still be computing what the verdict waits for.
        """
        engine, last = self._engine, self._engine.verdict
        overflow = self._take_over_grad_scaler(gradients)
        is_same = last is not None and last.reduction == engine.reductions.count and self._optimizer not in last.stepped
        if last is not None and is_same and not overflow:
            last.stepped.add(self._optimizer)
            return last
        total = gradients.norm()
        meanwhile()
        norm = total.item()
        skipped = overflow or not math.isfinite(norm)
        name = gradients.first_non_finite() if skipped else None
        info = StepInfo(norm, skipped, name, engine.scaler.value, engine.scaler.skipped + skipped)
        engine.verdict = Verdict(info, engine.reductions.count, {self._optimizer})
        if skipped and engine.is_first and engine.scaler.is_at_minimum:
            warnings.warn(f"step skipped: {_what(name)}; {info.skipped_total} skipped so far", stacklevel=5)
        engine.scaler.update(skipped, parameter=name)
        engine.reducer.loss_scale = engine.scaler.value
        return engine.verdict


def _nothing() -> None:
    pass


def _has_work(whole: Tensor) -> bool:
    """A parameter that is not cut: frozen ones are whole where the row cuts no parameters, and nobody updates them."""
    return whole.numel() > 0 and (whole.requires_grad or whole.grad is not None)


def _what(name: str | None) -> str:
    if name is None:
        return "the norm of all gradients is infinite, though each of them is finite"
    return f"the gradient of '{name}' is infinite or NaN"
