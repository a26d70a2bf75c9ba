"""What loading a checkpoint would do: which range of which tensor goes where on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from zerofold.checkpoint import states
from zerofold.checkpoint.boxes import own_part
from zerofold.checkpoint.contents import CheckpointError, Contents, Stored, clean, numel
from zerofold.checkpoint.sources import check_fits, names_in_files, prefix_of
from zerofold.engine import Engine
from zerofold.entry import Entry
from zerofold.units import names_of_modules, names_of_sites

_AT_ONCE = 2**24  # elements


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


def known_names(engine: Engine) -> set[str]:
    """Every name that a tensor of this rank's model may be stored under."""
    paths, prefix = names_of_modules(engine.model), prefix_of(engine.model)
    known = {name for slab in engine.slabs() for entry in slab.entries for name in names_of(entry, paths, prefix)}
    buffers = [name for own, _ in states.buffers_by_names(engine) for name in own]
    return known.union(buffers, *(names_in_files(name, prefix) for name in buffers))


def plan_tensors(
    engine: Engine, contents: Contents, plan: Plan, *, base: dict[str, str], elsewhere: frozenset[str], strict: bool
) -> None:
    """Parameters, buffers and averages. `elsewhere` are the names of what other ranks hold of the same model."""
    used: set[str] = set(elsewhere)
    missing, narrowed = [], []
    paths, prefix = names_of_modules(engine.model), prefix_of(engine.model)
    for slab in engine.slabs():
        for entry, piece in zip(slab.entries, slab.layout.pieces(slab.place), strict=True):
            names = names_of(entry, paths, prefix)
            used.update(names)  # all of them: some formats store tied parameters once for each name
            stored = contents.tensor(*names)
            if stored is None:
                missing.append(states.name_of(entry))
                continue
            check_fits(entry.name, entry.parameter, stored, contents.where)
            if stored.dtype.itemsize > slab.shard.dtype.itemsize and stored.dtype.is_floating_point:
                narrowed.append(f"'{entry.name}' from {stored.dtype} to {slab.shard.dtype}")
            own = own_part(stored, entry.part)
            plan.fill(slab.shard.detach()[piece.shard_start : piece.shard_stop], own, piece.start)
    for own_names, buffer in states.buffers_by_names(engine):
        names = [*own_names, *(name for each in own_names for name in names_in_files(each, prefix))]
        used.update(names)
        stored = contents.tensor(*names)
        if stored is None:
            missing.append(own_names[0])
            continue
        check_fits(own_names[0], buffer, stored, contents.where)
        # The buffer of a module may be a view with gaps, so it is filled by itself.
        plan.restores.append(_buffer_filler(buffer, stored))
        plan.checked.append((stored, 0, numel(stored)))
    saved, here = ({key.rpartition(" ")[0]: key for key in each} for each in (contents.base or {}, base))
    left_out = [name for name in missing if name in saved and name in here]
    for name in left_out:
        _check_base(name, contents, saved[name], here[name], base, plan)
    missing = [name for name in missing if name not in left_out]
    unused = [name for name in contents.tensors if name not in used]
    report(plan, contents, missing, unused, strict=strict)
    if narrowed:
        plan.warnings.append(f"{contents.where}: rounded on load, {narrowed[0]} ({len(narrowed)} such parameter(s))")
    _plan_averages(engine, contents, plan)


def names_of(entry: Entry, paths: dict[torch.nn.Module, list[str]], prefix: str) -> list[str]:
    """All names that a parameter may be stored under, the one it is known by first."""
    own = [states.name_of(entry), clean(entry.name), *map(clean, names_of_sites(entry, paths))]
    others = [name for each in own for name in names_in_files(each, prefix)]
    return [*own, *(name for name in others if name not in own)]


def _copier(target: Tensor, source: Tensor) -> Callable[[], None]:
    def copy() -> None:
        target.copy_(source)

    return copy


def _buffer_filler(buffer: Tensor, stored: Stored) -> Callable[[], None]:
    def fill() -> None:
        with torch.no_grad():
            buffer.copy_(stored.read(0, buffer.numel()).view(buffer.shape))

    return fill


def _check_base(name: str, contents: Contents, saved: str, here: str, base: dict[str, str], plan: Plan) -> None:
    """A parameter that was left out on purpose must be what it was."""
    if saved != here:
        kinds = saved.rpartition(" ")[2], here.rpartition(" ")[2]
        plan.warnings.append(
            f"{contents.where} was trained on '{name}' in {kinds[0]}, which is {kinds[1]} here, so whether it is the "
            "same base cannot be told"
        )
    elif (contents.base or {})[saved] != base[here]:
        raise CheckpointError(
            f"{contents.where} holds what was trained on another base: '{name}' has other values than when it was "
            "saved. Load the base that it was trained on first"
        )


def report(plan: Plan, contents: Contents, missing: list[str], unused: list[str], *, strict: bool) -> None:
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
        fresh = []
        for slab, shard in average.shards().items():
            weights = [held.flat for held in states.own_pieces(slab, slab.shard)]
            for held, now in zip(states.own_pieces(slab, shard), weights, strict=True):
                stored = saved["tensors"].get(contents.aliases.get(held.key, held.key))
                if stored is None or tuple(stored.shape) != held.whole_shape:
                    fresh.append(held.key)  # trained since then
                    plan.restores.append(_copier(held.flat, now))
                else:
                    plan.fill(held.flat, own_part(stored, held.part), held.start)
        if fresh:
            plan.warnings.append(
                f"{contents.where} has no average of '{fresh[0]}' ({len(fresh)} such parameter(s)): it starts from the "
                "weights"
            )
        plan.restores.append(partial(setattr, average, "updates", saved["updates"]))
