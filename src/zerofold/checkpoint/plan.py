"""What loading a checkpoint would do: which range of which tensor goes where on this rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerofold.checkpoint import states
from zerofold.checkpoint.contents import CheckpointError, Contents, OptimizerContents, Stored, clean, numel
from zerofold.checkpoint.positions import named
from zerofold.checkpoint.sources import check_fits, names_in_files
from zerofold.engine import Engine
from zerofold.optim.probe import state_names
from zerofold.sharded import ShardedParameter, ShardedTensor
from zerofold.slab import Entry

_AT_ONCE = 2**24  # elements
# How an optimizer computes, not what: these stay as they are here.
_OF_THE_MACHINE = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


@dataclass(frozen=True)
class Fill:
    """target = elements start to stop of a stored tensor, in the target's dtype."""

    target: Tensor  # flat
    stored: Stored
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.target.numel()

    def run(self) -> None:
        for low in range(self.start, self.stop, _AT_ONCE):
            high = min(low + _AT_ONCE, self.stop)
            self.target[low - self.start : high - self.start].copy_(self.stored.read(low, high))


@dataclass
class Plan:
    fills: list[Fill] = field(default_factory=list)
    restores: list[Callable[[], None]] = field(default_factory=list)  # after the fills
    checked: list[tuple[Stored, int, int]] = field(default_factory=list)  # ranges that the restores will read
    warnings: list[str] = field(default_factory=list)

    def fill(self, target: Tensor, stored: Stored, start: int) -> None:
        if target.numel():
            self.fills.append(Fill(target, stored, start))


def plan_tensors(engine: Engine, contents: Contents, plan: Plan, *, base: dict[str, str], strict: bool) -> None:
    """Parameters, buffers and averages."""
    used: set[str] = set()
    missing, narrowed = [], []
    paths = {module: path for path, module in engine.model.named_modules()}
    prefix = getattr(engine.model, "base_model_prefix", "")
    prefix = prefix if isinstance(prefix, str) else ""
    for slab in engine.slabs():
        for entry, piece in zip(slab.entries, slab.layout.pieces(slab.place), strict=True):
            names = names_of(entry, paths, prefix)
            used.update(names)  # all of them: some formats store tied parameters once for each name
            stored = contents.tensor(*names)
            if stored is None:
                missing.append(clean(entry.name))
                continue
            check_fits(entry.name, entry.parameter, stored, contents.where)
            if stored.dtype.itemsize > slab.shard.dtype.itemsize and stored.dtype.is_floating_point:
                narrowed.append(f"'{entry.name}' from {stored.dtype} to {slab.shard.dtype}")
            plan.fill(slab.shard.detach()[piece.shard_start : piece.shard_stop], stored, piece.start)
    for name, buffer in states.persistent_buffers(engine):
        used.update(names_in_files(name, prefix))
        stored = contents.tensor(*names_in_files(name, prefix))
        if stored is None:
            missing.append(name)
            continue
        check_fits(name, buffer, stored, contents.where)
        # The buffer of a module may be a view with gaps, so it is filled by itself.
        plan.restores.append(_buffer_filler(buffer, stored))
        plan.checked.append((stored, 0, numel(stored)))
    missing = [name for name in missing if not _is_in_base(name, contents, base, plan)]
    unused = [name for name in contents.tensors if name not in used]
    _report(plan, contents, missing, unused, strict=strict)
    if narrowed:
        plan.warnings.append(f"{contents.where}: rounded on load, {narrowed[0]} ({len(narrowed)} such parameter(s))")
    _plan_averages(engine, contents, plan)


def names_of(entry: Entry, paths: dict[torch.nn.Module, str], prefix: str) -> list[str]:
    """All names that a parameter may be stored under, the one it is known by first."""
    own = [clean(entry.name), *(clean(f"{paths[module]}.{attribute}".lstrip(".")) for module, attribute in entry.sites)]
    others = [name for each in own for name in names_in_files(each, prefix)]
    return [*own, *(name for name in others if name not in own)]


def _buffer_filler(buffer: Tensor, stored: Stored) -> Callable[[], None]:
    def fill() -> None:
        with torch.no_grad():
            buffer.copy_(stored.read(0, buffer.numel()).view(buffer.shape))

    return fill


