"""Whole tensors of a sharded model: to read, to change, to inspect; and the small calls around a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerofold.arguments import check_flags, check_number
from zerofold.attachments import StepInfo
from zerofold.engine import Engine
from zerofold.observe.ledger import Ledger
from zerofold.optim.clip import Gradients, clip_grad_norm
from zerofold.sharded import ShardedTensor
from zerofold.slab import Slab


def full(tensor: Tensor) -> Tensor:
    """The whole of a parameter, gradient or optimizer state, as an ordinary tensor on every rank.

    All ranks must call it for a sharded tensor. Any other tensor comes back as a detached copy. A gradient's memory
    is used again by the next backward; what this returns is not. Of a 16-bit parameter it gives the fp32 master.
    Where tensor parallelism has cut a layer, the whole is what this rank's tensor index has of it.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 32), stage=3)
    >>> zf.full(model.weight).shape
    torch.Size([32, 64])
    >>> zf.close(model)
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"zf.full: a {type(tensor).__name__} was given; give one tensor, such as model.head.weight")
    held = getattr(tensor, "_master", tensor)
    return held.full_tensor() if isinstance(held, ShardedTensor) else tensor.detach().clone()


def full_grad(parameter: Tensor) -> Tensor | None:
    """The whole reduced gradient of a parameter on every rank, or None; all ranks must call it.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 32, bias=False), stage=3)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> zf.full_grad(model.weight).sum().item()
    2048.0
    >>> zf.close(model)
    """
    if not isinstance(parameter, Tensor):
        raise TypeError(
            f"zf.full_grad: a {type(parameter).__name__} was given; give one parameter, such as model.head.weight"
        )
    return None if parameter.grad is None else full(parameter.grad)


@contextmanager
def full_params(model: nn.Module, *, from_rank: int | None = None, masters: bool = True) -> Iterator[None]:
    """Inside, the module holds whole ordinary parameters, to read, to change in place, or to run many forwards.

    Changes are kept. Every rank must make the same ones; or one rank makes them and `from_rank` names it. All ranks
    must enter. With 16-bit precision these are the fp32 masters, and forwards compute in fp32; `masters=False` takes
    the 16-bit parameters instead, for many forwards in half the memory. Those cannot be changed. Where tensor
    parallelism has cut a layer, they are this rank's part of it, and so are changes.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 32), stage=3)
    >>> with zf.full_params(model), torch.no_grad():
    ...     _ = model.bias.fill_(1.0)
    >>> zf.full(model.bias).sum().item()
    32.0
    >>> zf.close(model)
    """
    engine = Engine.of(model)
    ranks = engine.groups.everyone.size
    check_flags(masters=masters)
    if from_rank is not None and (not isinstance(from_rank, int) or not 0 <= from_rank < ranks):
        raise ValueError(f"from_rank={from_rank!r} is no rank of this model; it has 0 to {ranks - 1}")
    if from_rank is not None and not masters:
        raise ValueError("full_params: from_rank= is for changes, which masters=False does not take")
    engine.settle("parameters", "buffers")
    engine.hold_all(masters=masters)
    versions = {id(p): p._version for slab in engine.slabs() for p in slab.parameters}
    try:
        yield
        engine.schedule.wait_all()  # for what an optimizer's step in here has set going
        if from_rank is not None:
            for slab in engine.slabs():
                engine.groups.everyone.broadcast(slab.values, from_rank, unit="full_params").wait()
        _write_back(engine, versions, checked=from_rank is None)
        for slab in engine.slabs() if from_rank is not None else ():
            slab.mark_changed()  # copies are made anew, whatever they were
    finally:
        engine.let_go()


def _write_back(engine: Engine, versions: dict[int, int], *, checked: bool) -> None:
    engine.settle("parameters")
    names: list[str] = []
    marks: list[float] = []
    for slab in engine.slabs():
        for index, entry in enumerate(slab.entries):
            names.append(entry.name)
            touched = entry.parameter._version != versions.get(id(entry.parameter))
            # A change through .data leaves no version behind but differs, unless it is the shard that moved on.
            marks.append(float(touched or (not slab.is_stale and _differs_from_shard(slab, index))))
    changed = torch.tensor(marks, dtype=torch.float64)
    engine.groups.control.all_reduce(changed, unit="full_params", op=dist.ReduceOp.MAX).wait()
    if checked and changed.any():
        whole = [slab.view(index) for slab in engine.slabs() for index in range(len(slab.entries))]
        _check_equal_on_all_ranks(engine, [(n, t) for n, t, c in zip(names, whole, changed, strict=True) if c])
    written = iter(changed.tolist())
    for slab in engine.slabs():
        is_written = [bool(next(written)) for _ in slab.entries]
        for index, piece in enumerate(slab.layout.pieces(slab.place)):
            if is_written[index] and slab.dtypes.has_master and not slab.shows_masters:
                slab.discard_changes()
                raise RuntimeError(
                    f"'{slab.entries[index].name}' was changed inside full_params(masters=False), which shows 16-bit "
                    "copies; change the masters inside `with zf.full_params(model)`"
                )
            if is_written[index] and slab.has_own_shard and piece.size:
                own = slab.view(index).view(-1)[piece.start : piece.stop]
                slab.shard[piece.shard_start : piece.shard_stop] = own
        if any(is_written) and slab.has_own_shard:
            slab.mark_changed()
            slab.note_versions()  # the change is in the shard now


