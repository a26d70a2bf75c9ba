"""torch.distributed.checkpoint's state dicts, whole where that is asked for.

torch makes whole what is a DTensor, and leaves a parameter that is cut in another way as it is, without a word. So a
script that saves one file, as FSDP2's do, takes these by the same names from `zerofold.fsdp`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_states
from torch.distributed.checkpoint.state_dict import StateDictOptions

from zerofold.sharded import ShardedTensor

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]


def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """torch's function of this name. With full_state_dict tensors are whole, and all ranks must call it; with
    cpu_offload as well rank 0 alone keeps them, and the others get {}.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(4, 2), stage=3)
    >>> type(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["weight"]).__name__
    'Tensor'
    >>> zf.close(model)
    """
    state = torch_states.get_model_state_dict(model, submodules=submodules, options=_cut(options))
    return _shown(state, options)


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """torch's function of this name; whole and on rank 0 as `get_model_state_dict`."""
    state = torch_states.get_optimizer_state_dict(
        model, _held(optimizers), submodules=submodules, options=_cut(options)
    )
    return _shown(state, options)


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """torch's function of this name: the model's and the optimizers' at once."""
    state, optimizer = torch_states.get_state_dict(
        model, _held(optimizers), submodules=submodules, options=_cut(options)
    )
    return _shown(state, options), _shown(optimizer, options)


def _held(optimizers: Optimizers) -> Any:
    return optimizers if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)


def _cut(options: StateDictOptions | None) -> StateDictOptions | None:
    """The same without what is done here, when all is known that is to be whole."""
    if options is None or not options.full_state_dict:
        return options
    return replace(options, full_state_dict=False, cpu_offload=False, broadcast_from_rank0=False)


def _shown(state: Any, options: StateDictOptions | None) -> dict[str, Any]:
    if options is None or not options.full_state_dict:
        return state
    drops = options.cpu_offload and dist.get_rank() != 0
    shown: dict[str, Any] = _whole(state, drops=drops, to_cpu=options.cpu_offload)
    return {} if drops else shown


def _whole(held: Any, *, drops: bool, to_cpu: bool) -> Any:
    """One tensor after another; a rank that keeps none of them lets go of each at once."""
    if isinstance(held, dict):
        return {key: _whole(value, drops=drops, to_cpu=to_cpu) for key, value in held.items()}
    if isinstance(held, (list, tuple)):
        return type(held)(_whole(value, drops=drops, to_cpu=to_cpu) for value in held)
    if not isinstance(held, Tensor):
        return held
    whole = held.full_tensor() if isinstance(held, ShardedTensor) else held
    return None if drops else whole.cpu() if to_cpu else whole
