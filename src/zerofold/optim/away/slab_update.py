"""One slab's update under way: the jobs that make it, and what its unit's next use waits for."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from zerofold.memory import Done
from zerofold.optim.away.chunks import ChunkEnds
from zerofold.optim.host_pool import PoolJob
from zerofold.optim.host_worker import Job
from zerofold.placement import Tier
from zerofold.slab_away import AwaySlab
from zerofold.timing import DISK, HOST


@dataclass
class SlabUpdate:
    """What `entry.Update` asks for."""

    slab: AwaySlab
    jobs: list[Job | PoolJob] = field(default_factory=list)
    ends: list[ChunkEnds] = field(default_factory=list)  # filled by the jobs
    submitted: float = field(default_factory=time.perf_counter)

    @property
    def waits_for(self) -> str:
        return DISK if self.slab.tier is Tier.NVME else HOST

    @property
    def is_near(self) -> bool:
        return all(job.is_done for job in self.jobs) and all(end.usable.is_under_way for end in self.ends)

    def sent(self, done: Done) -> None:
        """A chunk is through, on a thread of the host's."""
        self.ends.append(ChunkEnds(done, done))
        tape = self.slab.clock.tape
        if tape is not None:
            tape.beside(HOST, self.slab.unit, self.submitted, what="update")

    def wait(self) -> None:
        for job in self.jobs:
            job.wait()
        for end in self.ends:
            end.usable.wait()