def _differs_from_shard(slab: Slab, index: int) -> bool:
    piece = slab.layout.pieces(slab.place)[index]
    own = slab.view(index).view(-1)[piece.start : piece.stop]
    if not slab.has_own_shard:
        return False
    shard = slab.shard[piece.shard_start : piece.shard_stop]  # on another device where states are offloaded
    return not torch.equal(own, shard.to(own.device, own.dtype))


def _check_equal_on_all_ranks(engine: Engine, tensors: list[tuple[str, Tensor]]) -> None:
    """Compares sums of bit patterns, which any difference in a value changes but for a rare coincidence."""
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [t.detach().view(words[t.element_size()]).sum(dtype=torch.int64).cpu() for _, t in tensors]
    both = torch.stack([*sums, *(-each for each in sums)])
    engine.groups.control.all_reduce(both, unit="full_params", op=dist.ReduceOp.MAX).wait()
    largest, smallest = both.chunk(2)
    for (name, _), high, low in zip(tensors, largest.tolist(), smallest.tolist(), strict=True):
        if high != -low:
            raise ValueError(
                f"the ranks wrote different values into '{name}' inside full_params; make the same change on every "
                "rank, or pass from_rank=0 to take one rank's"
            )


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Inside, backward adds up gradients on this rank without communication; the next backward outside reduces all.

    Parameters that are cut are still gathered for use.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=2)
    >>> with zf.no_sync(model):
    ...     model(torch.ones(2, 64)).sum().backward()
    >>> model(torch.ones(2, 64)).sum().backward()
    >>> zf.close(model)
    """
    reductions = Engine.of(model).reductions
    before, reductions.suspended = reductions.suspended, True
    try:
        yield
    finally:
        reductions.suspended = before


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clips all gradients of the model by their total norm over all ranks; returns the norm before clipping.

    Equal to torch.nn.utils.clip_grad_norm_ on one process. All ranks must call it.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64, bias=False), stage=3)
    >>> model(torch.ones(1, 64)).sum().backward()
    >>> zf.clip_grad_norm_(model, 1.0).item()
    64.0
    >>> zf.close(model)
    """
    check_number("max_norm", max_norm, "give the largest norm, float('inf') to measure it alone", positive=False)
    check_number("norm_type", norm_type, "give 2.0, or float('inf') for the largest element")
    return clip_grad_norm(_with_all_gradients(model), max_norm, norm_type)


def clip_grad_value_(model: nn.Module, value: float) -> None:
    """Brings every element of every gradient of the model into [-value, value].

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64, bias=False), stage=3)
    >>> (100 * model(torch.ones(1, 64))).sum().backward()
    >>> zf.clip_grad_value_(model, 0.5); zf.full_grad(model.weight).max().item()
    0.5
    >>> zf.close(model)
    """
    check_number("value", value, "give the largest size that an element of a gradient may have")
    Gradients(_with_all_gradients(model)).clamp(value)


def _with_all_gradients(model: nn.Module) -> Engine:
    """The engine, when gradients that wait for a reduction have got it; all ranks must call it."""
    engine = Engine.of(model)
    engine.step.need("gradients")
    engine.end_step()
    engine.reductions.flush()
    return engine


def last_step(model: nn.Module) -> StepInfo | None:
    """How the last step of an attached optimizer went; None before the first. The same on all ranks.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(64, 64, bias=False)
    >>> model, optimizer = zf.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), stage=2)
    >>> model(torch.ones(1, 64)).sum().backward(); optimizer.step()
    >>> zf.last_step(model).norm, zf.last_step(model).skipped
    (64.0, False)
    >>> zf.close(model)
    """
    return Engine.of(model).last_step


def ledger(model: nn.Module) -> Ledger:
    """The books of a sharded model.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64, bias=False), stage=3)
    >>> zf.ledger(model).snapshot()["state_bytes"]["parameters"]
    16384
    >>> zf.close(model)
    """
    return Ledger(Engine.of(model))
