"""What this rank writes of each state: a flat range of every tensor it holds, its own and nobody else's.

A tensor of which several ranks hold the same range (nothing is cut, or groups repeat each other) is written by all of
them together, each a part of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from zerofold.checkpoint.boxes import runs_in_whole
from zerofold.checkpoint.contents import clean
from zerofold.engine import Engine
from zerofold.entry import Entry
from zerofold.fingerprints import fingerprint_tensor
from zerofold.nested import map_tensors
from zerofold.optim.ema import EMA
from zerofold.part import Part
from zerofold.sharded import ShardedParameter, ShardedTensor
from zerofold.slab import Slab
from zerofold.units import names_of_modules, names_of_sites


@dataclass(frozen=True)
class Held:
    """A range of a tensor in this rank's memory."""

    key: str
    shape: tuple[int, ...]
    start: int
    flat: Tensor  # elements from `start` on
    part: Part | None = None  # what the tensor is of the whole, where this rank has a part of it

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.shape if self.part is None else tuple(self.part.shape)

    @property
    def size(self) -> int:
        return self.flat.numel()

    @property
    def stop(self) -> int:
        return self.start + self.size


@dataclass(frozen=True)
class Replica:
    """This rank among those that hold the same."""

    index: int
    count: int

    def share(self, held: Held) -> Held:
        """The part that this one writes."""
        low = held.flat.numel() * self.index // self.count
        high = held.flat.numel() * (self.index + 1) // self.count
        return replace(held, start=held.start + low, flat=held.flat[low:high])


ALONE = Replica(0, 1)


def replica_of(engine: Engine) -> Replica:
    """Who else holds what an optimizer changes here."""
    groups, row = engine.groups, engine.row
    if not row.optimizer.is_cut:
        return Replica(groups.everyone.rank, groups.everyone.size)
    return ALONE if groups.across is None else Replica(groups.across.rank, groups.across.size)


def parameters(engine: Engine, *, trainable_only: bool) -> Iterator[Held]:
    replica = replica_of(engine)
    for slab in engine.slabs():
        if slab.requires_grad or not trainable_only:
            for held in own_pieces(slab, slab.shard, "model/"):
                if counts(held.part):
                    yield replica.share(held)


def own_pieces(slab: Slab, shard: Tensor, prefix: str = "") -> Iterator[Held]:
    """What `shard`, cut as the slab's own, holds of each parameter."""
    for entry, piece in zip(slab.entries, slab.layout.pieces(slab.place), strict=True):
        flat = shard.detach()[piece.shard_start : piece.shard_stop]
        yield Held(prefix + name_of(entry), tuple(entry.parameter.shape), piece.start, flat, entry.part)


def counts(part: Part | None) -> bool:
    """Whether this rank writes it: of those that hold the same along a tensor or pipeline axis, one does."""
    return part is None or part.counts


def name_of(entry: Entry) -> str:
    """Under which a parameter is saved: of one that two stages of a pipeline hold, the name on the first."""
    return clean(entry.name) if entry.part is None or entry.part.name is None else entry.part.name


def copies(engine: Engine, *, trainable_only: bool) -> list[str]:
    """Parameters that another rank is to write."""
    slabs = [slab for slab in engine.slabs() if slab.requires_grad or not trainable_only]
    return [name_of(entry) for slab in slabs for entry in slab.entries if not counts(entry.part)]


def tell_buffers(engine: Engine) -> list[dict[str, tuple[int, ...]]]:
    """The buffers of each part of the model, with their shapes, in the order of ranks. All ranks must call it."""
    if engine.groups.model is None:
        return []
    own = {names[0]: tuple(buffer.shape) for names, buffer in buffers_by_names(engine)}
    return engine.groups.model.all_gather_objects(own, unit="save")


