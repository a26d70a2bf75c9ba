"""An engine's states in host memory for a while, under DeepSpeed's names."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from zerofold.park import Parking, offload_states, reload_states

# Masters and what forward computes with are made from each other, so they go together. Buffers in which gradients
# travel are empty between backwards, and freed whatever is parked.
_STATES: dict[str, tuple[str, ...]] = {
    "optim_states": ("optimizer",),
    "hp_params": ("parameters",),
    "lp_params": ("parameters",),
    "lp_grads": ("gradients",),
    "contiguous_grad_buffer": ("gradients",),
}


class ParksStates:
    """The two methods of an engine."""

    module: nn.Module

    def offload_states(
        self,
        include: Collection[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> Parking:
        """As `zf.offload_states`. The copies are complete when it returns, with non_blocking=True as well.

        `include` takes DeepSpeed's states (OffloadStateTypeEnum, or their names). hp_params and lp_params mean both.
        """
        if getattr(device, "type", device) != "cpu":
            raise ValueError(f"engine.offload_states(device={device!r}): states can be parked in host memory, 'cpu'")
        names = [include] if isinstance(include, str) else list(include or ())
        unknown = [name for name in names if name not in _STATES]
        if unknown:
            raise ValueError(f"engine.offload_states: {unknown[0]!r} in include is none of {', '.join(_STATES)}")
        states = None if include is None else {state for name in names for state in _STATES[name]}
        return offload_states(self.module, states, pin=pin_memory)

    def reload_states(self, non_blocking: bool = False) -> Parking:
        """As `zf.reload_states`; complete when it returns."""
        return reload_states(self.module)
