"""State dicts in FSDP's shapes: whole tensors or sharded ones, of the model and of an optimizer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from zerofold.agree import agree
from zerofold.comm import Comm
from zerofold.engine import Engine
from zerofold.optim.probe import scalar_states
from zerofold.shard_spec import ShardSpec
from zerofold.sharded import ShardedParameter, ShardedTensor

WRAPPED = "_fsdp_wrapped_module"
_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def settings_of(
    kind: StateDictType, config: StateDictConfig | None = None, optim: OptimStateDictConfig | None = None
) -> StateDictSettings:
    """A kind of state dict with its options, checked.

    >>> settings_of(StateDictType.FULL_STATE_DICT).state_dict_config.rank0_only
    False
    """
    if kind not in _CONFIGS:
        raise ValueError(
            f"state_dict_type={kind}: choose StateDictType.FULL_STATE_DICT, or SHARDED_STATE_DICT for each rank's own "
            "part, which torch.distributed.checkpoint saves and loads over any number of ranks"
        )
    made = _CONFIGS[kind]
    for given, wanted in zip((config, optim), made, strict=True):
        if given is not None and not isinstance(given, wanted):
            raise ValueError(f"{kind} takes a {wanted.__name__}, not a {type(given).__name__}")
    return StateDictSettings(kind, config or made[0](), optim or made[1]())


def clean(name: str) -> str:
    """A name without what FSDP puts into it.

    >>> clean("_fsdp_wrapped_module.blocks.0._fsdp_wrapped_module.weight")
    'blocks.0.weight'
    """
    return ".".join(part for part in name.split(".") if part != WRAPPED)


def shown_state(state: dict[str, Any], config: StateDictConfig | OptimStateDictConfig) -> dict[str, Any]:
    """A model's sharded state dict as the config wants it. All ranks must call it, whoever keeps the result."""
    show = _Show(config)
    done: dict[ShardSpec, Tensor] = {}  # a tied parameter once
    for name, tensor in state.items():
        if isinstance(tensor, ShardedTensor):
            if tensor.spec not in done:
                done[tensor.spec] = show(tensor)
            state[name] = done[tensor.spec]
        elif isinstance(tensor, Tensor):
            state[name] = show(tensor)
    if show.drops:
        state.clear()
    return state


class _Show:
    """One tensor after another: whole ones are made one at a time."""

    def __init__(self, config: StateDictConfig | OptimStateDictConfig) -> None:
        self.is_full = isinstance(config, (FullStateDictConfig, FullOptimStateDictConfig))
        self.drops = bool(getattr(config, "rank0_only", False)) and dist.get_rank() != 0
        self._to_cpu = config.offload_to_cpu

    def __call__(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, ShardedTensor):
            return tensor.cpu() if self._to_cpu else tensor
        if not self.is_full:
            return ShardedTensor(tensor.local.cpu(), tensor.spec) if self._to_cpu else tensor
        whole = tensor.full_tensor()
        return torch.empty(0) if self.drops else whole.cpu() if self._to_cpu else whole


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, config: OptimStateDictConfig) -> dict[str, Any]:
    """An optimizer's state by the names of parameters, as torch's FSDP gives it; {} where rank 0 alone keeps it."""
    names = _names(model)
    show = _Show(config)
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        members = [_name_of(names, optimizer, p) for p in group["params"]]
        groups.append({**{key: value for key, value in group.items() if key != "params"}, "params": members})
        for name, parameter in zip(members, group["params"], strict=True):
            if parameter in optimizer.state:
                held = optimizer.state[parameter]
                state[name] = {key: show(v.detach().clone()) if isinstance(v, Tensor) else v for key, v in held.items()}
    return {} if show.drops else {"state": state, "param_groups": groups}


