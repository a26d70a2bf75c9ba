"""What this rank writes of each state: a flat range of every tensor it holds, its own and nobody else's.

A tensor of which several ranks hold the same range (nothing is cut, or groups repeat each other) is written by all of
them together, each a part of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import numpy
import torch
from torch import Tensor

from zerofold.checkpoint.contents import clean
from zerofold.engine import Engine
from zerofold.fingerprints import fingerprint_tensor
from zerofold.nested import map_tensors
from zerofold.optim.ema import EMA
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

    @property
    def stop(self) -> int:
        return self.start + self.flat.numel()


@dataclass(frozen=True)
class Replica:
    """This rank among those that hold the same."""

    index: int
    count: int

    def share(self, held: Held) -> Held:
        """The part that this one writes."""
        low = held.flat.numel() * self.index // self.count
        high = held.flat.numel() * (self.index + 1) // self.count
        return Held(held.key, held.shape, held.start + low, held.flat[low:high])


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
            for name, shape, start, flat in own_pieces(slab, slab.shard):
                yield replica.share(Held(f"model/{name}", shape, start, flat))


def own_pieces(slab: Slab, shard: Tensor) -> Iterator[tuple[str, tuple[int, ...], int, Tensor]]:
    """Name, shape, start and flat values of what `shard`, cut as the slab's own, holds of each parameter."""
    for entry, piece in zip(slab.entries, slab.layout.pieces(slab.place), strict=True):
        flat = shard.detach()[piece.shard_start : piece.shard_stop]
        yield clean(entry.name), tuple(entry.parameter.shape), piece.start, flat


def buffers(engine: Engine) -> Iterator[Held]:
    """Rank 0's, which the others follow. Copies: unlike all else, they change in forward."""
    if engine.groups.everyone.rank == 0:
        for (name, *_), buffer in buffers_by_names(engine):
            yield Held(f"model/{name}", tuple(buffer.shape), 0, buffer.detach().clone().reshape(-1))


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
                if name != clean(entry.name):
                    found[name] = clean(entry.name)
    for (first, *others), _ in buffers_by_names(engine):
        found |= dict.fromkeys(others, first)
    return found


def names_of(engine: Engine) -> dict[int, str]:
    """By the id of what an optimizer holds for a parameter."""
    return {key: clean(name) for key, (name, _) in engine.faces().items()}


@dataclass(frozen=True)
class OptimizerStates:
    """What this rank writes of one optimizer's states."""

    held: list[Held]
    plain: dict[str, dict[str, Any]]  # by parameter and state: what is no tensor
    others: dict[Any, Any]  # what is kept under no parameter


def optimizer_states(engine: Engine, index: int, optimizer: torch.optim.Optimizer) -> OptimizerStates:
    names, found = names_of(engine), OptimizerStates([], {}, {})
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, Tensor):
            found.others[parameter] = state
            continue
        name = names.get(id(parameter))
        if name is None:
            continue  # empty parameters, which no unit has
        rest = {}
        for key, value in state.items():
            if isinstance(value, Tensor):
                where = f"optimizer.{index}/{quote(key, safe='')}/{name}"
                found.held.append(_share_of_state(engine, where, parameter, value))
            else:
                rest[key] = map_tensors(_at_its_owner, value)
        if rest and _speaks_for(engine, parameter):
            found.plain[name] = rest
    return found


def _at_its_owner(tensor: Tensor) -> Tensor:
    """What is whole here is an ordinary tensor; in lists and the like there is no place for pieces."""
    return tensor.local if isinstance(tensor, ShardedTensor) and tensor.spec.is_owned_here else tensor


def _speaks_for(engine: Engine, parameter: Tensor) -> bool:
    """Whether this rank's word counts for what is the same on all ranks, or at the owner alone."""
    if isinstance(parameter, ShardedParameter) and engine.row.has_owners:
        return parameter.spec.is_owned_here
    return engine.groups.everyone.rank == 0


def _share_of_state(engine: Engine, where: str, parameter: Tensor, value: Tensor) -> Held:
    if isinstance(value, ShardedTensor):
        start = 0 if value.spec.is_replicated else value.spec.own[0]
        return replica_of(engine).share(Held(where, tuple(value.shape), start, value.local.detach().reshape(-1)))
    flat = value.detach().reshape(-1)
    whole = Held(where, tuple(value.shape), 0, flat)
    everyone = engine.groups.everyone
    if (isinstance(parameter, ShardedParameter) and engine.row.has_owners) or flat.numel() < everyone.size:
        return whole if _speaks_for(engine, parameter) else _nothing_of(whole)
    return Replica(everyone.rank, everyone.size).share(whole)


def _nothing_of(held: Held) -> Held:
    return Held(held.key, held.shape, 0, held.flat[:0])


def groups_of(engine: Engine, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Hyperparameters, with names in place of parameters."""
    names = names_of(engine)
    return [
        {**group, "params": [names[id(p)] for p in group["params"] if id(p) in names]}
        for group in optimizer.param_groups
    ]


def emas(engine: Engine) -> list[EMA]:
    return [average for average in engine.averages if isinstance(average, EMA)]


def averages(engine: Engine) -> Iterator[Held]:
    replica = replica_of(engine)
    for index, average in enumerate(emas(engine)):
        for slab, shard in average.shards().items():
            for name, shape, start, flat in own_pieces(slab, shard):
                yield replica.share(Held(f"average.{index}/{name}", shape, start, flat))


def random_states(device: torch.device) -> dict[str, Any]:
    """Of every generator that training may draw from, on this rank."""
    python, numbers = random.getstate(), numpy.random.get_state(legacy=True)
    assert isinstance(numbers, tuple)
    found: dict[str, Any] = {
        "python": (python[0], torch.tensor(python[1]), python[2]),
        "numpy": (numbers[0], torch.from_numpy(numbers[1].astype(numpy.int64)), *numbers[2:]),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def set_random_states(found: Mapping[str, Any], device: torch.device) -> None:
    version, numbers, gauss = found["python"]
    random.setstate((version, tuple(numbers.tolist()), gauss))
    kind, keys, *rest = found["numpy"]
    numpy.random.set_state((kind, keys.numpy().astype(numpy.uint32), *rest))
    torch.set_rng_state(found["torch"])
    if device.type != "cpu" and "device" in found:
        torch.get_device_module(device).set_rng_state(found["device"], device)


def base_fingerprints(engine: Engine) -> dict[str, str]:
    """Of what is frozen, whole: the same however it is cut. All ranks must call it."""
    names, prints = [], []
    is_counted = replica_of(engine).index == 0
    for slab in engine.slabs():
        if not slab.requires_grad:
            for name, _, start, flat in own_pieces(slab, slab.shard):
                names.append(f"{name} {str(flat.dtype).removeprefix('torch.')}")
                prints.append(fingerprint_tensor(flat[: None if is_counted else 0], start))
    sums = torch.stack([each.cpu() for each in prints]) if prints else torch.zeros(0, dtype=torch.int64)
    engine.groups.control.all_reduce(sums, unit="fingerprints").wait()
    return {name: f"{total % 2**64:016x}" for name, total in zip(names, sums.tolist(), strict=True)}


def states_of(objects: Sequence[Any], what: str) -> list[Any]:
    for each in objects:
        if not callable(getattr(each, "state_dict", None)):
            raise TypeError(f"{what}: {type(each).__name__} has no state_dict(), so its state cannot be saved")
    return [each.state_dict() for each in objects]
