"""What a stage of a pipeline has raised is raised on all ranks that train the model, and training can go on."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from zerofold.engine import Engine
from zerofold.parallel.mesh import TENSOR, Mesh
from zerofold.parallel.stand_ins import Course

_OTHERS_FAIL_S = 5.0  # in which ranks that share the layers of a stage raise the same, if they do
_UNIT = "errors of stages"


class Stops:
    """Of one pipeline."""

    def __init__(self, mesh: Mesh, course: Course) -> None:
        self.mesh, self.course = mesh, course
        self._rounds = 0  # of steps and evaluations

    def stop_together(self, engine: Engine) -> None:
        """At the end of a step: raises on all ranks what has been raised on one of them."""
        self._rounds += 1
        failure, self.course.failure = self.course.failure, None
        flag = torch.tensor(float(failure is not None), dtype=torch.float64)
        job = engine.groups.job
        job.all_reduce(flag, unit=_UNIT, op=dist.ReduceOp.MAX).wait()
        if not flag.item():
            return
        mine = None if failure is None else f"stage {failure.stage}: {type(failure.error).__name__}: {failure.error}"
        told = job.all_gather_objects(mine, unit=_UNIT)
        if failure is not None:
            raise failure.error
        rank = next(rank for rank, said in enumerate(told) if said is not None)
        raise RuntimeError(f"pipe.step: rank {job.global_ranks[rank]} has failed in {told[rank]}")

    def tensor_ranks_failed(self) -> bool:
        """Called by a rank that has. One that fails alone leaves the others inside a layer, waiting for it: they hear
        of it when its process ends, so it must not go on."""
        if self.mesh.tensor == 1:
            return True
        group = self.mesh.along(TENSOR).get_group()
        store = dist.PrefixStore(f"zerofold/stages/{group.group_name}", dist.distributed_c10d._get_default_store())
        key, until = str(self._rounds), time.monotonic() + _OTHERS_FAIL_S
        count = store.add(key, 1)
        while count < self.mesh.tensor and time.monotonic() < until:
            time.sleep(0.05)
            count = store.add(key, 0)
        return count >= self.mesh.tensor
