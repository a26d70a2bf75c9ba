"""What `zf.shard` is going to do, found out and checked before anything changes."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerofold.agree import agree
from zerofold.checkpoint.contents import Contents
from zerofold.checkpoint.open import open_checkpoint
from zerofold.checkpoint.sources import choose_sources, load_buffers
from zerofold.checks import device_of
from zerofold.comm import Comm
from zerofold.dealing import Cost, choose_dtypes, choose_owners, live_bound
from zerofold.engine import Engine
from zerofold.entry import Entry
from zerofold.groups import ranks_along
from zerofold.materialise import Init, Materialiser, on_meta
from zerofold.offload.wishes import Offload, check_row
from zerofold.offloading import Offloading, make_offloading
from zerofold.placement import AXES, Row, row
from zerofold.precision import Precision
from zerofold.units import UnitChoice, assign, find_units

Load = str | os.PathLike[str] | Contents
"""Where weights come from: a checkpoint by its path, or one that is open already."""


@dataclass(frozen=True)
class Sharding:
    row: Row
    device: torch.device
    modules: dict[str, nn.Module]
    assigned: dict[str, list[Entry]]


def choose_sharding(
    model: nn.Module,
    stage: int | str,
    cut: str | None,
    units: UnitChoice,
    mesh: DeviceMesh | None,
    cost: Cost | None,
    live_bytes: int | None,
    device: torch.device | str | None,
    precision: Precision,
) -> Sharding:
    chosen = row(stage, cut)
    if chosen.has_groups and (mesh is None or mesh.ndim != 2):
        raise ValueError(
            f"stage={chosen.name!r} needs groups of ranks: pass a mesh of two dimensions, for example "
            "mesh=init_device_mesh('cuda', (nodes, gpus_per_node), mesh_dim_names=('across', 'inside'))"
        )
    if Engine.is_broken(model):
        raise ValueError("an earlier attempt to shard this model failed half way, so it cannot be used: build it again")
    if Engine.is_on(model):
        raise ValueError("this model is already sharded; call zf.close(model) first to shard it another way")
    if any(Engine.of_parameter(parameter) is not None for parameter in model.parameters()):
        raise ValueError(
            f"this {type(model).__name__} holds parameters of a model that is sharded already: a parameter belongs to "
            "one sharded model, so shard the module that holds both, or call zf.close on the other first"
        )
    found = device_of(model, mesh, device)
    modules = find_units(model, units)
    assigned = assign(model, modules)
    world = len(ranks_along(mesh, chosen.optimizer.axes or AXES))
    choose_owners(assigned, chosen, world, cost)
    precision.check_rules(model)
    choose_dtypes(model, assigned, precision)
    live_bound(assigned, chosen, world, live_bytes)
    return Sharding(chosen, found, modules, assigned)


def materialiser_of(model: nn.Module, plan: Sharding, init: Init | None) -> Materialiser | None:
    """None where there are values already, or never will be: a model on the meta device that stays there has sizes."""
    has_values = not on_meta(model) or plan.device.type == "meta"
    return None if has_values else Materialiser(model, plan.modules, plan.device, init)


def find_values(
    model: nn.Module, plan: Sharding, load: Load, elsewhere: frozenset[str], *, has_init: bool, warns: bool
) -> None:
    contents = load if isinstance(load, Contents) else open_checkpoint(load)
    choose_sources(model, plan.assigned, contents, has_init=has_init, warns=warns, elsewhere=elsewhere)
    load_buffers(model, contents, plan.device)


def offloading_of(
    plan: Sharding,
    wish: Offload,
    policy: Precision,
    control: Comm,
    mesh: DeviceMesh | None,
    live_bytes: int | None,
    accumulate: int,
) -> Offloading:
    entries = [entry for unit in plan.assigned.values() for entry in unit]
    trains = any(entry.parameter.requires_grad for entry in entries)
    agree(control, lambda: check_row(wish, plan.row, trains=trains))
    world = len(ranks_along(mesh, plan.row.optimizer.axes or AXES))
    copies = 0 if plan.row.copy is None else len(ranks_along(mesh, plan.row.copy.axes))
    gathered = live_bound(plan.assigned, plan.row, world, live_bytes)
    adds_up = accumulate > 1 or wish.sums
    return make_offloading(
        wish,
        plan.assigned,
        plan.row,
        plan.device,
        policy,
        control,
        world=world,
        copies=copies if copies < world else 0,  # one over all ranks would be a second shard
        adds_up=adds_up,
        live_bytes=gathered,
    )
