"""zf.shard, zf.attach, zf.prepare: the pieces put together, and every check that can be made before training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerofold.comm import Comm
from zerofold.engine import Engine, Groups, check_same_on_all_ranks, fingerprint, live_bound, make_control
from zerofold.optim.attach import attach_optimizer, check_optimizers
from zerofold.placement import Row, row
from zerofold.unit import Entry
from zerofold.units import UnitChoice, assign, find_units

T = TypeVar("T")
Model = TypeVar("Model", bound=nn.Module)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer)

DEFAULT_BUFFER_BYTES = 16 * 2**20


def prepare(
    model: Model,
    optimizer: Opt,
    *,
    stage: int | str = 3,
    units: UnitChoice = None,
    cut: str = "even",
    clip: float | None = None,
    mesh: DeviceMesh | None = None,
    live_bytes: int | None = None,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    accumulate: int = 1,
    overlap: bool = True,
) -> tuple[Model, Opt]:
    """Shards `model` and re-bases `optimizer` on it, both in place; returns the same two objects.

    Arguments: see `shard` for all but `clip`, the largest gradient norm, applied in every `optimizer.step()`.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(64, 64)
    >>> model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=2, clip=1.0)
    >>> model(torch.ones(2, 64)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    >>> zf.close(model)
    """
    shard(
        model,
        stage=stage,
        units=units,
        cut=cut,
        mesh=mesh,
        live_bytes=live_bytes,
        buffer_bytes=buffer_bytes,
        accumulate=accumulate,
        overlap=overlap,
    )
    try:
        attach(model, optimizer, clip=clip)
    except Exception:
        close(model)
        raise
    return model, optimizer


def shard(
    model: Model,
    *,
    stage: int | str = 3,
    units: UnitChoice = None,
    cut: str = "even",
    mesh: DeviceMesh | None = None,
    live_bytes: int | None = None,
    buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    accumulate: int = 1,
    overlap: bool = True,
) -> Model:
    """Places the model's states over the ranks as the stage says, in place; every rank starts from rank 0's weights.

    stage         0 (DDP), 1, 2 or 3
    units         modules gathered as one: a class or classes, a predicate (name, module), a least number of
                  parameters, or None to find repeated blocks
    mesh          a one-dimensional DeviceMesh to shard over; all ranks by default
    live_bytes    bound on gathered parameter bytes at any time (stage 3); by default a unit and one ahead
    buffer_bytes  size of one fused communication buffer
    accumulate    backwards that make a step: where gradients stay whole (stages 0 and 1), only the last one reduces
    overlap       False runs every communication to its end at once: slower, the same bits, for debugging

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # works on the pieces, as with FSDP2
    >>> zf.close(model)
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group yet: start the script with torchrun (or zerofold launch) and call "
            "torch.distributed.init_process_group() before zerofold"
        )
    if mesh is not None and mesh.ndim != 1:
        raise ValueError(f"mesh has {mesh.ndim} dimensions; pass the one to shard over, for example mesh['data']")
    control = make_control(mesh, overlap=overlap)
    try:
        plan = _agree(
            control, lambda: _plan(model, stage, units, cut, live_bytes, buffer_bytes, accumulate, control.size)
        )
        numbers = f"live_bytes={live_bytes}, buffer_bytes={buffer_bytes}, accumulate={accumulate}"
        settings = f"stage={plan.row.name}, overlap={overlap}, {numbers}"
        check_same_on_all_ranks(control, fingerprint(plan.assigned, settings))
    except Exception:
        dist.destroy_process_group(control.group)
        raise
    groups = Groups.make(mesh, control, plan.device)
    Engine(
        model,
        plan.row,
        plan.assigned,
        plan.modules,
        groups,
        live_bytes=live_bytes,
        buffer_bytes=buffer_bytes,
        accumulate=accumulate,
        overlap=overlap,
    )
    for name, buffer in model.named_buffers():
        if buffer.numel() and not buffer.is_meta:
            from_rank_zero = buffer.contiguous()
            groups.gather.broadcast(from_rank_zero, 0, unit=name).wait()
            buffer.copy_(from_rank_zero)
    return model


def attach(model: nn.Module, optimizer: Opt, *others: torch.optim.Optimizer, clip: float | None = None) -> Opt:
    """Re-bases an optimizer built on the model's parameters onto this rank's pieces, in place.

    Parameter groups, schedulers and existing state are kept; the same object comes back. Several optimizers that
    share the parameters among them are attached in one call.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> zf.attach(zf.shard(model, stage=1), optimizer) is optimizer
    True
    >>> zf.close(model)
    """
    engine = Engine.of(model)
    everyone: list[torch.optim.Optimizer] = [optimizer, *others]
    _agree(engine.groups.control, lambda: check_optimizers(engine, everyone, clip))
    for each in everyone:
        attach_optimizer(engine, each, clip)
    return optimizer


def close(model: nn.Module) -> None:
    """Ends sharding: the model is an ordinary module again, with its whole parameters on every rank.

    All ranks must call it. The optimizer that was attached has no use afterwards.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=3)
    >>> zf.close(model)
    >>> type(model.weight).__name__
    'Parameter'
    """
    Engine.of(model).remove()


@dataclass(frozen=True)
class _Plan:
    row: Row
    device: torch.device
    modules: dict[str, nn.Module]
    assigned: dict[str, list[Entry]]


def _plan(
    model: nn.Module,
    stage: int | str,
    units: UnitChoice,
    cut: str,
    live_bytes: int | None,
    buffer_bytes: int,
    accumulate: int,
    world: int,
) -> _Plan:
    chosen = row(stage)
    if cut != "even":
        raise ValueError(f"cut={cut!r} is not available in this version; use cut='even'")
    if live_bytes is not None and live_bytes <= 0:
        raise ValueError(f"live_bytes={live_bytes} must be a positive number of bytes, or None for the default")
    if buffer_bytes < 1024:
        raise ValueError(f"buffer_bytes={buffer_bytes} is too small for a communication buffer; give at least 1024")
    if accumulate < 1:
        raise ValueError(f"accumulate={accumulate} must be the number of backwards in a step, at least 1")
    if Engine.is_on(model):
        raise ValueError("this model is already sharded; call zf.close(model) first to shard it another way")
    device = _device_of(model)
    modules = find_units(model, units)
    assigned = assign(model, modules)
    live_bound(assigned, world, live_bytes)
    return _Plan(chosen, device, modules, assigned)


def _agree(control: Comm, make: Callable[[], T]) -> T:
    """The result of `make`, or an error on every rank when it fails on any."""
    try:
        made = make()
    except Exception as error:
        control.raise_together(error)
        raise
    control.raise_together(None)
    return made


def _device_of(model: nn.Module) -> torch.device:
    devices = {p.device for p in model.parameters() if p.numel()}
    if not devices:
        raise ValueError(f"this {type(model).__name__} has no parameters, so there is nothing to shard")
    if len(devices) > 1:
        found = ", ".join(sorted(str(device) for device in devices))
        raise ValueError(f"the model's parameters are on {found}; move it to one device first")
    device = devices.pop()
    if device.type == "meta":
        raise ValueError("the model is on the meta device and has no values; materialise it with model.to_empty first")
    return device
