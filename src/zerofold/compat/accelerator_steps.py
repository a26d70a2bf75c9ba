"""Optimizers and schedulers as Accelerate prepares them: they act when a step is due, and only then."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from zerofold.access import last_step
from zerofold.engine import Engine
from zerofold.optim.clip import Gradients


class Micro:
    """Which micro-batch of a step this is; shared by all that an Accelerator has prepared."""

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.count = 0
        self.sync_gradients = True  # a step is due

    @property
    def pending(self) -> int:
        """Micro-batches of a step that is not due yet."""
        return 0 if self.sync_gradients else self.count % self.accumulate

    def advance(self, *, at_end: bool) -> None:
        """The next micro-batch; the last one of the data ends a step in any case."""
        self.count = 0 if at_end else self.count + 1
        self.sync_gradients = at_end or self.count % self.accumulate == 0


class PreparedOptimizer(torch.optim.Optimizer):
    """Stands for an optimizer whose step() and zero_grad() do nothing until all micro-batches of a step are through.

    Groups, states and defaults are those of the optimizer itself, so schedulers may be built on either of the two.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module, micro: Micro) -> None:
        self.optimizer, self._model, self._micro = optimizer, model, micro
        self.step_was_skipped = False  # a gradient was not finite

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def __repr__(self) -> str:
        return repr(self.optimizer)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        if not self._micro.sync_gradients:
            return None
        result = self.optimizer.step(closure)
        info = last_step(self._model)
        self.step_was_skipped = info is not None and info.skipped
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        if self._micro.sync_gradients:
            self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


class PreparedScheduler:
    """A scheduler that advances with real steps.

    As with Accelerate, its length is counted in steps of one process: each step advances it once for every rank, since
    the ranks take as many batches at a time. With split_batches, once.
    """

    def __init__(
        self, scheduler: Any, optimizers: list[PreparedOptimizer], micro: Micro, times: int, *, with_optimizer: bool
    ) -> None:
        self.scheduler, self.optimizers = scheduler, optimizers
        self._micro, self._times, self._with_optimizer = micro, times, with_optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        if not self._with_optimizer:
            self.scheduler.step(*args, **kwargs)
            return
        if not self._micro.sync_gradients or any(each.step_was_skipped for each in self.optimizers):
            return
        for _ in range(self._times):
            # One that knows its end (OneCycleLR) would raise beyond it, and the last batches were filled up.
            if getattr(self.scheduler, "_step_count", 0) <= getattr(self.scheduler, "total_steps", float("inf")):
                self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = self.scheduler.state_dict()
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state)


def engine_around(model: nn.Module) -> Engine | None:
    """Of a prepared model or a module of one; none where there is no parameter, as in a loss function."""
    first = next((parameter for parameter in model.parameters() if parameter.numel()), None)
    return None if first is None else Engine.of_parameter(first) or Engine.of(model)


def gradients_of(models: list[nn.Module], parameters: Iterable[Tensor] | Tensor) -> list[Gradients]:
    """Of these parameters, for each model that has some of them."""
    left = {id(p): p for p in ([parameters] if isinstance(parameters, Tensor) else parameters)}
    found = []
    for engine in map(Engine.of, models):
        faces = engine.faces()
        own = [left.pop(key) for key in list(left) if key in faces]
        if own:
            engine.end_step()
            engine.reductions.flush()
            found.append(Gradients(engine).of([faces[id(parameter)][1] for parameter in own]))
    if left or not found:
        what = f"{len(left)} of these parameters are not" if left else "there are no parameters"
        raise ValueError(f"clipping: {what} of a prepared model; pass model.parameters()")
    return found
