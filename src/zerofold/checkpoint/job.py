"""One rank's part of a save, at once or in the background."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist

from zerofold.checkpoint import commit as folders
from zerofold.checkpoint.assemble import assemble
from zerofold.checkpoint.collect import Collected
from zerofold.checkpoint.commit import Place
from zerofold.checkpoint.contents import CheckpointError
from zerofold.checkpoint.files import Image, WrittenFile, threads_here, write
from zerofold.checkpoint.saving import Saving
from zerofold.checkpoint.staging import Snapshot
from zerofold.checkpoint.together import message_of
from zerofold.engine import Engine


class Job:
    """One rank's part of a save: write, and agree with the others on how it went."""

    def __init__(
        self,
        engine: Engine,
        saving: Saving,
        place: Place,
        collected: Collected,
        base: dict[str, str] | None,
        keep: int | None,
        *,
        parameters: int,
    ) -> None:
        self._job, self._saving, self._place, self._keep = engine.groups.job, saving, place, keep
        self._collected, self._base = collected, base
        self._about = {
            "world": self._job.size,
            "data_ranks": engine.groups.control.size,
            "row": engine.row.name,
            "cut": engine.row.cut.value,
            "precision": engine.precision.summary,
            "torch": torch.__version__,
            "parameters": parameters,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        }

    def run(self, group: dist.ProcessGroup, image: Image | Snapshot) -> None:
        try:
            try:
                written: dict[str, Any] | str = self._write(image)
            except Exception as error:
                written = message_of(error)
            if isinstance(image, Image):  # in training's own group, whose watch names a rank that does not come
                self._job.all_reduce(torch.zeros(1), unit="save").wait()
            self._conclude(group, written)
        except Exception as error:
            self._saving.fail(error)

    def _write(self, image: Image | Snapshot) -> dict[str, Any]:
        if isinstance(image, Snapshot):
            image.copy()
        layout, threads = self._collected.layout, threads_here()
        path = self._place.folder / f"rank-{self._job.rank:05d}.safetensors"
        digests = write(path, layout, image, self._saving.advance, threads=threads)
        file = WrittenFile(path, layout.nbytes, digests)
        if self._keep is not None:  # others will be removed for it
            file.forget_cache()
            file.check(range(len(digests)), threads=threads)
        return {
            "file": {"name": path.name, "bytes": layout.nbytes, "sha256": digests},
            "pieces": self._collected.pieces,
            "values": self._collected.values,
            "groups": self._collected.groups,
            "aliases": self._collected.aliases,
            "copies": self._collected.copies,
            "own": self._collected.own,
        }

    def _conclude(self, group: dist.ProcessGroup, written: dict[str, Any] | str) -> None:
        """Rank 0 takes everybody's word and makes it a checkpoint, or tells everybody why not."""
        root = dist.get_global_rank(group, 0)
        tables: list[Any] | None = [None] * self._job.size if self._job.rank == 0 else None
        outcome: list[str | None] = [None]
        try:
            dist.gather_object(written, tables, dst=root, group=group)
            if tables is not None:
                outcome = [self._commit(tables)]
            dist.broadcast_object_list(outcome, src=root, group=group)
        except RuntimeError as error:
            # Who that is training finds out: its watch asks all ranks, and might take one that computes for idle here.
            raise CheckpointError(
                f"rank {self._job.rank} lost the others while it was being saved, most likely because a process ended; "
                f"earlier checkpoints are as they were. Cause: {error}"
            ) from error
        if outcome[0] is not None:
            raise CheckpointError(outcome[0])

    def _commit(self, tables: list[Any]) -> str | None:
        try:
            for rank, table in enumerate(tables):
                if isinstance(table, str):
                    raise CheckpointError(f"rank {rank}: {table}")
            plain = {**self._collected.plain, "base": self._base}
            path = self._saving.path.parent
            manifest = assemble(tables, self._about, plain)
            final = self._place.commit(manifest)
        except Exception as error:
            self._place.abandon()
            return message_of(error)
        if self._keep is not None:
            try:
                folders.prune(path, final, self._keep)
            except CheckpointError as error:  # what was to be saved is saved
                warnings.warn(f"older checkpoints could not be removed: {error}", stacklevel=2)
        return None
