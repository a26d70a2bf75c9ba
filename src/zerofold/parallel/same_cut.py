"""Whether the ranks of a tensor axis are about to cut one model in one way.

Ranks that cut other layers would add up what does not belong together, and nothing would raise; ranks of which one
alone keeps a part of the sequence would wait for each other for ever.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from zerofold.comm import Comm
from zerofold.parallel.known import Wish
from zerofold.parallel.mesh import TENSOR, Mesh


def check_same_cut(control: Comm, model: nn.Module, mesh: Mesh, plan: Mapping[str, ParallelStyle], wish: Wish) -> None:
    """Raises on all ranks where those of any tensor axis differ; ranks of other axes may hold another model."""
    lines = [f"sequence_parallel={wish.sequence_parallel}", f"loss_parallel={wish.loss_parallel}"]
    lines += [f"'{name}' of {tuple(p.shape)} in {p.dtype}" for name, p in model.named_parameters()]
    lines += sorted(f"plan '{name}': {described(style)}" for name, style in plan.items())
    digests = control.all_gather_objects(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    odd = [axis for axis in mesh.groups(TENSOR) if len({digests[rank] for rank in axis}) > 1]
    if not odd:
        return
    everyone = control.all_gather_objects(lines)
    first = odd[0][0]
    other = next(rank for rank in odd[0] if digests[rank] != digests[first])
    pairs = zip([*everyone[first], "nothing more"], [*everyone[other], "nothing more"], strict=False)
    here, there = next((a, b) for a, b in pairs if a != b)
    raise ValueError(
        f"zf.tensor_parallel: ranks {first} and {other} share the inside of every layer and cut it differently: rank "
        f"{first} has {here} where rank {other} has {there}; call it with the same model and arguments on every rank"
    )


def described(value: Any) -> str:
    """The same on every rank, so without addresses: what a style does follows from its class and what it holds.

    >>> from torch.distributed.tensor.parallel import RowwiseParallel
    >>> described(RowwiseParallel(use_local_output=False))
    'RowwiseParallel(input_layouts=[Shard(dim=-1)], output_layouts=[Replicate()], use_local_output=False)'
    """
    if value is None or isinstance(value, (str, int, float, bool, torch.dtype)):
        return repr(value)
    if isinstance(value, Placement):
        return repr(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key}: {described(each)}' for key, each in value.items())}}}"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, ParallelStyle):
        held = ", ".join(f"{name}={described(each)}" for name, each in vars(value).items())
        return f"{type(value).__name__}({held})"
    return type(value).__name__
