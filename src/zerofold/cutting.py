"""Parameters cut one by one, before any model is sharded, and whole again when one is.

A parameter that is cut stays the same object: whoever holds it (its module, a module tied to it, an optimizer) holds
the cut one.

built        | p0 | p1     | p2 |          one module after another, each whole on every rank for a moment
cut          |p0|  |p1  |  |p2|            each parameter in even ranges, one per rank
sharded      |-- own --|                   a unit's parameters are gathered and laid out as one, then the next unit's
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

from zerofold.comm import Comm
from zerofold.shard_spec import Loose, ShardSpec, StepScope
from zerofold.sharded import ShardedParameter

_OWN = ("_local", "_spec")  # what a sharded parameter has beside the attributes that users set


def can_be_cut(parameter: Tensor) -> bool:
    """Other kinds (lazy, quantised, on the meta device) stay as they are until the model is sharded."""
    return type(parameter) is nn.Parameter and not parameter.is_meta and parameter.numel() > 0


def cut_alone(
    parameter: nn.Parameter, name: str, loose: Loose, comm: Comm, *, dtype: torch.dtype | None = None
) -> None:
    """Leaves this rank's even range of rank 0's values behind. All ranks must call it, in one order."""
    is_cast = dtype is not None and parameter.is_floating_point()
    whole = parameter.detach().to(comm.device, dtype if is_cast else None).contiguous()
    comm.broadcast(whole.view(-1).view(torch.uint8), 0, unit=name).wait()
    share = -(-whole.numel() // comm.size)
    ends = [min(rank * share, whole.numel()) for rank in range(comm.size + 1)]
    ranges = tuple(pairwise(ends))
    spec = ShardSpec(name, "", parameter.shape, ranges, comm, has_owner=False, step=StepScope(), loose=loose)
    _become(parameter, ShardedParameter(spec.cut(whole).clone(), spec, requires_grad=parameter.requires_grad))


def regain(parameter: Tensor, *, values: bool) -> None:
    """Makes a parameter that was cut alone an ordinary one again. All ranks must call it.

    Without `values` it gets its shape alone, on the meta device, and nothing is communicated.
    """
    if not isinstance(parameter, ShardedParameter) or parameter.spec.loose is None:
        return
    if parameter.whole is not None:
        raise RuntimeError(f"'{parameter.spec.name}' is shown whole just now: leave zero.GatheredParameters first")
    if values:
        whole = parameter.full_tensor()
    else:
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    _become(parameter, nn.Parameter(whole, requires_grad=parameter.requires_grad))


def _become(parameter: Tensor, other: Tensor) -> None:
    vars(other).update({key: value for key, value in vars(parameter).items() if key not in _OWN})
    name = other.spec.name if isinstance(other, ShardedParameter) else parameter._spec.name  # type: ignore[attr-defined]
    try:
        torch.utils.swap_tensors(parameter, other)
    except RuntimeError as error:
        raise RuntimeError(
            f"'{name}' {tuple(parameter.shape)} cannot change its memory while a view of it, a weak reference to it or "
            f"a graph made with it is kept somewhere: let go of that first ({error})"
        ) from error
