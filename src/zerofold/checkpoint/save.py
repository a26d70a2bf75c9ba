"""zf.save: every rank writes what it owns, at once or while training goes on."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zerofold.arguments import check_flags, path_of
from zerofold.checkpoint import commit as folders
from zerofold.checkpoint import states
from zerofold.checkpoint.collect import Collected, Optimizers, collect, listed, optimizers_of
from zerofold.checkpoint.files import Image
from zerofold.checkpoint.job import Job
from zerofold.checkpoint.saving import Report, Saving, finish_saving
from zerofold.checkpoint.staging import Snapshot, Staging
from zerofold.checkpoint.together import together
from zerofold.engine import Engine

# For ranks to connect before the first save in the background; gloo waits five times as long for one that has died.
MEETING = timedelta(minutes=1)
_LONGEST_WRITE = timedelta(hours=6)  # by which ranks may be apart; one that dies is noticed at once all the same


def save(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    scheduler: Any = None,
    data: Any = None,
    tag: str | None = None,
    latest: bool = True,
    keep: int | None = None,
    trainable_only: bool = False,
    background: bool = False,
    progress: Report | None = None,
) -> Saving:
    """Writes a checkpoint into the folder `path`; all ranks must call it. Nothing is gathered.

    It holds the model (fp32 masters where there are some), buffers, optimizer states and groups, averages (`zf.EMA`),
    schedulers, the loss scale, each rank's random generators and what else is named here. It appears under its name
    when it is complete, and `path/latest` names it after that; until then the one before it stays the latest.

    optimizer       one, several, or None for the weights alone
    extra           plain data of yours: numbers, text, lists, dicts, tensors. Rank 0's counts
    scheduler       schedulers (one or a list) that `attach` was not given; anything with state_dict
    data            what knows the position in the data: anything with state_dict, such as zf.Samples or a stateful
                    loader. Where the ranks' states differ, each keeps its own
    tag             name of the checkpoint, "save-00000001" and so on by default. One of the same name is replaced
    latest          False: `path/latest` goes on naming the one before, as for a copy of the best so far
    keep            how many checkpoints may stay in `path`: older ones go after the new one was read back and found
                    whole. None keeps all
    trainable_only  leaves frozen parameters out and notes their fingerprints: for adapters
    background      returns at once: the states are copied while the next forward and backward run, and written while
                    training goes on. `wait` of what this returns, or the next save, raises what went wrong
    progress        called with the bytes written so far and their sum, from the threads that write

    >>> import tempfile, torch, zerofold as zf
    >>> model = torch.nn.Linear(64, 64)
    >>> model, optimizer = zf.prepare(model, torch.optim.AdamW(model.parameters()), stage=3)
    >>> folder = tempfile.mkdtemp()
    >>> zf.save(model, optimizer, folder, extra={"epoch": 3}).path.name
    'save-00000001'
    >>> zf.load(model, optimizer, folder)
    {'epoch': 3}
    >>> zf.close(model)
    """
    engine = Engine.of(model)
    check_flags(latest=latest, trainable_only=trainable_only, background=background)
    if extra is not None and not isinstance(extra, Mapping):
        raise TypeError(f"extra={extra!r} must be a dict of plain data, or None")
    finish_saving(engine)
    path, job = path_of("path", path).absolute(), engine.groups.job  # the working folder may change meanwhile
    schedulers = listed(scheduler)

    def look() -> Collected:
        folders.check_tag(tag)
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep={keep!r} must be a number of checkpoints of at least 1, or None to keep all")
        if engine.is_swapped:
            raise RuntimeError("zf.save inside `with average.swapped()` would save the averages as weights: leave it")
        if engine.schedule.holders:
            raise RuntimeError("zf.save inside `with zf.full_params(model)`: what was changed there counts at its end")
        return collect(engine, optimizers_of(engine, optimizer), extra, schedulers, data, trainable_only, buffers)

    engine.take_in_changes()
    buffers = states.tell_buffers(engine)
    collected = together(job, look)
    base = states.base_fingerprints(engine) if trainable_only else None
    counted = sum(p.size for p in states.parameters(engine, trainable_only=False))
    total = torch.tensor([collected.layout.nbytes, counted])
    job.all_reduce(total, unit="save").wait()
    begun = together(job, lambda: folders.begin(path, tag, int(total[0])) if job.rank == 0 else None)
    tag, folder = job.all_gather_objects(None if begun is None else (begun.tag, begun.folder))[0]
    place = begun or folders.Place(path, tag, folder)
    place.becomes_latest = latest
    saving = Saving(path / tag, collected.layout.nbytes, progress)
    task = Job(engine, saving, place, collected, base, keep, parameters=int(total[1]))
    if not background:
        task.run(job.group, Image(collected.layout))
        saving.wait()
        return saving
    try:
        group = engine.saving_group = engine.saving_group or _new_group(engine)
        snapshot = together(job, lambda: Snapshot(collected.layout, staging_of(engine)))
    except Exception:
        place.abandon()
        raise
    engine.before_change.append(snapshot.settle)
    # Any optimizer's: one that was built on the sharded parameters and never attached changes them as well.
    saving.after.append(register_optimizer_step_pre_hook(lambda *_: snapshot.settle()).remove)
    engine.saving = saving
    saving.start(lambda: task.run(group, snapshot))
    return saving


def stage(model: nn.Module, optimizer: Optimizers = None) -> None:
    """Reserves the host memory that saves in the background copy into, so that the first one need not.

    Call it when the optimizer has its states, after the first step. Pinning memory takes 0.6 s for each GiB; it runs
    beside training.

    >>> import torch, zerofold as zf
    >>> model = zf.shard(torch.nn.Linear(64, 64), stage=3)
    >>> zf.stage(model)
    >>> zf.close(model)
    """
    engine = Engine.of(model)
    engine.take_in_changes()
    held = [*states.parameters(engine, trainable_only=False), *states.averages(engine)]
    for index, each in enumerate(optimizers_of(engine, optimizer)):
        held += states.optimizer_states(engine, index, each).held
    nbytes = sum(each.flat.nbytes for each in held) + 2**20
    staging = staging_of(engine)

    def reserve() -> None:
        try:
            staging.reserve(nbytes)
        except RuntimeError as error:  # the save will try again, and raise
            warnings.warn(f"zf.stage: {nbytes:,} bytes of host memory could not be reserved: {error}", stacklevel=2)

    threading.Thread(target=reserve, name="zerofold-stage", daemon=True).start()


def staging_of(engine: Engine) -> Staging:
    if engine.staging is None:
        engine.staging = Staging(engine.groups.gather.device)
    assert isinstance(engine.staging, Staging)
    return engine.staging


def _new_group(engine: Engine) -> dist.ProcessGroup:
    """For agreements in the background, beside those of training."""
    ranks = engine.groups.job.global_ranks
    local = len(ranks) != dist.get_world_size()
    group = dist.new_group(ranks, backend="gloo", timeout=MEETING, use_local_synchronization=local)
    # Not before: a rank that dies while they connect is not noticed, and the others wait until the time-out.
    group.set_timeout(_LONGEST_WRITE)
    return group