def buffers(engine: Engine, told: list[dict[str, tuple[int, ...]]]) -> Iterator[Held]:
    """Rank 0's, which the others follow; of several parts of a model that have it, the first one's.

    Copies: unlike all else, they change in forward.
    """
    model = engine.groups.model
    before = {name: shape for others in told[: 0 if model is None else model.rank] for name, shape in others.items()}
    for (name, *_), buffer in buffers_by_names(engine):
        shape = tuple(buffer.shape)
        if before.get(name, shape) != shape:
            raise ValueError(
                f"buffer '{name}' has shape {shape} on one rank and {before[name]} on another that holds the same "
                "model: buffers are saved whole, so register one that is cut with persistent=False"
            )
        if name not in before and engine.groups.everyone.rank == 0:
            yield Held(f"model/{name}", shape, 0, buffer.detach().clone().reshape(-1))


def buffers_by_names(engine: Engine) -> list[tuple[list[str], Tensor]]:
    """Every persistent buffer with all of its names."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for module, paths in names_of_modules(engine.model).items():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names = [clean(f"{path}.{name}".lstrip(".")) for path in paths]
                found.setdefault(id(buffer), ([], buffer))[0].extend(names)
    return list(found.values())


def aliases(engine: Engine) -> dict[str, str]:
    """Further names of parameters and buffers that are held in several places."""
    paths, found = names_of_modules(engine.model), {}
    for slab in engine.slabs():
        for entry in slab.entries:
            for name in map(clean, names_of_sites(entry, paths)):
                if name != name_of(entry):
                    found[name] = name_of(entry)
    for (first, *others), _ in buffers_by_names(engine):
        found |= dict.fromkeys(others, first)
    return found


def names_of(engine: Engine) -> dict[int, str]:
    """By the id of what an optimizer holds for a parameter."""
    return {key: name_of(slab.entries[index]) for key, (slab, index) in engine.places().items()}


def parts_of(engine: Engine) -> dict[int, Part]:
    """By the id of what an optimizer holds for a parameter."""
    places = engine.places().items()
    return {key: part for key, (slab, index) in places if (part := slab.entries[index].part) is not None}


@dataclass(frozen=True)
class OptimizerStates:
    """What this rank writes of one optimizer's states."""

    held: list[Held]
    plain: dict[str, dict[str, Any]]  # by parameter and state: what is no tensor
    others: dict[Any, Any]  # what is kept under no parameter


def optimizer_states(engine: Engine, index: int, optimizer: torch.optim.Optimizer) -> OptimizerStates:
    names, parts, found = names_of(engine), parts_of(engine), OptimizerStates([], {}, {})
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            found.others[parameter] = state
            continue
        name, part = names.get(id(parameter)), parts.get(id(parameter))
        if name is None or not counts(part):
            continue  # empty parameters, which no unit has, and those that another rank writes
        rest = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                where = f"optimizer.{index}/{quote(key, safe='')}/{name}"
                found.held.append(_share_of_state(engine, where, parameter, value, part))
            else:
                rest[key] = map_tensors(_at_its_owner, value)
        if rest and _speaks_for(engine, parameter, part):
            found.plain[name] = rest
    return found


def _at_its_owner(tensor: Tensor) -> Tensor:
    """What is whole here is an ordinary tensor; in lists and the like there is no place for pieces."""
    return tensor.local if isinstance(tensor, ShardedTensor) and tensor.spec.is_owned_here else tensor


def _speaks_for(engine: Engine, parameter: Tensor, part: Part | None) -> bool:
    """Whether this rank's word counts for what is the same on all ranks, or at the owner alone."""
    if part is not None and not part.leads:
        return False
    if isinstance(parameter, ShardedParameter) and engine.row.has_owners:
        return parameter.spec.is_owned_here
    return engine.groups.everyone.rank == 0


