"""zf.shard, zf.attach, zf.prepare: the pieces put together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zerofold.agree import agree, check_same_on_all_ranks, fingerprint
from zerofold.arguments import check_flags
from zerofold.checkpoint.saving import finish_saving
from zerofold.checkpoint.sources import known_in_files, names_elsewhere
from zerofold.checks import (
    check_axes,
    check_kinds,
    check_numbers,
    check_ready,
    check_stages,
    check_wrappers,
)
from zerofold.closing import end
from zerofold.configured import Config, configured, scheduler_of, shard_arguments
from zerofold.dealing import Cost
from zerofold.engine import Engine
from zerofold.groups import Groups, destroy, make_control, make_job_group, make_model_group
from zerofold.materialise import Init
from zerofold.memory.buffers import default_buffer_bytes
from zerofold.observe.out_of_memory import HEADING, Needs, add_note, explain_out_of_memory
from zerofold.offload.wishes import OffloadChoice, read_offload
from zerofold.optim.attach import attach_optimizer
from zerofold.optim.checks import check_optimizers, check_same_over_the_model, told_of_steps
from zerofold.optim.cost import update_cost
from zerofold.optim.step import StepOptions
from zerofold.parallel.marks import HoldsStages, is_cut_into_stages, tensor_ranks
from zerofold.parallel.mesh import PIPELINE, TENSOR, Mesh
from zerofold.precision import Precision, policy_of
from zerofold.sharding import Load, choose_sharding, find_values, materialiser_of, offloading_of
from zerofold.state_dicts import StateDicts
from zerofold.units import UnitChoice

Model = TypeVar("Model", bound=nn.Module | HoldsStages)
Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


def prepare(
    model: Model,
    optimizer: Opt,
    *,
    config: Config | None = None,
    stage: int | str | None = None,
    units: UnitChoice = None,
    cut: str | None = None,
    precision: str | Precision | None = None,
    clip: float | None = None,
    clip_value: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    one_pass: bool | None = None,
    mesh: DeviceMesh | Mesh | None = None,
    cost: Cost | None = None,
    init: Init | None = None,
    load: Load | None = None,
    device: torch.device | str | None = None,
    live_bytes: int | None = None,
    buffer_bytes: int | None = None,
    accumulate: int | None = None,
    offload: OffloadChoice = None,
    overlap: bool = True,
    patience: float | None = None,
    check_replicas: int | None = None,
    contiguous_gradients: bool = False,
) -> tuple[Model, Opt]:
    """Shards `model` and re-bases `optimizer` on it, both in place; returns the same two objects.

    `model` may be a `zf.pipeline`, of which this rank's stages are placed.
    Arguments: see `attach` for clip, clip_value, scheduler and one_pass, `shard` for the others. An optimizer with a
    method `update_cost(parameter)` gives the cost by which owners are balanced; Muon's is known. With `config`, a
    ds_config.json (its path, a dict or JSON text), that says stage, precision, clip, accumulate and buffer_bytes, and
    may name a scheduler, which every step advances. What it comes to is printed once.

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(64, 64)
    >>> model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=2, clip=1.0)
    >>> model(torch.ones(2, 64)).sum().backward(); optimizer.step(); optimizer.zero_grad()
    >>> zf.close(model)
    """
    placed = _placed(model)
    said = {"stage": stage, "precision": precision, "accumulate": accumulate, "buffer_bytes": buffer_bytes}
    chosen: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
    chosen |= {"mesh": mesh, "cut": cut, "overlap": overlap, "cost": cost or update_cost(optimizer)}
    if config is not None:
        check_ready(placed)
        settings = configured(config, placed, optimizer, {**said, "clip": clip, "mesh": mesh})
        chosen |= shard_arguments(settings, optimizer) | {"accumulate": settings.accumulate}
        clip = settings.clip
        scheduler = scheduler or scheduler_of(settings, optimizer)
    if offload is not None:
        chosen["offload"] = offload
    if isinstance(mesh, Mesh):
        _spread(placed, mesh, optimizer)
    shard(
        placed,
        units=units,
        init=init,
        load=load,
        device=device,
        live_bytes=live_bytes,
        patience=patience,
        check_replicas=check_replicas,
        contiguous_gradients=contiguous_gradients,
        **chosen,
    )
    try:
        attach(placed, optimizer, clip=clip, clip_value=clip_value, scheduler=scheduler, one_pass=one_pass)
    except Exception:
        close(placed)
        raise
    return model, optimizer


def shard(
    model: Model,
    *,
    stage: int | str = 3,
    units: UnitChoice = None,
    cut: str | None = None,
    precision: str | Precision | None = None,
    mesh: DeviceMesh | Mesh | None = None,
    cost: Cost | None = None,
    init: Init | None = None,
    load: Load | None = None,
    device: torch.device | str | None = None,
    live_bytes: int | None = None,
    buffer_bytes: int | None = None,
    accumulate: int = 1,
    offload: OffloadChoice = None,
    overlap: bool = True,
    patience: float | None = None,
    check_replicas: int | None = None,
    contiguous_gradients: bool = False,
) -> Model:
    """Places the model's states over the ranks as the stage says, in place; every rank starts from rank 0's weights.

    stage         0 (DDP), 1, 2 or 3; "dp" (one rank updates), "hsdp" (stage 3 inside groups that repeat each other),
                  "hpz" (stage 3 over all, gathered again inside the group)
    cut           "even" ranges, or "whole" parameters, each with one owner (stages 1 to 3)
    precision     "bf16" or "fp16": 16-bit compute, fp32 masters, moments and gradient sums (fp16 with a loss scale);
                  "fp32", "tf32"; or a `zf.Precision`. None leaves every parameter as it is. Parameters that are frozen
                  have no master: they live in the compute dtype alone
    units         modules gathered as one: a class or classes, a predicate (name, module), a least number of
                  parameters, or None to find repeated blocks
    mesh          a `zf.mesh`, over whose data axis states are placed, and over whose tensor axis `zf.tensor_parallel`
                  spreads the layers, if that was not done before; or a DeviceMesh to shard over, of one dimension
                  or of two (groups × ranks in a group); else all ranks
    cost          with cut="whole": what updating a parameter costs, to balance owners by; its bytes by default
    init          for a model on the meta device: fills the parameters and buffers of one module. By default Hugging
                  Face's or torch's own way. Each unit gets memory, values, and is cut before the next.
    load          a folder with safetensors files (or one such file) to take the weights from, for a model on the meta
                  device or any other. Each rank reads only what it keeps
    device        where a model on the meta device goes; the accelerator if there is one, else the CPU
    live_bytes    bound on gathered parameter bytes at any time (stage 3); by default a unit and one ahead
    buffer_bytes  size of one fused communication buffer; by default 16 MiB on the CPU, 256 MiB elsewhere, and no more
                  than a unit needs
    accumulate    backwards that make a step: only the last one reduces where gradients stay whole (stages 0, 1, dp),
                  and across groups (hsdp)
    offload       where states live while nobody uses them: {"optimizer": "host", "nvme" or the fraction of the units
                  that goes to the host, "parameters": …, "gradients": …, "path": a folder for "nvme"}, or "auto" to
                  fill the device, then the host, then the disk. docs/offload.md has all keys
    overlap       False runs every communication to its end at once: slower, the same bits, for debugging
    patience      seconds for which a rank may keep the others waiting before all of them raise, naming it; by default
                  as long as the process group's own time-out allows. Ranks that do different things raise in seconds
                  in any case
    check_replicas
                  before every so many steps, compare what several ranks hold alike (whole parameters, copies across
                  groups, buffers) bit by bit, and raise where one differs; off by default
    contiguous_gradients
                  gradients on the device lie in one block that is there before the first forward, apart from
                  short-lived tensors: less fragmentation where shapes vary. A rank alone copies them there, and has
                  their memory in forward too

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=3)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # works on the pieces, as with FSDP2
    >>> zf.close(model)
    """
    module = _placed(model)
    check_ready(module)
    check_wrappers(module)
    check_axes(module, mesh)
    if isinstance(mesh, Mesh):
        _spread(module, mesh)
    spread, mesh = (mesh, mesh.zero) if isinstance(mesh, Mesh) else (None, mesh)
    check_kinds(mesh, cost=cost, init=init)
    check_flags(overlap=overlap, contiguous_gradients=contiguous_gradients)
    blocks = None if spread is None else spread.all_zero
    control = make_control(mesh, overlap=overlap, blocks=blocks)
    model_group = None if spread is None else make_model_group(spread.groups(PIPELINE, TENSOR), control)
    job = make_job_group(model_group, control)
    try:
        agree(job, lambda: check_numbers(live_bytes, buffer_bytes, accumulate, patience, check_replicas))
        policy = agree(job, lambda: policy_of(precision))
        wish = agree(job, lambda: read_offload(offload))
        plan = agree(job, lambda: choose_sharding(module, stage, cut, units, mesh, cost, live_bytes, device, policy))
        if load is not None:
            given, elsewhere = load, names_elsewhere(model_group, known_in_files(module))
            has_init, warns = init is not None, control.rank == 0
            agree(job, lambda: find_values(module, plan, given, elsewhere, has_init=has_init, warns=warns))
        settings = (
            *(f"stage={plan.row.name}", f"cut={plan.row.cut.value}", f"overlap={overlap}", f"live_bytes={live_bytes}"),
            *(f"buffer_bytes={buffer_bytes}", f"accumulate={accumulate}", f"check_replicas={check_replicas}"),
            # Each machine may have its own folder for files.
            f"offload={wish if wish is None or wish.path is None else replace(wish, path='a folder')}",
            policy.summary,
        )
        agree(job, lambda: check_same_on_all_ranks(control, fingerprint(plan.assigned, *settings)))
        offloading = None if wish is None else offloading_of(plan, wish, policy, control, mesh, live_bytes, accumulate)
    except Exception:
        destroy(mesh, {control.group, job.group, *([] if model_group is None else [model_group.group])}, blocks)
        raise
    try:
        engine = Engine(
            module,
            plan.row,
            plan.assigned,
            plan.modules,
            Groups.make(mesh, plan.row, control, plan.device, model_group, job, blocks),
            plan.device,
            materialiser=materialiser_of(module, plan, init),
            live_bytes=live_bytes,
            buffer_bytes=buffer_bytes or default_buffer_bytes(plan.device.type),
            accumulate=accumulate,
            overlap=overlap,
            precision=policy,
            offloading=offloading,
            patience=patience,
            check_replicas=check_replicas,
            contiguous_gradients=contiguous_gradients,
        )
    except torch.OutOfMemoryError as error:
        entries = [entry for entries in plan.assigned.values() for entry in entries]
        add_note(error, f"{HEADING} while sharding. {Needs.of(entries, 2.0).advice(control.size)}")
        raise
    engine.spread = spread
    if spread is not None and spread.tensor > 1:
        _count_inside(engine, spread)
    engine.hooks.out_of_memory = partial(_explain, engine)
    StateDicts(engine)
    return model


def attach(
    model: nn.Module | HoldsStages,
    optimizer: Opt,
    *others: torch.optim.Optimizer,
    clip: float | None = None,
    clip_value: float | None = None,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
    one_pass: bool | None = None,
) -> Opt:
    """Re-bases an optimizer built on the model's parameters onto this rank's pieces, in place. `model` may be a
    `zf.pipeline`.

    Parameter groups, schedulers and existing state are kept; the same object comes back. Several optimizers that
    share the parameters among them are attached in one call. Every step first looks whether all gradients are finite
    on all ranks; if not, it changes nothing and is counted (`zf.last_step`).

    clip        the largest gradient norm, applied in every step
    clip_value  instead: the largest absolute value of an element of a gradient
    scheduler   a learning-rate scheduler to be advanced after every step that was not skipped; do not call its step()
    one_pass    torch's AdamW and Adam in one pass over memory instead of torch's own kernels, whose results differ in
                the last bit; by default where `precision` is given, or states are offloaded

    >>> import torch, zerofold as zf
    >>> model = torch.nn.Linear(64, 64)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> zf.attach(zf.shard(model, stage=1), optimizer) is optimizer
    True
    >>> zf.close(model)
    """
    model = _placed(model)
    engine = Engine.of(model)
    engine.take_in_changes()
    everyone: list[torch.optim.Optimizer] = [optimizer, *others]
    options = StepOptions(clip, clip_value, one_pass, scheduler)
    agree(engine.groups.job, lambda: check_stages(model, everyone))
    agree(engine.groups.job, lambda: check_optimizers(engine, everyone, options))
    told = told_of_steps(everyone, options)
    agree(engine.groups.job, lambda: check_same_on_all_ranks(engine.groups.control, told))
    agree(engine.groups.job, lambda: check_same_over_the_model(engine.groups.model, told, tensor_ranks(model)))
    for each in everyone:
        attach_optimizer(engine, each, options if each is everyone[-1] else replace(options, scheduler=None))
    return optimizer


def close(model: nn.Module, *, gather: bool = True) -> None:
    """Ends sharding: the model is an ordinary module again, with its whole parameters on every rank.

    All ranks must call it. The optimizer that was attached has no use afterwards. A checkpoint that is being written
    in the background is waited for. A model too large to be whole is let go with gather=False: parameters that are
    not whole here have their shapes left, on the meta device, and nothing is communicated but what the last step of
    offloaded states has left to do.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=3)
    >>> zf.close(model)
    >>> type(model.weight).__name__
    'Parameter'
    """
    engine = Engine.of(model)
    check_flags(gather=gather)
    try:
        finish_saving(engine)
    finally:
        end(engine, gather=gather)


def _spread(model: nn.Module, mesh: Mesh, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Over the tensor axis, unless that was done before. The optimizer gets what stands for DTensors now."""
    check_ready(model)
    if mesh.pipeline > 1 and not is_cut_into_stages(model):
        raise ValueError(
            f"mesh: pipeline={mesh.pipeline}, and this {type(model).__name__} has not been cut into stages: give what "
            "zf.pipeline(model, mesh, ...) returns"
        )
    if mesh.tensor == 1 or Engine.is_on(model):
        return
    from zerofold.parallel.tensor import rebase, spread_over_tensor_ranks  # see `zerofold.parallel.marks`

    made = spread_over_tensor_ranks(model, mesh)
    if optimizer is not None:
        rebase(optimizer, made)


def _explain(engine: Engine, error: BaseException | None) -> None:
    if error is not None:
        add_note(error, explain_out_of_memory(engine))


def _count_inside(engine: Engine, spread: Mesh) -> None:
    """What the tensor axis sends inside layers, for the ledger."""
    from zerofold.parallel.counting import TensorTraffic  # loads torch's DTensor, which the model has loaded before

    engine.inside = TensorTraffic(engine.model, spread.along(TENSOR).get_group(), engine.traffic)
    engine.on_close.append(engine.inside.remove)


def _placed(model: nn.Module | HoldsStages) -> nn.Module:
    return model.model if isinstance(model, HoldsStages) else model