def _is_in_base(name: str, contents: Contents, base: dict[str, str], plan: Plan) -> bool:
    """Whether a parameter was left out on purpose; then it must be what it was."""
    if contents.base is None:
        return False
    saved = {key.split(" ")[0]: key for key in contents.base}
    here = {key.split(" ")[0]: key for key in base}
    if name not in saved or name not in here:
        return False
    if saved[name] != here[name]:
        kinds = saved[name].split(" ")[1], here[name].split(" ")[1]
        plan.warnings.append(
            f"{contents.where} was trained on '{name}' in {kinds[0]}, which is {kinds[1]} here, so whether it is the "
            "same base cannot be told"
        )
    elif contents.base[saved[name]] != base[here[name]]:
        raise CheckpointError(
            f"{contents.where} holds what was trained on another base: '{name}' has other values than when it was "
            "saved. Load the base that it was trained on first"
        )
    return True


def _report(plan: Plan, contents: Contents, missing: list[str], unused: list[str], *, strict: bool) -> None:
    for names, what in ((missing, "has no"), (unused, "holds, and the model does not have,")):
        if names:
            line = f"{contents.where} {what} '{names[0]}' ({len(names)} such tensor(s))"
            if strict:
                raise CheckpointError(f"{line}: is it a checkpoint of this model? strict=False loads the rest")
            plan.warnings.append(line)


def _plan_averages(engine: Engine, contents: Contents, plan: Plan) -> None:
    own = states.emas(engine)
    if len(own) != len(contents.averages):
        plan.warnings.append(
            f"{contents.where} holds {len(contents.averages)} average(s) of the weights, the model has {len(own)}: "
            "averages without a saved one start again from the weights, others are left out"
        )
    for index, average in enumerate(own):
        saved = contents.averages[index] if index < len(contents.averages) else None
        if saved is None:
            plan.restores.append(average.restart)
            continue
        for slab, shard in average.shards().items():
            for name, shape, start, flat in states.own_pieces(slab, shard):
                stored = saved["tensors"].get(contents.aliases.get(name, name))
                if stored is None or tuple(stored.shape) != shape:
                    raise CheckpointError(f"{contents.where} has no average of '{name}' with shape {shape}")
                plan.fill(flat, stored, start)
        plan.restores.append(partial(setattr, average, "updates", saved["updates"]))


def plan_optimizers(
    engine: Engine, optimizers: list[torch.optim.Optimizer], contents: Contents, plan: Plan, *, strict: bool
) -> None:
    """Groups and states, found by the names of parameters: they may be spread over optimizers in another way."""
    if optimizers and not contents.optimizers:
        raise CheckpointError(
            f"{contents.where} holds no optimizer states: pass None as optimizer for the weights alone"
        )
    names = states.names_of(engine)
    in_order = [names[id(p)] for o in optimizers for group in o.param_groups for p in group["params"] if id(p) in names]
    contents.optimizers = [named(saved, in_order) for saved in contents.optimizers]  # some formats know positions only
    places = {
        name: (saved, group) for saved in contents.optimizers for group in saved.groups for name in group["params"]
    }
    for optimizer in optimizers:
        needed = state_names(optimizer)
        for group in optimizer.param_groups:
            members = [(p, _saved_name(names[id(p)], contents, places)) for p in group["params"] if id(p) in names]
            _plan_group(plan, contents, optimizer, group, [places[name] for _, name in members if name in places])
            lost = [names[id(p)] for p, name in members if name not in places]
            if lost:
                _report(plan, contents, [f"optimizer state of {lost[0]}"], [], strict=strict)
            for parameter, name in members:
                saved = places[name][0] if name in places else None
                found = {} if saved is None else _states(contents, saved, name, optimizer, needed)
                _plan_state(engine, plan, contents, optimizer, parameter, name, found, group)


def _saved_name(name: str, contents: Contents, places: dict[str, Any]) -> str:
    """A tied parameter may have been known by another of its names."""
    if name in places:
        return name
    first = contents.aliases.get(name, name)
    same = [other for other, known in contents.aliases.items() if known == name]
    return next((other for other in (first, *same) if other in places), name)


