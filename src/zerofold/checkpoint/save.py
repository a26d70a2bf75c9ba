"""zf.save: every rank writes what it owns, at once or while training goes on."""

from __future__ import annotations

import os
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerofold.checkpoint import commit as folders
from zerofold.checkpoint import states
from zerofold.checkpoint.collect import Collected, Optimizers, collect, listed, optimizers_of
from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.files import Image, WrittenFile, threads_for, write
from zerofold.checkpoint.staging import Snapshot, Staging
from zerofold.checkpoint.together import together
from zerofold.engine import Engine

# For ranks to connect before the first save in the background; gloo waits five times as long for one that has died.
MEETING = timedelta(minutes=1)
_LONGEST_WRITE = timedelta(hours=6)  # by which ranks may be apart; one that dies is noticed at once all the same

Report = Callable[[int, int], None]
"""Told the bytes that this rank has written, and all it will write."""


def save(
    model: nn.Module,
    optimizer: Optimizers,
    path: str | os.PathLike[str],
    *,
    extra: Mapping[str, Any] | None = None,
    scheduler: Any = None,
    data: Any = None,
    tag: str | None = None,
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
    finish_saving(engine)
    path, control = Path(path), engine.groups.control
    schedulers = listed(scheduler)

    def look() -> Collected:
        folders.check_tag(tag)
        if keep is not None and (not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep={keep!r} must be a number of checkpoints of at least 1, or None to keep all")
        if engine.is_swapped:
            raise RuntimeError("zf.save inside `with average.swapped()` would save the averages as weights: leave it")
        return collect(engine, optimizers_of(engine, optimizer), extra, schedulers, data, trainable_only)

    engine.take_in_changes()
    collected = together(control, look)
    base = states.base_fingerprints(engine) if trainable_only else None
    total = torch.tensor([collected.layout.nbytes])
    control.all_reduce(total, unit="save").wait()
    begun = together(control, lambda: folders.begin(path, tag, int(total)) if control.rank == 0 else None)
    name, folder = control.all_gather_objects(begun)[0]
    saving = Saving(path / name, collected.layout.nbytes, progress)
    job = _Job(engine, saving, folder, collected, base, keep)
    if not background:
        job.run(control.group, Image(collected.layout))
        saving.wait()
        return saving
    group = engine.saving_group = engine.saving_group or _new_group(engine)
    if engine.staging is None:
        engine.staging = Staging(engine.groups.gather.device)
    snapshot = Snapshot(collected.layout, engine.staging)
    engine.before_change.append(snapshot.settle)
    for each in optimizers_of(engine, optimizer):
        if each not in engine.optimizers:  # nothing of ours runs before its step
            saving.hooks.append(each.register_step_pre_hook(lambda *_: snapshot.settle()))
    engine.saving = saving
    saving.start(lambda: job.run(group, snapshot))
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
    held = [*states.parameters(engine, trainable_only=False), *states.averages(engine)]
    for index, each in enumerate(optimizers_of(engine, optimizer)):
        held += states.optimizer_states(engine, index, each)[0]
    nbytes = sum(each.flat.nbytes for each in held) + 2**20
    if engine.staging is None:
        engine.staging = Staging(engine.groups.gather.device)
    threading.Thread(target=engine.staging.reserve, args=(nbytes,), name="zerofold-stage", daemon=True).start()


class Saving:
    """A checkpoint on its way. `wait` returns when it is complete, and raises what went wrong, on every rank.

    >>> import tempfile, torch, zerofold as zf
    >>> model, folder = zf.shard(torch.nn.Linear(64, 64), stage=3), tempfile.mkdtemp()
    >>> saving = zf.save(model, None, folder, background=True)
    >>> saving.wait()
    >>> saving.is_done, saving.written == saving.total
    (True, True)
    >>> zf.close(model)
    """

    def __init__(self, path: Path, total: int, progress: Report | None) -> None:
        self.path, self.total, self.written = path, total, 0
        self.hooks: list[Any] = []
        self._progress, self._lock = progress, threading.Lock()
        self._error: BaseException | None = None
        self.was_told = False  # of the error
        self._thread: threading.Thread | None = None

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        while self.hooks:
            self.hooks.pop().remove()
        if self._error is not None:
            self.was_told = True
            raise self._error

    @property
    def is_done(self) -> bool:
        return self._thread is None or not self._thread.is_alive()

    def start(self, run: Callable[[], None]) -> None:
        # Not a daemon: a process that ends waits for its checkpoint.
        self._thread = threading.Thread(target=run, name="zerofold-save")
        self._thread.start()

    def advance(self, nbytes: int) -> None:
        with self._lock:
            self.written += nbytes
            if self._progress is not None:
                self._progress(self.written, self.total)

    def fail(self, error: BaseException) -> None:
        self._error = error
        if self._thread is not None:  # training goes on, so nobody may be waiting
            warnings.warn(f"the checkpoint {self.path} was not saved: {error}", stacklevel=2)


def finish_saving(engine: Engine) -> None:
    """Waits for a save in the background, and raises what went wrong with it, if nobody has been told yet."""
    saving, engine.saving = engine.saving, None
    if isinstance(saving, Saving) and not saving.was_told:
        saving.wait()


class _Job:
    """One rank's part of a save: write, and agree with the others on how it went."""

    def __init__(
        self,
        engine: Engine,
        saving: Saving,
        folder: Path,
        collected: Collected,
        base: dict[str, str] | None,
        keep: int | None,
    ) -> None:
        self._control, self._saving, self._folder, self._keep = engine.groups.control, saving, folder, keep
        self._collected, self._base = collected, base
        self._about = {
            "world": self._control.size,
            "row": engine.row.name,
            "cut": engine.row.cut.value,
            "precision": engine.precision.summary,
            "torch": torch.__version__,
            "parameters": engine.psi,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def run(self, group: dist.ProcessGroup, image: Image | Snapshot) -> None:
        try:
            try:
                written: dict[str, Any] | str = self._write(image)
            except Exception as error:
                written = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            self._conclude(group, written)
        except Exception as error:
            self._saving.fail(error)

    def _write(self, image: Image | Snapshot) -> dict[str, Any]:
        if isinstance(image, Snapshot):
            image.copy()
        layout, threads = self._collected.layout, threads_for(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        path = self._folder / f"rank-{self._control.rank:05d}.safetensors"
        digests = write(path, layout, image, self._saving.advance, threads=threads)
        file = WrittenFile(path, layout.nbytes, digests)
        if self._keep is not None:  # others will be removed for it
            file.forget_cache()
            file.check(range(len(digests)), threads=threads)
        return {
            "file": {"name": path.name, "bytes": layout.nbytes, "sha256": digests},
            "pieces": self._collected.pieces,
            "values": self._collected.values,
            "own": self._collected.own,
        }

    def _conclude(self, group: dist.ProcessGroup, written: dict[str, Any] | str) -> None:
        """Rank 0 takes everybody's word and makes it a checkpoint, or tells everybody why not."""
        root = dist.get_global_rank(group, 0)
        tables: list[Any] | None = [None] * self._control.size if self._control.rank == 0 else None
        dist.gather_object(written, tables, dst=root, group=group)
        outcome: list[str | None] = [None]
        if tables is not None:
            outcome = [self._commit(tables)]
        dist.broadcast_object_list(outcome, src=root, group=group)
        if outcome[0] is not None:
            raise CheckpointError(outcome[0])

    def _commit(self, tables: list[Any]) -> str | None:
        try:
            for rank, table in enumerate(tables):
                if isinstance(table, str):
                    raise CheckpointError(f"rank {rank}: {table}")
            plain = {**self._collected.plain, "base": self._base}
            path, tag = self._saving.path.parent, self._saving.path.name
            manifest = folders.assemble(tables, self._about, plain)
            final = folders.commit(path, tag, self._folder, manifest)
            if self._keep is not None:
                folders.prune(path, final, self._keep)
        except Exception as error:
            shutil.rmtree(self._folder, ignore_errors=True)
            return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        return None


def _new_group(engine: Engine) -> dist.ProcessGroup:
    """For agreements in the background, beside those of training."""
    ranks, mesh = engine.groups.control.global_ranks, engine.groups.mesh
    local = mesh is not None and mesh.size() != dist.get_world_size()
    group = dist.new_group(ranks, backend="gloo", timeout=MEETING, use_local_synchronization=local)
    # Not before: a rank that dies while they connect is not noticed, and the others wait until the time-out.
    group.set_timeout(_LONGEST_WRITE)
    return group
