"""zf.load: any checkpoint into any cut. Each rank reads the ranges it keeps.

First everything is looked at (names, shapes, digests of what will be read), on all ranks; only then is anything
changed. So a checkpoint that does not fit or is damaged leaves the model as it was.
"""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofold.arguments import check_flags, path_of
from zerofold.checkpoint import states
from zerofold.checkpoint.around import all_or_nothing, changes_around, check_schedulers
from zerofold.checkpoint.collect import Optimizers, listed, optimizers_of
from zerofold.checkpoint.contents import CheckpointError, Contents
from zerofold.checkpoint.files import DamagedError, threads_here
from zerofold.checkpoint.manifest import candidates
from zerofold.checkpoint.native import check_ranges
from zerofold.checkpoint.open import open_checkpoint
from zerofold.checkpoint.plan import Plan, known_names, plan_tensors
from zerofold.checkpoint.plan_optimizers import plan_optimizers
from zerofold.checkpoint.saving import finish_saving
from zerofold.checkpoint.sources import names_elsewhere
from zerofold.checkpoint.together import together
from zerofold.engine import Engine


def load(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    *,
    scheduler: Any = None,
    data: Any = None,
    strict: bool = True,
) -> dict[str, Any]:
    """Loads a checkpoint into a sharded model and returns the `extra` it was saved with; all ranks must call it.

    `path` is a checkpoint, or the folder with several that zf.save was given: then the latest, or if that is damaged
    the newest that is whole, with a warning. The number of ranks, the stage, the cut, the units, the device and the
    precision may be others than those it was saved with; states of another optimizer class are taken when they have
    the same names. With optimizer=None it loads the weights alone, and what else is named here. Where the number of
    ranks is the same, each gets its random generators back; otherwise those ranks that were there do. Gradients are
    cleared. A checkpoint that is damaged or does not fit leaves everything as it was.

    scheduler, data   as given to zf.save; scheduler=False leaves all schedulers as they are
    strict            False: what the model or the checkpoint has alone is left out, with a warning

    >>> import tempfile, torch, zerofold as zf
    >>> model, folder = zf.shard(torch.nn.Linear(64, 64), stage=3), tempfile.mkdtemp()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> _ = zf.save(model, optimizer, folder, tag="first", extra={"step": 7})
    >>> zf.load(model, optimizer, folder)["step"]
    7
    >>> zf.close(model)
    """
    engine = Engine.of(model)
    where = path_of("path", path)
    check_flags(strict=strict)
    finish_saving(engine)
    engine.take_in_groups()  # states are made as the optimizer's pieces are
    if engine.is_swapped or engine.schedule.holders:
        raise RuntimeError("zf.load inside `with zf.full_params(model)` or `average.swapped()`: leave it first")
    job, optimizers = engine.groups.job, optimizers_of(engine, optimizer)
    given = None if scheduler is False else listed(scheduler)
    found = together(job, lambda: candidates(where) if job.rank == 0 else [])
    folders = job.all_gather_objects(found)[0] or [where]
    damaged: list[str] = []
    for folder in folders:
        try:
            contents, plan = _look(engine, optimizers, folder, strict=strict)
            break
        except DamagedError as error:
            damaged.append(str(error))
            if folder == folders[-1]:
                raise DamagedError(_no_way_out(damaged, where)) from error
    if damaged and job.rank == 0:
        warnings.warn(f"{damaged[0]}. Going on with {contents.where}, which is whole", stacklevel=2)
    for line in plan.warnings if engine.groups.control.rank == 0 else ():
        warnings.warn(line, stacklevel=2)
    check_schedulers(engine, contents, given, optimizers)
    engine.settle()
    all_or_nothing(job, partial(changes_around, engine, contents, given, data, optimizers))
    together(job, lambda: _fill(plan, contents.where, job.rank))
    for slab in engine.slabs():
        slab.mark_changed()
    engine.schedule.refresh()
    for each in optimizers:
        each.zero_grad()  # gradients of other weights
    extra = contents.plain.get("extra")
    return {} if extra is None else dict(extra)


def _look(
    engine: Engine, optimizers: list[torch.optim.Optimizer], folder: Path, *, strict: bool
) -> tuple[Contents, Plan]:
    job = engine.groups.job
    contents = together(job, lambda: open_checkpoint(folder))
    base = states.base_fingerprints(engine) if contents.base is not None else {}
    elsewhere = names_elsewhere(engine.groups.model, known_names(engine))

    def make() -> Plan:
        plan = Plan()
        try:
            plan_tensors(engine, contents, plan, base=base, elsewhere=elsewhere, strict=strict)
            plan_optimizers(engine, optimizers, contents, plan, strict=strict)
        except ValueError as error:
            raise CheckpointError(str(error)) from error
        check_ranges([*((fill.stored, fill.start, fill.stop) for fill in plan.fills), *plan.checked])
        return plan

    return contents, together(job, make)


def _fill(plan: Plan, where: str, rank: int) -> None:
    try:
        with torch.no_grad(), ThreadPoolExecutor(threads_here()) as pool:
            list(pool.map(lambda fill: fill.run(), plan.fills))
        for restore in plan.restores:
            restore()
    except (OSError, CheckpointError) as error:  # it was whole a moment ago
        raise CheckpointError(
            f"rank {rank} could read only a part of {where}, so the model has a part of it now: load it again, or "
            f"another, before it is used ({error})"
        ) from error


def _no_way_out(damaged: list[str], path: Path) -> str:
    if len(damaged) == 1:
        return damaged[0]
    return f"none of the {len(damaged)} checkpoints in {path} is whole. " + "; ".join(damaged)