def _states(
    contents: Contents,
    saved: OptimizerContents,
    name: str,
    optimizer: torch.optim.Optimizer,
    needed: frozenset[str],
) -> dict[str, Any]:
    found = saved.states.get(name, {})
    kind = type(optimizer).__name__
    if not found or saved.kind == kind:
        return found
    if not needed <= set(found):
        raise CheckpointError(
            f"{contents.where} holds states of {saved.kind or 'another optimizer'} ({', '.join(sorted(found))}), and "
            f"{kind} needs {', '.join(sorted(needed))}: use an optimizer with the same states, or pass None for the "
            "weights alone"
        )
    return {key: value for key, value in found.items() if key in needed}


def _plan_group(
    plan: Plan,
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    group: dict[str, Any],
    found: Iterable[tuple[OptimizerContents, dict[str, Any]]],
) -> None:
    settings = [_settings(saved) for _, saved in found]
    for other in settings[1:]:
        if other != settings[0]:
            keys = sorted(key for key in other if other[key] != settings[0].get(key))
            raise CheckpointError(
                f"{contents.where}: parameters that are in one group of {type(optimizer).__name__} here were in groups "
                f"with different {', '.join(keys)} there: make the groups as they were"
            )
    if settings:
        plan.restores.append(lambda: _set_group(group, settings[0]))


def _settings(saved: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for key, value in saved.items()
        if key not in _OF_THE_MACHINE
    }


def _set_group(group: dict[str, Any], settings: dict[str, Any]) -> None:
    for key, value in settings.items():
        if isinstance(group.get(key), Tensor) and not isinstance(value, Tensor):
            group[key].fill_(value)  # a learning rate that compiled code reads
        elif isinstance(group.get(key), tuple) and isinstance(value, list):
            group[key] = tuple(value)
        else:
            group[key] = value


def _plan_state(
    engine: Engine,
    plan: Plan,
    contents: Contents,
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    name: str,
    found: dict[str, Any],
    group: dict[str, Any],
) -> None:
    is_elsewhere = (
        isinstance(parameter, ShardedParameter) and engine.row.has_owners and not parameter.spec.is_owned_here
    )
    state: dict[str, Any] = {}
    for key, value in found.items() if not is_elsewhere else ():
        if not hasattr(value, "read"):
            state[key] = value
            continue
        held = optimizer.state.get(parameter, {}).get(key)
        saved = contents.tensor(name)
        dtype = _dtype(value, saved, parameter, held)
        if tuple(value.shape) == tuple(parameter.shape) and key != "step":
            state[key], flat, start = _like(parameter, held, dtype)
        else:
            on_device = group.get("capturable") or group.get("fused") or key != "step"
            whole = torch.empty(value.shape, dtype=value.dtype, device=parameter.device if on_device else "cpu")
            state[key], flat, start = whole, whole.view(-1), 0
        plan.fill(flat, value, start)
    plan.restores.append(lambda: _set_state(optimizer, parameter, state))


def _like(parameter: Tensor, held: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """A state as the parameter is cut: the tensor, its flat memory, and where that begins. What is there is reused."""
    if isinstance(held, Tensor) and (held.dtype is not dtype or held.shape != parameter.shape):
        held = None
    if not isinstance(parameter, ShardedParameter):
        whole = held if held is not None else torch.empty_like(parameter, dtype=dtype, requires_grad=False)
        return whole, whole.detach().view(-1), 0
    spec = parameter.spec
    if not isinstance(held, ShardedTensor) or held.spec is not spec:
        held = ShardedTensor(torch.empty_like(parameter.local, dtype=dtype), spec)
    return held, held.local.reshape(-1), 0 if spec.is_replicated else spec.own[0]


def _set_state(optimizer: torch.optim.Optimizer, parameter: Tensor, state: dict[str, Any]) -> None:
    if state:
        optimizer.state[parameter] = state
    else:
        optimizer.state.pop(parameter, None)


def _dtype(stored: Stored, saved: Stored | None, parameter: Tensor, held: Any) -> torch.dtype:
    """The dtype a state should have: what the optimizer has already, or had with parameters of this dtype."""
    if isinstance(held, Tensor):
        return held.dtype
    if not stored.dtype.is_floating_point or (saved is not None and saved.dtype is parameter.dtype):
        return stored.dtype
    return parameter.dtype
