"""What parameters of DeepSpeed's stage 3 say about themselves, for code that asks them (TRL does)."""

from __future__ import annotations

from enum import Enum

from torch import Tensor

from zerofold.engine import Engine
from zerofold.sharded import ShardedParameter


class ZeroParamStatus(Enum):
    """`p.ds_status`, where parameters are cut: AVAILABLE for what a module holds in its forward and backward."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def show_status(engine: Engine) -> None:
    """A parameter has two faces, and modules hold the one that is whole as long as it is: each has one answer."""
    if not engine.row.parameters.is_cut:
        return
    told: list[Tensor] = []
    for slab in engine.slabs():
        told += [*slab.parameters, *slab.faces]
    for parameter in told:
        is_cut = isinstance(parameter, ShardedParameter)
        status = ZeroParamStatus.NOT_AVAILABLE if is_cut else ZeroParamStatus.AVAILABLE
        parameter.ds_status = status  # type: ignore[attr-defined]

    def forget() -> None:
        for parameter in told:
            vars(parameter).pop("ds_status", None)

    engine.on_close.append(forget)
