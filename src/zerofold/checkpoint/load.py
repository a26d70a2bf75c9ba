"""zf.load: any checkpoint into any cut. Each rank reads the ranges it keeps.

First everything is looked at (names, shapes, digests of what will be read), on all ranks; only then is anything
changed. So a checkpoint that does not fit or is damaged leaves the model as it was.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerofold.checkpoint import states
from zerofold.checkpoint.collect import Optimizers, listed, optimizers_of
from zerofold.checkpoint.contents import CheckpointError, Contents
from zerofold.checkpoint.files import DamagedError, threads_for
from zerofold.checkpoint.manifest import candidates, is_checkpoint
from zerofold.checkpoint.native import check_ranges, open_native
from zerofold.checkpoint.open import open_checkpoint
from zerofold.checkpoint.plan import Plan, plan_optimizers, plan_tensors
from zerofold.checkpoint.save import finish_saving
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
    the same names. With optimizer=None it loads the weights alone. Where the number of ranks is the same, each gets
    its random generators back; otherwise those ranks that were there do.

    scheduler, data   as given to zf.save
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
    finish_saving(engine)
    engine.take_in_changes()
    if engine.is_swapped or engine.schedule.holders:
        raise RuntimeError("zf.load inside `with zf.full_params(model)` or `average.swapped()`: leave it first")
    control, optimizers = engine.groups.control, optimizers_of(engine, optimizer)
    given = listed(scheduler)
    found = together(control, lambda: candidates(Path(path)) if control.rank == 0 else [])
    folders = control.all_gather_objects(found)[0] or [Path(path)]
    damaged: list[str] = []
    for folder in folders:
        try:
            contents, plan = _look(engine, optimizers, folder, strict=strict)
            break
        except DamagedError as error:
            damaged.append(str(error))
            if folder == folders[-1]:
                raise DamagedError(_no_way_out(damaged, Path(path))) from error
    if damaged and control.rank == 0:
        warnings.warn(f"{damaged[0]}. Going on with {contents.where}, which is whole", stacklevel=2)
    later = together(control, lambda: _check_plain(engine, contents, [*engine.schedulers, *given], data, optimizers))
    for line in plan.warnings if control.rank == 0 else ():
        warnings.warn(line, stacklevel=2)
    engine.settle()
    together(control, lambda: _apply(engine, plan))
    for restore in later:
        restore()
    extra = contents.plain.get("extra")
    return {} if extra is None else dict(extra)


def _look(
    engine: Engine, optimizers: list[torch.optim.Optimizer], folder: Path, *, strict: bool
) -> tuple[Contents, Plan]:
    control = engine.groups.control
    contents = together(control, lambda: open_checkpoint(folder) if not is_checkpoint(folder) else open_native(folder))
    base = states.base_fingerprints(engine) if contents.base is not None else {}

    def make() -> Plan:
        plan = Plan()
        plan_tensors(engine, contents, plan, base=base, strict=strict)
        plan_optimizers(engine, optimizers, contents, plan, strict=strict)
        check_ranges([*((fill.stored, fill.start, fill.stop) for fill in plan.fills), *plan.checked])
        return plan

    return contents, together(control, make)


def _apply(engine: Engine, plan: Plan) -> None:
    with torch.no_grad(), ThreadPoolExecutor(threads_for(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))) as pool:
        list(pool.map(lambda fill: fill.run(), plan.fills))
    for restore in plan.restores:
        restore()
    for slab in engine.slabs():
        slab.mark_changed()
    engine.schedule.refresh()


def _check_plain(
    engine: Engine, contents: Contents, schedulers: list[Any], data: Any, optimizers: list[torch.optim.Optimizer]
) -> list[Callable[[], None]]:
    """What is to be called at the end, after everything was found to be there."""
    saved, rank, world = contents.plain.get("schedulers"), engine.groups.control.rank, engine.groups.control.size
    later: list[Callable[[], None]] = []
    if not optimizers:
        return later
    if saved is not None and len(saved) != len(schedulers):
        raise CheckpointError(
            f"{contents.where} holds the state of {len(saved)} scheduler(s), and there are {len(schedulers)} here: "
            "give those that it was saved with as scheduler= (or to zf.attach)"
        )
    for scheduler, state in zip(schedulers, saved or [], strict=True):
        later.append(lambda scheduler=scheduler, state=state: scheduler.load_state_dict(state))  # type: ignore[misc]
    if contents.plain.get("scaler") is not None:
        later.append(lambda: engine.set_scaler(contents.plain["scaler"]))
    if rank < contents.ranks:
        own = contents.of_rank(rank)
        later.append(lambda: states.set_random_states(own["rng"], engine.groups.gather.device))
    if data is not None:
        later.append(_data_restorer(contents, data, rank, world))
    return later


def _data_restorer(contents: Contents, data: Any, rank: int, world: int) -> Callable[[], None]:
    if not callable(getattr(data, "load_state_dict", None)):
        raise TypeError(f"data: {type(data).__name__} has no load_state_dict(), so its state cannot be loaded")
    positions = [contents.of_rank(each).get("data") for each in range(contents.ranks)]
    if not positions or positions[0] is None:
        raise CheckpointError(f"{contents.where} holds no position in the data: it was saved without data=")
    if world == contents.ranks:
        return lambda: data.load_state_dict(positions[rank])
    if any(position != positions[0] for position in positions):
        raise CheckpointError(
            f"{contents.where} holds the position in the data of each of {contents.ranks} ranks, and there are {world} "
            "now: use data that does not depend on the number of ranks (zf.Samples), or leave data= out"
        )
    return lambda: data.load_state_dict(positions[0])


def _no_way_out(damaged: list[str], path: Path) -> str:
    if len(damaged) == 1:
        return damaged[0]
    return f"none of the {len(damaged)} checkpoints in {path} is whole. " + "; ".join(damaged)
