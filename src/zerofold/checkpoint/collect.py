"""What goes into a checkpoint on this rank: what its file will hold, and what the manifest says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerofold.checkpoint import states
from zerofold.checkpoint.assemble import PartWritten, PieceWritten
from zerofold.checkpoint.files import NAMES, FileLayout, lay_out
from zerofold.checkpoint.generators import random_states
from zerofold.checkpoint.plain import encode
from zerofold.engine import Engine

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


@dataclass(frozen=True)
class Collected:
    layout: FileLayout
    pieces: list[PieceWritten]
    values: list[dict[str, Any]]  # plain states of each optimizer, by parameter
    groups: list[list[dict[str, Any]]]  # of each optimizer: a stage of a pipeline has those of its own parameters
    aliases: dict[str, str]
    copies: list[str]  # parameters that another rank writes
    own: Any  # what this rank alone has
    plain: dict[str, Any]  # the same on all ranks


def collect(
    engine: Engine,
    optimizers: list[torch.optim.Optimizer],
    extra: Mapping[str, Any] | None,
    schedulers: list[Any],
    data: Any,
    trainable_only: bool,
    buffers: list[dict[str, tuple[int, ...]]],
) -> Collected:
    held = [*states.parameters(engine, trainable_only=trainable_only), *states.buffers(engine, buffers)]
    held += states.averages(engine)
    values, groups, described = [], [], []
    tensors: dict[str, Tensor] = {}  # the same on all ranks: rank 0 writes them
    own: dict[str, Tensor] = {}  # this rank's word
    for index, optimizer in enumerate(optimizers):
        found = states.optimizer_states(engine, index, optimizer)
        held += found.held
        where = f"optimizer.{index}"
        # Each parameter by itself: ranks speak for different ones, and rank 0 puts them together.
        values.append({name: encode(rest, f"{where}.values[{name!r}]", own) for name, rest in found.plain.items()})
        groups.append(encode(states.groups_of(engine, optimizer), f"{where}.groups", tensors))
        others = encode(found.others, f"{where}.others", tensors)
        described.append({"kind": type(optimizer).__name__, "groups": groups[-1], "values": {}, "others": others})
    rank = engine.groups.job.rank
    position = states.states_of([data], "data")[0] if data is not None else None
    by_rank = encode({"rng": random_states(engine.groups.gather.device), "data": position}, f"rank.{rank}", own)
    same = {
        "extra": encode(None if extra is None else dict(extra), "extra", tensors),
        "schedulers": encode(states.states_of([*engine.schedulers, *schedulers], "scheduler"), "schedulers", tensors),
        "scaler": encode(engine.scaler.state_dict(), "scaler", tensors),
        "averages": [{"decay": average.decay, "updates": average.updates} for average in states.emas(engine)],
        "aliases": {},
        "optimizers": described,
    }
    kept = {**own, **tensors} if rank == 0 else own
    held += [states.Held(key, tuple(t.shape), 0, t.contiguous().reshape(-1)) for key, t in kept.items()]
    layout = lay_out((_name(each), each.flat, _shown_shape(each)) for each in held)
    offsets = {part.name: part.offset for part in layout.parts}
    pieces = [
        PieceWritten(
            each.key,
            NAMES[each.flat.dtype],
            each.shape,
            each.start,
            each.stop,
            offsets.get(_name(each), 0),
            _written_part(each),
        )
        for each in held
        if each.flat.numel() or 0 in each.shape
    ]
    copies = states.copies(engine, trainable_only=trainable_only)
    return Collected(layout, pieces, values, groups, states.aliases(engine), copies, by_rank, same)


def _name(held: states.Held) -> str:
    """A name of the model may hold any character, so what tells pieces from wholes stands before it."""
    if _written_part(held) is not None:
        return f"part/{held.start}-{held.stop}/{held.key}"
    return held.key if _shown_shape(held) == held.shape else f"piece/{held.start}-{held.stop}/{held.key}"


def _written_part(held: states.Held) -> PartWritten | None:
    part = held.part
    return PartWritten(tuple(part.shape), part.boxes()) if part is not None and part.is_cut else None


def _shown_shape(held: states.Held) -> tuple[int, ...]:
    """A whole tensor is one for every reader of the file."""
    is_whole = held.start == 0 and held.flat.numel() == torch.Size(held.shape).numel()
    return held.shape if is_whole else (held.flat.numel(),)


def optimizers_of(engine: Engine, given: Optimizers) -> list[torch.optim.Optimizer]:
    names, found = states.names_of(engine), listed(given)
    for optimizer in found:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer, several, or None, not {optimizer!r}")
        held = [p for group in optimizer.param_groups for p in group["params"] if p.numel()]
        if any(id(p) not in names for p in held):
            raise ValueError(
                f"this {type(optimizer).__name__} holds parameters that the model does not have: save an optimizer "
                "with the model that it trains"
            )
    return found


def listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]
