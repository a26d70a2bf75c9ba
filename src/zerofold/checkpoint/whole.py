"""Whole tensors of a sharded model one after another, gathered when they are read and never all at once."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerofold.agree import agree
from zerofold.checkpoint.contents import Stored, clean, numel
from zerofold.checkpoint.live_parts import join_parts
from zerofold.engine import Engine
from zerofold.part import Part, part_of
from zerofold.sharded import ShardedTensor
from zerofold.slab import Slab
from zerofold.unit import Unit

_NAMED = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
}


def full_tensors(
    model: nn.Module, *, dtype: torch.dtype | str | None = None, trainable_only: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Names and whole tensors of a sharded model, one at a time, on every rank: for handing weights to another process.

    Parameters come first, each under one name (of tied ones, the name that Hugging Face keeps), then persistent
    buffers. At any time one tensor is whole: memory is bounded by the largest. All ranks must iterate, and take the
    same number of tensors: stopping early is fine if all ranks stop at the same one. A rank that stops alone leaves the
    others waiting, until the group's timeout names the tensor.

    dtype           of parameters, cast before they are gathered: half the bytes for "bf16". By default the master's
    trainable_only  leaves out frozen parameters and buffers

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 32), stage=3)
    >>> [(name, tuple(tensor.shape)) for name, tensor in zf.full_tensors(model, dtype="bf16")]
    [('weight', (32, 64)), ('bias', (32,))]
    >>> zf.close(model)
    """
    found = live_tensors(model, dtype=dtype_named(dtype), trainable_only=trainable_only)
    return ((name, stored.read(0, numel(stored)).view(stored.shape)) for name, stored in found.tensors.items())


def dtype_named(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype by its name or itself; None stays None."""
    found = _NAMED.get(dtype) if isinstance(dtype, str) else dtype
    if (dtype is not None and found is None) or (found is not None and not isinstance(found, torch.dtype)):
        raise ValueError(f"dtype={dtype!r} is not known: use one of {', '.join(_NAMED)}")
    if found is not None and not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is not a floating-point dtype, as parameters have")
    return found


class Live(NamedTuple):
    """A model's tensors by the names under which they are written."""

    tensors: dict[str, Stored]
    aliases: dict[str, str]  # further names of tied ones → the name above


def live_tensors(model: nn.Module, *, dtype: torch.dtype | None, trainable_only: bool = False) -> Live:
    """Readable like a checkpoint, but on the model's device. A read is a gather: all ranks must make the same ones."""
    engine = Engine.of(model)
    if engine.groups.model is None:
        return _own_tensors(engine, dtype, trainable_only=trainable_only)
    own = agree(engine.groups.job, lambda: _own_tensors(engine, dtype, trainable_only=trainable_only))
    parts, named, aliases = {}, {}, dict(own.aliases)
    for name, stored in own.tensors.items():
        part = stored.part if isinstance(stored, (LiveParameter, LiveTensor)) else None
        known = name if part is None or part.name is None else part.name
        named[known] = stored
        if part is not None:
            parts[known] = part
        if known != name:
            aliases = {**{other: known if kept == name else kept for other, kept in aliases.items()}, name: known}
    joined = join_parts(named, parts, engine.groups.model, engine.device)
    told = engine.groups.model.all_gather_objects(aliases, unit="names")
    return Live(joined, {name: kept for each in told for name, kept in each.items() if name not in joined})


def _own_tensors(engine: Engine, dtype: torch.dtype | None, *, trainable_only: bool) -> Live:
    """What this rank and its data axis have of the model: all of it, where no other axis splits it."""
    model = engine.model
    if engine.schedule.holders:
        raise RuntimeError("inside full_params the model's weights may be half changed: leave it before they are read")
    engine.take_in_changes()
    places: dict[int, tuple[Unit, Slab, int]] = {}
    for unit in engine.units:
        for slab in unit.slabs:
            for index, (entry, face) in enumerate(zip(slab.entries, slab.faces, strict=True)):
                places[id(entry.parameter)] = places[id(face)] = (unit, slab, index)
    names: dict[int, list[str]] = {}
    stored: dict[int, Stored] = {}
    buffers: dict[int, Stored] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is None or (trainable_only and not parameter.requires_grad):
                continue
            place = places.get(id(parameter))
            names.setdefault(id(parameter), []).append(clean(prefix + name))
            live = LiveTensor(parameter, dtype) if place is None else LiveParameter(engine, *place, dtype)
            stored.setdefault(id(parameter), live)
        for name, buffer in () if trainable_only else module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                names.setdefault(id(buffer), []).append(clean(prefix + name))
                buffers.setdefault(id(buffer), LiveTensor(buffer, None))
    found, tied = Live({}, {}), _tied_names(model)
    for key, each in (stored | buffers).items():
        kept = next((name for name in names[key] if not any(re.search(t, name) for t in tied)), names[key][0])
        found.tensors[kept] = each
        found.aliases.update({name: kept for name in names[key] if name != kept})
    return found


def _tied_names(model: nn.Module) -> list[str]:
    """Names, or patterns of them, that Hugging Face leaves out of files: it ties them again when it loads."""
    found: Any = getattr(model, "all_tied_weights_keys", None) or getattr(model, "_tied_weights_keys", None) or ()
    return list(found)


@dataclass(frozen=True)
class LiveTensor:
    """A tensor that every rank has whole: a buffer, or a parameter without elements."""

    tensor: Tensor
    cast: torch.dtype | None

    @property
    def part(self) -> Part | None:
        """Of a parameter of which nothing is left for the last ranks of a tensor axis."""
        return part_of(self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return _cast(self.tensor.dtype, self.cast)

    def read(self, start: int, stop: int) -> Tensor:
        return self.tensor.detach().reshape(-1)[start:stop].to(self.dtype, copy=True)


@dataclass(frozen=True)
class LiveParameter:
    """A parameter of a sharded model as its optimizer sees it: the master, where there is one."""

    engine: Engine
    unit: Unit
    slab: Slab
    index: int
    cast: torch.dtype | None

    @property
    def part(self) -> Part | None:
        return self.slab.entries[self.index].part

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.slab.parameters[self.index].shape)

    @property
    def dtype(self) -> torch.dtype:
        return _cast(self.slab.dtypes.master, self.cast)

    def read(self, start: int, stop: int) -> Tensor:
        """All ranks must call it, with the same range."""
        slab = self.slab
        if slab.has_own_shard:
            face = slab.faces[self.index]
            assert isinstance(face, ShardedTensor)
            return _gather(face, start, stop, self.dtype)
        if slab.is_kept:  # the storage is the master, once the last step's changes have come in
            self.engine.schedule.make_current(self.unit)
        return slab.view(self.index).detach().view(-1)[start:stop].to(self.dtype, copy=True)


def _gather(face: ShardedTensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """A range of the whole; each rank casts its part of it before it is sent."""
    spec, local = face.spec, face.local.reshape(-1)
    if spec.is_replicated:
        return local[start:stop].to(dtype, copy=True)
    out = torch.empty(stop - start, dtype=dtype, device=local.device)
    handles = []
    for rank, (low, high) in enumerate(spec.ranges):
        first, last = max(start, low), min(stop, high)
        if first >= last:
            continue
        part = out[first - start : last - start]
        if rank == spec.comm.rank:
            part.copy_(local[first - low : last - low])
        sent = part.view(torch.uint8) if dtype.itemsize == 1 else part  # not every backend knows 8-bit floats
        handles.append(spec.comm.broadcast(sent, rank, unit=spec.name))
    for handle in handles:
        handle.wait()
    return out


def _cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own
