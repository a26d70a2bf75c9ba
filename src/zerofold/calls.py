"""Forwards that are under way, and who is told of them while several micro-batches are."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from zerofold.unit import Unit


@dataclass(eq=False)
class UnitCall:
    """One forward of a unit, until its backward is through."""

    unit: Unit
    is_outermost: bool = False  # the user called it, and no module of the model around it
    is_cut_out: bool = False  # of the graph, by an accumulation
    has_input_gradient: bool = False  # so the end of its backward will be noticed
    begun: bool = False  # its backward
    ended: bool = False

    def might_get_gradients(self) -> bool:
        return self.has_input_gradient or bool(self.unit.trainable_slabs)


@dataclass
class Calls:
    """The forwards of one flow: the training thread's, or one micro-batch's of `zf.accumulate`, which take turns."""

    running: list[UnitCall] = field(default_factory=list)  # innermost last
    inner: nn.Module | None = None  # a module inside a unit that the user has called
    lent: dict[Unit, nn.Module] = field(default_factory=dict)  # units gathered for one module inside them


class Accumulation(Protocol):
    """All micro-batches of a step at once, as the hooks see it; `accumulate` is the one there is."""

    glue: list[Unit]
    """Units around others. Backward goes through them piece by piece."""

    def arrive(self, unit: Unit) -> bool: ...
    def enter(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]: ...
    def leave(self, output: Any) -> Any: ...