def optimizer_state_to_load(
    model: nn.Module, optimizer: torch.optim.Optimizer, given: dict[str, Any]
) -> dict[str, Any]:
    """What `optimizer.load_state_dict` takes, from a state by names: each rank keeps its range of whole tensors.

    All ranks must call it. Those that were given nothing get it from one that was, tensor by tensor.
    """
    sender = _Sender(Engine.of(model).groups.control, given)
    given = sender.outline
    names, scalars = _names(model), scalar_states(optimizer)
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    saved = {clean(str(name)): held for name, held in given["state"].items()}
    options = {clean(str(name)): group for group in given["param_groups"] for name in group["params"]}
    position = 0
    for group in optimizer.param_groups:
        indices = []
        for parameter in group["params"]:
            name = _name_of(names, optimizer, parameter)
            if name in saved:
                state[position] = {
                    key: _cut(sender.deal(value), parameter, key in scalars) for key, value in saved[name].items()
                }
            elif name not in options:
                raise KeyError(f"the optimizer state to load has no '{name}': it is of another model")
            indices.append(position)
            position += 1
        first = options.get(_name_of(names, optimizer, group["params"][0]), group) if group["params"] else group
        groups.append({**{key: value for key, value in first.items() if key != "params"}, "params": indices})
    return {"state": state, "param_groups": groups}


class _Sent(NamedTuple):
    """Stands for a tensor that another rank has."""

    shape: torch.Size
    dtype: torch.dtype


class _Sender:
    """Where some ranks have no state: the first that has one tells the others what is in it, then deals it out."""

    def __init__(self, control: Comm, given: dict[str, Any] | None) -> None:
        self._control = control
        having = control.all_gather_objects(bool(given))
        if not any(having):
            raise ValueError(
                "the optimizer state to load is empty on every rank: pass what FSDP.optim_state_dict gave, on rank 0 "
                "at least"
            )
        self._source, self._is_needed = having.index(True), not all(having)
        self.outline: dict[str, Any] = given or {}
        if self._is_needed:
            sends = control.rank == self._source
            outline = agree(control, lambda: _outline(self.outline) if sends else None)
            received = control.all_gather_objects(outline)[self._source]
            self.outline = self.outline if sends else received

    def deal(self, value: Any) -> Any:
        """The tensor, on every rank; all of them ask in the same order."""
        if not self._is_needed or not isinstance(value, (Tensor, _Sent)) or not value.shape:
            return value
        whole = value.cpu().contiguous() if isinstance(value, Tensor) else torch.empty(value.shape, dtype=value.dtype)
        if whole.numel():
            plain = whole.view(-1).view(torch.uint8)  # of any dtype
            self._control.broadcast(plain, self._source, unit="optimizer state").wait()
        return whole


def _outline(given: dict[str, Any]) -> dict[str, Any]:
    """Without tensors, but for single numbers."""

    def shown(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            raise ValueError(
                "the optimizer state to load is sharded, and some ranks have none: each must pass its own part"
            )
        if not isinstance(value, Tensor):
            return value
        return _Sent(value.shape, value.dtype) if value.dim() else value.cpu()

    state = {name: {key: shown(value) for key, value in held.items()} for name, held in given["state"].items()}
    return {"state": state, "param_groups": given["param_groups"]}


def _cut(value: Any, parameter: Tensor, is_scalar: bool) -> Any:
    if not isinstance(value, Tensor):
        return value
    if is_scalar or not isinstance(parameter, ShardedParameter) or value.shape != parameter.shape:
        return value.clone()  # a step counts on in place
    if isinstance(value, ShardedTensor):
        if value.spec.ranges == parameter.spec.ranges:
            return ShardedTensor(value.local.to(parameter.device), parameter.spec)
        value = value.full_tensor()
    piece = parameter.spec.cut(value).to(device=parameter.device, dtype=parameter.dtype, copy=True)
    return ShardedTensor(piece, parameter.spec)


def _names(model: nn.Module) -> dict[int, str]:
    """By the id of every parameter, in either of its two faces."""
    found = {id(parameter): name for name, parameter in model.named_parameters()}
    found |= {key: name for key, (name, _) in Engine.of(model).faces().items()}
    return {key: clean(name) for key, name in found.items()}


def _name_of(names: dict[int, str], optimizer: torch.optim.Optimizer, parameter: Tensor) -> str:
    if id(parameter) not in names:
        raise ValueError(
            f"this {type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that the model does "
            "not have: build it from model.parameters() after FSDP has wrapped the model"
        )
    return names[id(parameter)]