def _share_of_state(engine: Engine, where: str, parameter: Tensor, value: Tensor, part: Part | None) -> Held:
    if isinstance(value, ShardedTensor):
        start = 0 if value.spec.is_replicated else value.spec.own[0]
        return replica_of(engine).share(Held(where, tuple(value.shape), start, value.local.detach().reshape(-1), part))
    flat = value.detach().reshape(-1)
    is_alike = part is not None and tuple(value.shape) == tuple(parameter.shape)
    whole = Held(where, tuple(value.shape), 0, flat, part if is_alike else None)
    everyone = engine.groups.everyone
    if part is not None and part.is_cut and not is_alike:
        check_state_of_part(where, value.shape, part)
        return whole if _speaks_for(engine, parameter, part) else _nothing_of(whole)
    if (isinstance(parameter, ShardedParameter) and engine.row.has_owners) or flat.numel() < everyone.size:
        return whole if _speaks_for(engine, parameter, part if not is_alike else None) else _nothing_of(whole)
    return Replica(everyone.rank, everyone.size).share(whole)


def _nothing_of(held: Held) -> Held:
    return replace(held, flat=held.flat[:0])


def check_state_of_part(where: str, shape: Sequence[int], part: Part) -> None:
    """Raises for what is neither cut like the parameter nor the same for all of it: sums over rows, for instance."""
    if math.prod(shape) > 1:
        raise ValueError(
            f"'{where}' has shape {tuple(shape)}, and its parameter, of shape {tuple(part.shape)}, is cut along "
            f"dimension {part.dim}: how such a state is cut is not known, so only one rank can load or save it; use an "
            "optimizer whose states have the parameter's shape"
        )


def groups_of(engine: Engine, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters, with names in place of parameters."""
    names = names_of(engine)
    found = [
        {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
        for group in optimizer.param_groups
    ]
    if engine.groups.model is None:
        return found
    # Every rank has its own groups, which are compared: a learning rate in a tensor is the number in it.
    return [{key: _number(value) for key, value in group.items()} for group in found]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def emas(engine: Engine) -> list[EMA]:
    return [average for average in engine.averages if isinstance(average, EMA)]


def averages(engine: Engine) -> Iterator[Held]:
    replica = replica_of(engine)
    for index, average in enumerate(emas(engine)):
        for slab, shard in average.shards().items():
            for held in own_pieces(slab, shard, f"average.{index}/"):
                if counts(held.part):
                    yield replica.share(held)


def base_fingerprints(engine: Engine) -> dict[str, str]:
    """Of what is frozen, whole: the same however it is cut. All ranks must call it."""
    names, prints = [], []
    is_counted = replica_of(engine).index == 0
    for slab in engine.slabs():
        if not slab.requires_grad:
            for held in own_pieces(slab, slab.shard):
                names.append(f"{held.key} {str(held.flat.dtype).removeprefix('torch.')}")
                prints.append(_print_of(held) if is_counted and counts(held.part) else _print_of(_nothing_of(held)))
    sums = torch.stack([each.cpu() for each in prints]) if prints else torch.zeros(0, dtype=torch.int64)
    engine.groups.control.all_reduce(sums, unit="fingerprints").wait()
    own = dict(zip(names, sums.tolist(), strict=True))
    told = [own] if engine.groups.model is None else engine.groups.model.all_gather_objects(own, unit="fingerprints")
    totals: Counter[str] = Counter()
    for each in told:
        totals.update(each)
    return {name: f"{total % 2**64:016x}" for name, total in totals.items()}


def _print_of(held: Held) -> Tensor:
    """Each element counts with its place in the whole parameter."""
    if held.part is None or not held.part.is_cut:
        return fingerprint_tensor(held.flat, held.start)
    prints = [fingerprint_tensor(held.flat[:0])]
    for low, high, place in runs_in_whole(held.part, held.start, held.stop):
        prints.append(fingerprint_tensor(held.flat[low - held.start : high - held.start], place))
    return torch.stack(prints).sum()


def states_of(objects: Sequence[Any], what: str) -> list[Any]:
    for each in objects:
        if not callable(getattr(each, "state_dict", None)):
            raise TypeError(f"{what}: {type(each).__name__} has no state_dict(), so its state cannot be saved")
    return [each.state_dict() for each in objects]
